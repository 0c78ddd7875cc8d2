"""The main thread's part of a run: it waits, turns signals into an orderly end, and notices hangs.

Episodes run in the loop of the engine's executor, in a thread of its own. So Ctrl-C and SIGTERM
never strike inside of them, and Prefect, which installs handlers only where a flow runs in the main
thread, leaves signals to us.
"""

import asyncio
import contextlib
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Coroutine, Generator
from concurrent.futures import Future
from typing import Any

from rich.console import Console
from rich.markup import escape

from areal_pipe.rollout.executor import WorkflowExecutor

STOP_SECONDS = 3.0
"""Limit on finishing what an interrupted run is writing."""
BLOCKED_SECONDS = 10.0
"""The loop has not answered for so long: something in it computes or sleeps instead of awaiting."""
_LOOK_SECONDS = 1.0


class LoopBlocked(KeyboardInterrupt):
    """Interrupted, but the loop does not react: only ending the process ends it."""


def wait_for(executor: WorkflowExecutor, body: Coroutine[Any, Any, None], console: Console) -> None:
    """Run a coroutine in the executor's loop and wait for it.

    Raises:
        KeyboardInterrupt: it was interrupted and has ended; writes under way were finished.
        LoopBlocked: it was interrupted and has not ended within STOP_SECONDS.
        Exception: what the coroutine raised.
    """
    ended = threading.Event()

    async def whole() -> None:
        try:
            await body
        finally:
            ended.set()

    running = executor.run(whole())
    try:
        _wait(running, _Heartbeat(executor, console))
    except KeyboardInterrupt:
        running.cancel()
        if not ended.wait(STOP_SECONDS):
            raise LoopBlocked from None
        raise


def _wait(running: Future[None], heartbeat: "_Heartbeat") -> None:
    while True:
        try:
            return running.result(timeout=_LOOK_SECONDS)
        except TimeoutError:
            if running.done():  # the coroutine's own error
                raise
            heartbeat.look()


class _Heartbeat:
    """Tells, once per hang, what keeps the loop from answering."""

    def __init__(self, executor: WorkflowExecutor, console: Console) -> None:
        self._executor = executor
        self._console = console
        self._answered = time.monotonic()
        self._told = False

    def look(self) -> None:
        silent = time.monotonic() - self._answered
        if silent < BLOCKED_SECONDS:
            self._told = False
        elif not self._told:
            self._told = True
            self._console.print(
                f"[yellow]nothing has moved for {silent:.0f} s[/]: {escape(self._place())} blocks "
                "the event loop. An async function must await, not compute or sleep; a plain `def` "
                "reward runs in a process of its own, with a time limit.",
                soft_wrap=True,
            )
        self._executor.run(self._beat())

    async def _beat(self) -> None:
        self._answered = time.monotonic()
        await asyncio.sleep(0)

    def _place(self) -> str:
        """Where the loop's thread stands: the innermost line that is no library's."""
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented, though
        frame = frames.get(self._executor.thread_ident)
        stack = traceback.extract_stack(frame) if frame else traceback.StackSummary()
        installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
        own = [line for line in stack if not line.filename.startswith(installed)]
        if not own:
            return "something"
        return f"{own[-1].name} ({own[-1].filename}:{own[-1].lineno})"


@contextlib.contextmanager
def sigterm_as_interrupt() -> Generator[None]:
    """Let SIGTERM end a run the way Ctrl-C does."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
