"""A pool of processes for reward functions, each of which can be killed at its time limit.

Why not a ProcessPoolExecutor: it cannot kill a worker that hangs (an infinite loop, a sympy
blow-up, C code that ignores signals), and a worker that dies breaks all calls in flight. Here a
call owns its process while it runs. On timeout the process group gets SIGKILL and a new process
takes over; nobody else notices.

`max_workers` processes compute at once. A call that takes longer than `SLOW_SECONDS` gives its slot
to the next one and goes on at low priority, so that hung rewards do not starve good ones.
"""

import asyncio
import atexit
import contextlib
import functools
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Pipe
from typing import Any

from areal_pipe.errors import RewardCrashed, RewardError, RewardTimeout
from areal_pipe.rewards.worker import LOADED, Reply
from areal_pipe.rewards.zygote import Zygote

SLOW_SECONDS = 0.1
"""A call that takes longer no longer counts against `max_workers`."""
LOAD_SECONDS = 120.0
"""Limit for starting a process and importing the modules of the reward function."""
MAX_PROCESSES = 128
"""Calls in flight at once, hung ones included; further ones queue."""


class UnpicklableReward(RewardError, pickle.PicklingError):
    """The reward function cannot be sent to another process."""


class _Worker:
    """One process and its pipe."""

    def __init__(self, zygote: Zygote) -> None:
        self._pipe, child = Pipe()
        with child:
            self._pid = zygote.fork(child)
        self.slow = False

    def send(self, call: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died while idle: receive() reports that
            self._pipe.send_bytes(call)

    def receive(self, timeout_seconds: float) -> bytes | None:
        """The next message; None on timeout.

        Raises:
            RewardCrashed: the process died.
        """
        try:
            if not self._pipe.poll(max(0.0, timeout_seconds)):
                return None
            return self._pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise RewardCrashed("the process that ran the reward function died") from error

    def demote(self) -> None:
        """Yield to other rewards. Not reversible without privileges: the worker is not reused."""
        self.slow = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpriority(os.PRIO_PROCESS, self._pid, 19)

    def kill(self) -> None:
        """End the process and whatever it started in its group."""
        for end in (os.killpg, os.kill):  # it may not have become a group leader yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(self._pid, signal.SIGKILL)
        self._pipe.close()


class RewardPool:
    """Runs reward functions in killable processes. Thread-safe, usable from any event loop."""

    def __init__(
        self, max_workers: int | None = None, *, memory_limit_bytes: int | None = 4 << 30
    ) -> None:
        """
        Args:
            max_workers: rewards computed at once; the number of CPUs if None.
            memory_limit_bytes: limit on each process's data segment; beyond it: MemoryError.
        """
        if max_workers is not None and max_workers < 1:
            raise ValueError(f"max_workers must be >= 1, got {max_workers}")
        self._memory_limit_bytes = memory_limit_bytes
        self._slots = threading.Semaphore(max_workers or os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(MAX_PROCESSES, thread_name_prefix="reward")
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._zygote: Zygote | None = None
        self._closed = False
        atexit.register(self.close)

    async def call(
        self, fn: Callable[..., Any], /, *args: Any, timeout_seconds: float, **kwargs: Any
    ) -> float:
        """Compute `fn(*args, **kwargs)` in another process.

        Raises:
            RewardTimeout: no answer within `timeout_seconds`; the process was killed.
            RewardCrashed: the process died.
            UnpicklableReward: `fn` or its arguments cannot be sent.
            Exception: whatever `fn` raised, with its traceback as a note.
        """
        run = functools.partial(self._run, _pickled(fn, args, kwargs), timeout_seconds)
        return await asyncio.wrap_future(self._threads.submit(run))

    def close(self) -> None:
        """Kill all processes. Calls in flight end with RewardCrashed."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for worker in idle:
            worker.kill()
        for worker in busy:
            worker.kill()
        if self._zygote is not None:
            self._zygote.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        atexit.unregister(self.close)

    def _run(self, call: bytes, timeout_seconds: float) -> float:
        self._slots.acquire()
        slot = contextlib.ExitStack()
        slot.callback(self._slots.release)
        worker = self._take()
        try:
            answer = _converse(worker, call, timeout_seconds, free_slot=slot.close)
        except BaseException:
            self._put(worker, reuse=False)
            raise
        finally:
            slot.close()
        self._put(worker, reuse=not worker.slow)
        if answer.error is not None:
            raise answer.error
        assert answer.reward is not None
        return answer.reward

    def _take(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise RewardCrashed("the reward pool is closed")
            if self._zygote is None:
                self._zygote = Zygote(self._memory_limit_bytes)
            worker = self._idle.pop() if self._idle else _Worker(self._zygote)
            self._busy.add(worker)
            return worker

    def _put(self, worker: _Worker, *, reuse: bool) -> None:
        with self._lock:
            ours = worker in self._busy
            self._busy.discard(worker)
            if reuse and not self._closed:
                self._idle.append(worker)
                return
        if ours and not self._closed:
            worker.kill()


def _converse(
    worker: _Worker, call: bytes, timeout_seconds: float, *, free_slot: Callable[[], None]
) -> Reply:
    """Send one call and wait for its reply, within the limit counted from when it was loaded."""
    worker.send(call)
    message = worker.receive(LOAD_SECONDS)
    if message is None:
        raise RewardTimeout(f"the reward function's modules did not import in {LOAD_SECONDS:g} s")
    if message != LOADED:
        return pickle.loads(message)
    deadline = time.monotonic() + timeout_seconds
    message = worker.receive(min(SLOW_SECONDS, timeout_seconds))
    if message is None:
        worker.demote()
        free_slot()
        message = worker.receive(deadline - time.monotonic())
    if message is None:
        raise RewardTimeout(
            f"the reward function must return within {timeout_seconds:g} s; it did not, and its "
            "process was killed; raise the reward timeout if it needs longer"
        )
    return pickle.loads(message)


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    main_path = getattr(sys.modules["__main__"], "__file__", None)
    in_main = getattr(fn, "__module__", None) == "__main__"
    try:
        return pickle.dumps((main_path if in_main else None, pickle.dumps((fn, args, kwargs))))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UnpicklableReward(
            "a reward function and its arguments must be picklable, to run in a process that can "
            f"be killed: {error}; define the function at the top level of a module"
        ) from error


@functools.cache
def default_pool() -> RewardPool:
    """The pool that workflows share unless they are given another."""
    return RewardPool()
