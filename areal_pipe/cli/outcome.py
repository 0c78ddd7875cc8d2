"""How commands end: exit codes that mean something, and errors without a traceback."""

import contextlib
import os
import sys
from collections.abc import Generator
from typing import NoReturn

from rich.console import Console

from areal_pipe.contract.errors import ArealPipeError, ConfigError, DatasetError, WorkflowError

EXIT_FAILED_EPISODES = 1
"""The run ended, but episodes failed (or `check` found problems)."""
EXIT_BAD_INPUT = 2
"""Configuration, dataset or workflow cannot be run as they are."""
EXIT_ERROR = 3
"""Storage, engine or orchestration broke."""
EXIT_INTERRUPTED = 130

_EXTRA_OF = {"torch": "torch", "transformers": "torch", "math_verify": "rewards", "s3fs": "s3"}

errors_console = Console(stderr=True)


class Unstoppable(ArealPipeError):
    """The run is over, but threads of a library go on: only ending the process ends them."""


def end_process(code: int) -> NoReturn:
    """Exit without waiting for any thread."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def report_errors() -> Generator[None]:
    """Turn our own errors into a message and an exit code; others are bugs and keep a traceback."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = _EXTRA_OF.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        errors_console.print(
            f"This needs the package {error.name!r}: pip install 'areal-pipe\\[{extra}]'"
        )
        sys.exit(EXIT_BAD_INPUT)
    except ArealPipeError as error:
        bad_input = isinstance(error, ConfigError | DatasetError | WorkflowError)
        errors_console.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        errors_console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        code = EXIT_BAD_INPUT if bad_input else EXIT_ERROR
        if isinstance(error, Unstoppable):
            end_process(code)
        sys.exit(code)
