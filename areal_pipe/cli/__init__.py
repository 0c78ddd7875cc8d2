"""The command `areal-pipe`. Its help needs neither torch nor Prefect."""

import sys

from areal_pipe.cli.app import app
from areal_pipe.cli.outcome import report_errors


def main() -> None:
    """Entry point of the `areal-pipe` command."""
    with report_errors():
        app()
    sys.exit(0)
