"""What one reward changes in its process is put back before the next one runs there."""

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)
_END_SECONDS = 5.0


class ProcessState:
    """Working directory, environment, signal handlers, timers, limits, umask and streams.

    Taken when it is made. Loaded modules and caches are not part of it: workers stay warm.
    """

    def __init__(self) -> None:
        self._folder = Path.cwd()
        self._environment = dict(os.environ)
        self._handlers = {
            sign: signal.getsignal(sign)
            for sign in signal.valid_signals()
            if sign not in _UNCATCHABLE
        }
        self._limits = {limit: resource.getrlimit(limit) for limit in _LIMITS}
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._streams = (sys.stdin, sys.stdout, sys.stderr)
        self._path = list(sys.path)
        self._recursion_limit = sys.getrecursionlimit()
        self._threads = set(threading.enumerate())

    def put_back(self) -> bool:
        """Whether the process is as it was; if not, it must not serve another call."""
        try:
            for timer in _TIMERS:
                signal.setitimer(timer, 0)
            for sign, handler in self._handlers.items():
                if signal.getsignal(sign) != handler and handler is not None:
                    signal.signal(sign, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            for limit, value in self._limits.items():
                if resource.getrlimit(limit) != value:
                    resource.setrlimit(limit, value)
            os.chdir(self._folder)
            if dict(os.environ) != self._environment:
                os.environ.clear()
                os.environ.update(self._environment)
            os.umask(self._umask)
            sys.stdin, sys.stdout, sys.stderr = self._streams
            sys.path[:] = self._path
            sys.setrecursionlimit(self._recursion_limit)
        # A lowered hard limit, a deleted folder, a wedged module: another process takes over.
        except Exception:  # noqa: BLE001
            return False
        return set(threading.enumerate()) <= self._threads


def end_descendants() -> None:
    """Kill whatever this process (a subreaper) has started, and what that has started."""
    deadline = time.monotonic() + _END_SECONDS
    while (found := list(descendants(os.getpid()))) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.001)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def descendants(pid: int) -> Iterator[int]:
    """Processes that a process has started, directly or not, zombies included."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                yield child
                yield from descendants(child)
