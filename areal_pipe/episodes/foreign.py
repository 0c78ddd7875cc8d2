"""The boundary to user code in this process: whatever it raises comes out as an Exception.

Workflows, filters and templates may raise anything, KeyboardInterrupt and GeneratorExit included.
Only the cancellation of our own task passes through. Their exceptions are foreign, too: `str` of
one may raise.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from areal_pipe.contract.errors import RewardError, WorkflowError
from areal_pipe.contract.outages import is_infrastructure
from areal_pipe.contract.trajectory import Failure
from areal_pipe.episodes.tracebacks import MAX_CHARACTERS, user_traceback

T = TypeVar("T")

MAX_MESSAGE = 4000
"""Characters kept of an exception's message."""


class Escaped(WorkflowError):
    """User code let something escape that would end a task or a process."""


async def awaited(call: Callable[[], Awaitable[T]]) -> T:
    """Call and await user code, in a task of its own.

    In our own task, an error of a task that user code started may close our coroutines instead of
    being raised in them: asyncio throws it from outside, and GeneratorExit means closing.

    Raises:
        Exception: whatever it raised; what is no Exception comes as `Escaped`.
        asyncio.CancelledError: this very task was cancelled, and the user's with it.
    """
    running = asyncio.ensure_future(_caught(call))
    try:
        await asyncio.wait([running])
    except asyncio.CancelledError:
        running.cancel()
        await asyncio.wait([running])
        raise
    value, error = running.result()
    if error is None:
        return cast(T, value)
    raise _as_exception(error)


async def _caught(call: Callable[[], Awaitable[T]]) -> tuple[T | None, BaseException | None]:
    try:
        return await call(), None
    # KeyboardInterrupt and SystemExit would end the loop, CancelledError the episode.
    except BaseException as error:  # noqa: BLE001
        return None, error


def called(call: Callable[[], T]) -> T:
    """Call user code that is not async.

    Raises:
        Exception: whatever it raised; what is no Exception comes as `Escaped`.
    """
    try:
        return call()
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        raise _as_exception(error) from error


def _as_exception(error: BaseException) -> Exception:
    if isinstance(error, Exception):
        return error
    escaped = Escaped(
        f"a workflow must not let {type(error).__name__} escape, it did: {message_of(error)}"
    )
    escaped.__cause__ = error
    return escaped


def message_of(error: BaseException) -> str:
    """The exception's text, bounded; an exception whose `str` raises is described instead."""
    try:
        return str(error)[:MAX_MESSAGE]
    # Whatever a foreign __str__ does is no reason to lose the failure.
    except BaseException as another:  # noqa: BLE001
        return f"({type(error).__name__}, whose __str__ raised {type(another).__name__})"


def failure_of(error: Exception, *, stage: str, attempts: int = 1, output: str = "") -> Failure:
    """An exception as the record of a failed episode.

    Args:
        output: what user code printed meanwhile.
    """
    if isinstance(error, RewardError) and error.raised is not None:
        error_class, message = error.raised, error.raised_message
    elif isinstance(error, Escaped) and error.__cause__ is not None:
        error_class, message = type(error.__cause__).__name__, message_of(error)
    else:
        error_class, message = type(error).__name__, message_of(error)
    trace = user_traceback(error)
    if isinstance(error, RewardError):
        trace = error.raised_traceback or trace
        output = "\n".join(filter(None, (output, error.output)))
    return Failure(
        stage=stage,
        error_class=error_class,
        message=message,
        attempts=attempts,
        infrastructure=is_infrastructure(error),
        traceback=trace[-MAX_CHARACTERS:],
        output=output,
    )
