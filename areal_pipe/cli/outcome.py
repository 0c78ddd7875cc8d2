"""How commands end: exit codes that mean something, and errors without a traceback."""

import contextlib
import sys
from collections.abc import Generator

from rich.console import Console

from areal_pipe.errors import ArealPipeError, ConfigError, DatasetError, WorkflowError

EXIT_FAILED_EPISODES = 1
"""The run ended, but episodes failed (or `check` found problems)."""
EXIT_BAD_INPUT = 2
"""Configuration, dataset or workflow cannot be run as they are."""
EXIT_ERROR = 3
"""Storage, engine or orchestration broke."""
EXIT_INTERRUPTED = 130

errors_console = Console(stderr=True)


@contextlib.contextmanager
def report_errors() -> Generator[None]:
    """Turn our own errors into a message and an exit code; others are bugs and keep a traceback."""
    try:
        yield
    except ArealPipeError as error:
        bad_input = isinstance(error, ConfigError | DatasetError | WorkflowError)
        errors_console.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        errors_console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(EXIT_BAD_INPUT if bad_input else EXIT_ERROR)
