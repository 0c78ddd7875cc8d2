"""The process from which reward workers are forked: it has imported what most rewards need.

Not multiprocessing's fork server: that one imports the caller's main script into every worker,
which costs seconds for each replaced worker when the script imports torch.

The parent asks over a socket pair. `f`, with one end of the new worker's pipe and the descriptor
for its output, starts a worker and gives its pid. `k` with a pid kills a worker and all that it has
started: a reward's processes may have left its process group, but they stay its descendants, or
become the zygote's. When the parent dies, the socket closes, the zygote ends, and its workers die
with it.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from areal_pipe.contract.errors import RewardCrashed
from areal_pipe.rewards import worker
from areal_pipe.rewards.process_state import descendants

_PRELOADED = ("areal_pipe.rewards.math_answers",)
_PID_BYTES = 8
_KILL_SECONDS = 5.0
_CLOSE_SECONDS = 1.0
"""Limit on ending workers and what they have started, before the zygote itself is killed."""
_FORK, _KILL = b"f", b"k"

# The standard library comes first: a user's `types.py` or `random.py` must not shadow it.
_BOOT = """
import json, sys, sysconfig
given = json.loads(sys.argv[1])
standard = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
own = [p for p in sys.path if p.endswith(".zip") or p.endswith("lib-dynload") or p in standard]
sys.path[:] = own + [p for p in given if p not in own]
from areal_pipe.rewards.zygote import main
main(int(sys.argv[2]), int(sys.argv[3]) or None)
"""


class Zygote:
    """The parent's side. Thread-safe."""

    def __init__(self, memory_limit_bytes: int | None) -> None:
        """
        Args:
            memory_limit_bytes: limit on each worker's data segment.
        """
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        paths = json.dumps([str(path) or os.getcwd() for path in sys.path])  # noqa: PTH109
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    _BOOT,
                    paths,
                    str(theirs.fileno()),
                    str(memory_limit_bytes or 0),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is the parent's to handle
                env=environment,
            )

    def fork(self, pipe: Connection, output: int) -> int:
        """Start a worker that serves `pipe` and prints to `output`; returns its pid.

        Raises:
            RewardCrashed: the zygote is gone.
        """
        return self._ask(_FORK, [pipe.fileno(), output])

    def kill(self, pid: int) -> None:
        """Kill a worker and everything it has started.

        Raises:
            RewardCrashed: the zygote is gone, and its workers with it.
        """
        self._ask(_KILL + pid.to_bytes(_PID_BYTES, "big"), [])

    def _ask(self, request: bytes, descriptors: list[int]) -> int:
        with self._lock:
            try:
                socket.send_fds(self._socket, [request], descriptors)
                answer = self._socket.recv(_PID_BYTES, socket.MSG_WAITALL)
            except OSError as error:
                raise RewardCrashed(
                    f"the process that starts reward workers died: {error}"
                ) from error
        if len(answer) < _PID_BYTES:
            raise RewardCrashed("the process that starts reward workers died; see its output above")
        return int.from_bytes(answer, "big")

    def close(self) -> None:
        """End it and all its workers, and what they have started."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()


def main(fd: int, memory_limit_bytes: int | None) -> None:
    """Serve requests until the parent goes away."""
    for module in _PRELOADED:
        with contextlib.suppress(ImportError):  # the [rewards] extra is optional
            importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps workers
    worker.become_subreaper()
    requests = socket.socket(fileno=fd)
    workers: set[int] = set()
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 1 + _PID_BYTES, 2)
        if request[:1] == _FORK:
            pid = _forked(requests, descriptors, memory_limit_bytes)
            workers.add(pid)
        elif request[:1] == _KILL:
            pid = int.from_bytes(request[1:], "big")
            workers.discard(pid)
            _end(lambda pid=pid: [pid, *descendants(pid)])
            _end(lambda: _strays(workers))
        else:
            _end(lambda: list(descendants(os.getpid())))
            os._exit(0)  # at once: the parent is waiting, or gone
        requests.sendall(pid.to_bytes(_PID_BYTES, "big"))


def _forked(requests: socket.socket, descriptors: list[int], memory_limit_bytes: int | None) -> int:
    pid = os.fork()
    if pid == 0:
        requests.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pipe, output = descriptors
        worker.serve(Connection(pipe), output, memory_limit_bytes)
        os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def _strays(workers: set[int]) -> list[int]:
    """Children that are no workers: orphans of a killed one, and what they have started."""
    found: list[int] = []
    own = os.getpid()
    for pid in descendants(own):
        if pid not in workers and _parent(pid) == own:
            found += [pid, *descendants(pid)]
    return found


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _end(find: Callable[[], list[int]]) -> None:
    """Kill processes until none is found: some may have been forking meanwhile."""
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        alive = [pid for pid in find() if _signalled(pid, signal.SIGSTOP)]
        if not alive:
            return
        for pid in alive:
            _signalled(pid, signal.SIGKILL)
        time.sleep(0.002)


def _signalled(pid: int, sign: signal.Signals) -> bool:
    try:
        os.kill(pid, sign)
    except (ProcessLookupError, PermissionError):
        return False
    return True
