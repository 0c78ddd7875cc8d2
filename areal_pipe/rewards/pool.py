"""A pool of processes for reward functions, each of which can be killed at its time limit.

Why not a ProcessPoolExecutor: it cannot kill a worker that hangs (an infinite loop, a sympy
blow-up, C code that ignores signals), and a worker that dies breaks all calls in flight. Here a
call owns its process while it runs. On timeout the process and all that it has started get SIGKILL
and a new process takes over; nobody else notices.

Calls run in two lanes, so that hung rewards do not starve good ones. Every call starts in the quick
lane. One that takes longer than `QUICK_SECONDS` is stopped there (SIGSTOP) and goes on in the slow
lane when it has room. The limit counts the time a call ran, not what it waited for a lane or a CPU.
"""

import asyncio
import atexit
import contextlib
import functools
import json
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import cloudpickle

from areal_pipe.contract.errors import RewardCrashed, RewardError, RewardTimeout
from areal_pipe.rewards.worker import LOADED
from areal_pipe.rewards.zygote import Zygote

QUICK_SECONDS = 0.1
"""A call that takes longer leaves the quick lane."""
SLOW_LANE = 4
"""Room in the slow lane, per room in the quick one."""
LOAD_SECONDS = 120.0
"""Limit for starting a process and importing the modules of the reward function."""
MAX_OUTPUT_BYTES = 8000
"""The end of what a reward printed that is kept for its failure."""
MAX_PROCESSES = 128
"""Processes at once, stopped ones included; further calls queue."""


class UnpicklableReward(RewardError, pickle.PicklingError):
    """The reward function cannot be sent to another process."""


