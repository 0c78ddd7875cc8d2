"""A pool of processes for reward functions, each of which can be killed at its time limit.

Why not a ProcessPoolExecutor: it cannot kill a worker that hangs (an infinite loop, a sympy
blow-up, C code that ignores signals), and a worker that dies breaks all calls in flight. Here a
call owns its process while it runs. On timeout the process group gets SIGKILL and a new process
takes over; nobody else notices.

Calls run in two lanes, so that hung rewards do not starve good ones. Every call starts in the quick
lane. One that takes longer than `QUICK_SECONDS` is stopped there (SIGSTOP) and goes on in the slow
lane when it has room. The limit counts the time a call ran, not what it waited for a lane or a CPU.
"""

import asyncio
import atexit
import contextlib
import functools
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from areal_pipe.contract.errors import RewardCrashed, RewardError, RewardTimeout
from areal_pipe.rewards.worker import LOADED, Reply
from areal_pipe.rewards.zygote import Zygote

QUICK_SECONDS = 0.1
"""A call that takes longer leaves the quick lane."""
SLOW_LANE = 4
"""Room in the slow lane, per room in the quick one."""
LOAD_SECONDS = 120.0
"""Limit for starting a process and importing the modules of the reward function."""
MAX_PROCESSES = 128
"""Processes at once, stopped ones included; further calls queue."""


class UnpicklableReward(RewardError, pickle.PicklingError):
    """The reward function cannot be sent to another process."""


