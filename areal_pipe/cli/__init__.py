"""The command `areal-pipe`. Its help needs neither torch nor Prefect."""

import sys
from pathlib import Path

from areal_pipe.cli.app import app
from areal_pipe.cli.outcome import report_errors


def main() -> None:
    """Entry point of the `areal-pipe` command."""
    sys.path.append(str(Path.cwd()))  # workflows and rewards of the working directory
    with report_errors():
        app()
    sys.exit(0)
