"""The process from which reward workers are forked: it has imported what most rewards need.

Not multiprocessing's fork server: that one imports the caller's main script into every worker,
which costs seconds for each replaced worker when the script imports torch.

The parent asks over a socket pair, handing over one end of the new worker's pipe, and gets the
worker's pid. When the parent dies, the socket closes, the zygote ends, and its workers die with it.
"""

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

from areal_pipe.contract.errors import RewardCrashed
from areal_pipe.rewards import worker

_PRELOADED = ("areal_pipe.rewards.math_answers",)
_PID_BYTES = 8


class Zygote:
    """The parent's side. Thread-safe."""

    def __init__(self, memory_limit_bytes: int | None) -> None:
        """
        Args:
            memory_limit_bytes: limit on each worker's data segment.
        """
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    __name__,
                    str(theirs.fileno()),
                    str(memory_limit_bytes or 0),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is the parent's to handle
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )

    def fork(self, pipe: Connection) -> int:
        """Start a worker that serves `pipe`; returns its pid.

        Raises:
            RewardCrashed: the zygote is gone.
        """
        with self._lock:
            try:
                socket.send_fds(self._socket, [b"f"], [pipe.fileno()])
                answer = self._socket.recv(_PID_BYTES, socket.MSG_WAITALL)
            except OSError as error:
                raise RewardCrashed(
                    f"the process that starts reward workers died: {error}"
                ) from error
        if len(answer) < _PID_BYTES:
            raise RewardCrashed("the process that starts reward workers died; see its output above")
        return int.from_bytes(answer, "big")

    def close(self) -> None:
        """End it and all its workers."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def main(fd: int, memory_limit_bytes: int | None) -> None:
    """Fork a worker for every request until the parent goes away."""
    for module in _PRELOADED:
        with contextlib.suppress(ImportError):  # the [rewards] extra is optional
            importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps workers
    requests = socket.socket(fileno=fd)
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            worker.serve(Connection(descriptors[0]), memory_limit_bytes)
            os._exit(0)
        os.close(descriptors[0])
        requests.sendall(pid.to_bytes(_PID_BYTES, "big"))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) or None)