class _Worker:
    """One process and its pipe."""

    def __init__(self, zygote: Zygote) -> None:
        self._pipe, child = Pipe()
        with child:
            self._pid = zygote.fork(child)

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
            raise RewardCrashed(
                "the process that ran the reward function died: it exited, ran out of memory, or "
                "was killed by a signal; run the function by itself on this row to see why"
            ) from error

    def stop(self) -> None:
        """Take the CPU away from it until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def starved_seconds(self) -> float:
        """How long it has waited for a CPU in its life, by the kernel's account."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self._pid}/schedstat").read_text().split()[1]) / 1e9
        return 0.0

    def kill(self) -> None:
        """End the process and whatever it started in its group. From any thread."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill it and close the pipe. From the thread that reads it."""
        self.kill()
        self._pipe.close()

    def _signal(self, sign: signal.Signals) -> None:
        for send in (os.killpg, os.kill):  # it may not have become a group leader yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                send(self._pid, sign)


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
        workers = max_workers or os.cpu_count() or 1
        self._memory_limit_bytes = memory_limit_bytes
        self._quick_lane = threading.Semaphore(workers)
        self._slow_lane = threading.Semaphore(SLOW_LANE * workers)
        self._queue: queue.SimpleQueue[tuple[Future[float], Callable[[], float]]] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._threads = 0
        self._calls = 0
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
            RewardCrashed: the process died, or the pool was closed.
            UnpicklableReward: `fn` or its arguments cannot be sent.
            Exception: whatever `fn` raised, with its traceback as a note.
        """
        run = functools.partial(self._run, pickled_call(fn, args, kwargs), timeout_seconds)
        answer: Future[float] = Future()
        self._queue.put((answer, run))
        self._add_thread_for_call()
        return await asyncio.wrap_future(answer)

    def close(self) -> None:
        """Kill all processes. Calls in flight end with RewardCrashed."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy, zygote = list(self._busy), self._zygote
        for worker in idle:
            worker.close()
        for worker in busy:
            worker.kill()
        if zygote is not None:
            zygote.close()
        atexit.unregister(self.close)

    def _add_thread_for_call(self) -> None:
        """One daemon thread per call in flight: the interpreter never waits for a hung reward."""
        with self._lock:
            self._calls += 1
            if self._threads < min(self._calls, MAX_PROCESSES):
                self._threads += 1
                threading.Thread(target=self._serve, name="reward", daemon=True).start()

    def _serve(self) -> None:
        while True:
            answer, run = self._queue.get()
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(run())
                # The boundary of the thread: every error is the answer to its call.
                except BaseException as error:  # noqa: BLE001
                    answer.set_exception(error)
            with self._lock:
                self._calls -= 1

    def _run(self, call: bytes, timeout_seconds: float) -> float:
        with contextlib.ExitStack() as lane:
            _enter(lane, self._quick_lane)
            worker = self._take()
            try:
                reply = self._converse(worker, call, timeout_seconds, lane)
            except BaseException:
                self._put(worker, reuse=False)
                raise
        self._put(worker, reuse=True)
        if reply.error is not None:
            raise reply.error
        assert reply.reward is not None
        return reply.reward

    def _converse(
        self, worker: _Worker, call: bytes, timeout_seconds: float, lane: contextlib.ExitStack
    ) -> Reply:
        """Send one call and wait for its reply, changing lanes if it takes long."""
        worker.send(call)
        message = worker.receive(LOAD_SECONDS)
        if message is None:
            raise RewardTimeout(f"a reward's modules must import within {LOAD_SECONDS:g} s")
        if message != LOADED:
            return pickle.loads(message)
        quick = min(QUICK_SECONDS, timeout_seconds)
        message = worker.receive(quick)
        if message is None:
            worker.stop()
            lane.close()
            _enter(lane, self._slow_lane)
            worker.go_on()
            message = _receive_while_running(worker, timeout_seconds - quick)
        if message is None:
            raise RewardTimeout(
                f"the reward function must return within {timeout_seconds:g} s; it did not, and "
                "its process was killed; raise rollout.reward_timeout if it needs longer"
            )
        return pickle.loads(message)

    def _take(self) -> _Worker:
        with self._lock:
            if self._closed:
                raise RewardCrashed("the reward pool is closed")
            worker = self._idle.pop() if self._idle else self._fork()
            self._busy.add(worker)
            return worker

    def _fork(self) -> _Worker:
        """A new process; a zygote that was killed is replaced once."""
        for attempt in (1, 2):
            if self._zygote is None:
                self._zygote = Zygote(self._memory_limit_bytes)
            try:
                return _Worker(self._zygote)
            except RewardCrashed:
                self._zygote.close()
                self._zygote = None
                if attempt == 2:
                    raise
        raise AssertionError("two attempts either return or raise")

    def _put(self, worker: _Worker, *, reuse: bool) -> None:
        with self._lock:
            self._busy.discard(worker)
            reuse = reuse and not self._closed
            if reuse:
                self._idle.append(worker)
        if not reuse:
            worker.close()


def _enter(lane: contextlib.ExitStack, slots: threading.Semaphore) -> None:
    slots.acquire()
    lane.callback(slots.release)


def _receive_while_running(worker: _Worker, limit_seconds: float) -> bytes | None:
    """The next message; None once the worker has run (or slept) for the limit."""
    started, starved = time.monotonic(), worker.starved_seconds()
    while True:
        ran = time.monotonic() - started - (worker.starved_seconds() - starved)
        if ran >= limit_seconds:
            return None
        message = worker.receive(limit_seconds - ran)
        if message is not None:
            return message


def pickled_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """A call as it is sent to a worker.

    Raises:
        UnpicklableReward: it cannot be sent.
    """
    main_path = getattr(sys.modules["__main__"], "__file__", None)
    in_main = getattr(fn, "__module__", None) == "__main__"
    try:
        return pickle.dumps((main_path if in_main else None, pickle.dumps((fn, args, kwargs))))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UnpicklableReward(
            "a reward function and its arguments must be picklable, to run in a process that can "
            f"be killed: {error}; define the function at the top level of a module"
        ) from error


def close_default_pool() -> None:
    """Kill what still runs in the shared pool; the next call starts a new one."""
    if default_pool.cache_info().currsize:
        default_pool().close()
        default_pool.cache_clear()


@functools.cache
def default_pool() -> RewardPool:
    """The pool that workflows share unless they are given another."""
    return RewardPool()