class _Worker:
    """One process, the pipe for calls and answers, and the pipe for what it prints."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._pipe, child = Pipe()
        self._output, theirs = Pipe(duplex=False)
        os.set_blocking(self._output.fileno(), False)
        self._printed = b""
        with child, theirs:
            self._pid = zygote.fork(child, theirs.fileno())

    def send(self, call: bytes) -> None:
        self._printed = b""
        with contextlib.suppress(BrokenPipeError):  # it died while idle: receive() reports that
            self._pipe.send_bytes(call)

    def receive(self, timeout_seconds: float) -> bytes | None:
        """The next message; None on timeout. Takes what is printed meanwhile.

        Raises:
            RewardCrashed: the process died.
        """
        deadline = time.monotonic() + max(0.0, timeout_seconds)
        sources: list[Connection] = [self._pipe, self._output]
        try:
            while True:
                ready = wait(sources, max(0.0, deadline - time.monotonic()))
                if self._output in ready and not self._read_output():
                    sources = [self._pipe]
                if self._pipe in ready:
                    message = self._pipe.recv_bytes()
                    self._read_output()
                    return message
                if time.monotonic() >= deadline:
                    return None
        except (EOFError, OSError) as error:
            self._read_output()
            raise RewardCrashed(
                "the process that ran the reward function died: it exited, ran out of memory, or "
                "was killed by a signal; run the function by itself on this row to see why"
            ) from error

    @property
    def printed(self) -> str:
        """The end of what the current call printed."""
        return self._printed.decode(errors="replace")

    def _read_output(self) -> bool:
        """Take what is there; False once nothing more can come."""
        try:
            chunk = os.read(self._output.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._printed = (self._printed + chunk)[-MAX_OUTPUT_BYTES:]
        return bool(chunk)

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
        """End the process and whatever it started. From any thread."""
        self._signal(signal.SIGKILL)
        with contextlib.suppress(RewardCrashed):  # without the zygote, its workers are dead
            self._zygote.kill(self._pid)

    def close(self) -> None:
        """Kill it and close the pipes. From the thread that reads it."""
        self.kill()
        self._pipe.close()
        self._output.close()

    def _signal(self, sign: signal.Signals) -> None:
        for send in (os.killpg, os.kill):  # it may not have become a group leader yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                send(self._pid, sign)


@dataclass(frozen=True, slots=True)
class _Order:
    """What is to be computed, and how."""

    call: bytes
    timeout_seconds: float
    own_process: bool


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
        """Compute `fn(*args, **kwargs)` in another process. See `compute` for errors.

        Raises:
            UnpicklableReward: `fn` or its arguments cannot be sent.
        """
        call = pickled_call(fn, args, kwargs)
        return await self.compute(call, timeout_seconds=timeout_seconds)

    async def compute(
        self, call: bytes, *, timeout_seconds: float, own_process: bool = False
    ) -> float:
        """Compute a pickled call in another process.

        Args:
            own_process: use a fresh process, and never again, instead of a warm one.

        Raises:
            RewardTimeout: no answer within `timeout_seconds`; the process was killed.
            RewardCrashed: the process died, or the pool was closed.
            RewardError: the function raised (see `raised`), or gave no number.
        """
        run = functools.partial(self._run, _Order(call, timeout_seconds, own_process))
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
        if zygote is not None:
            zygote.close()  # and all workers with it
        for worker in idle:
            worker.close()
        for worker in busy:
            worker.kill()
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

    def _run(self, order: "_Order") -> float:
        with contextlib.ExitStack() as lane:
            _enter(lane, self._quick_lane)
            worker = self._take(fresh=order.own_process)
            try:
                answer = self._converse(worker, order, lane)
            except BaseException as error:
                if isinstance(error, RewardError):
                    error.output = worker.printed
                self._put(worker, reuse=False)
                raise
        printed = worker.printed
        self._put(worker, reuse=answer.pop("reusable", False) and not order.own_process)
        if "reward" in answer:
            return float(answer["reward"])
        raise _raised(answer, printed)

    def _converse(
        self, worker: _Worker, order: "_Order", lane: contextlib.ExitStack
    ) -> dict[str, Any]:
        """Send one call and wait for its answer, changing lanes if it takes long."""
        timeout_seconds = order.timeout_seconds
        worker.send(order.call)
        message = worker.receive(LOAD_SECONDS)
        if message is None:
            raise RewardTimeout(f"a reward's modules must import within {LOAD_SECONDS:g} s")
        if message != LOADED:
            return _parsed(message)
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
        return _parsed(message)

    def _take(self, *, fresh: bool) -> _Worker:
        with self._lock:
            if self._closed:
                raise RewardCrashed("the reward pool is closed")
            worker = self._idle.pop() if self._idle and not fresh else self._fork()
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


def pickled_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, seed: int = 0
) -> bytes:
    """A call as it is sent to a worker: functions of modules by name, all others by value.

    Raises:
        UnpicklableReward: it cannot be sent.
    """
    try:
        pickled_fn = cloudpickle.dumps(fn)
        return pickle.dumps((pickled_fn, cloudpickle.dumps((args, kwargs)), seed))
    # Foreign objects may fail to pickle in any way.
    except Exception as error:
        raise UnpicklableReward(
            "a reward function and its arguments must be picklable, to run in a process that can "
            f"be killed: {type(error).__name__}: {error}; define the function at the top level of "
            "a module, and let it load there what cannot be sent"
        ) from error


def _parsed(message: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(message)
        if not isinstance(answer, dict) or not ("reward" in answer or "raised" in answer):
            raise ValueError("neither a reward nor an error")
    except ValueError as error:
        raise RewardCrashed(f"the process that ran the reward function sent {error}") from error
    return answer


def _raised(answer: dict[str, Any], printed: str) -> RewardError:
    """What the function raised, as one error of ours."""
    error = RewardError(f"the reward function raised {answer['raised']}: {answer['message']}")
    error.raised = answer["raised"]
    error.raised_message = answer["message"]
    error.raised_traceback = answer["traceback"]
    error.infrastructure = answer["infrastructure"]
    error.output = printed
    return error


def close_default_pool() -> None:
    """Kill what still runs in the shared pool; the next call starts a new one."""
    if default_pool.cache_info().currsize:
        default_pool().close()
        default_pool.cache_clear()


@functools.cache
def default_pool() -> RewardPool:
    """The pool that workflows share unless they are given another."""
    return RewardPool()
