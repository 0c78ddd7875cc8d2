"""A Prefect server of our own, as a child process: started when needed, stopped when done.

Not Prefect's ephemeral server: that one has no UI and drops task runs at exit. The database stays
in the state folder, so that runs can be looked at later. The settings below were measured: untuned,
the recorder keeps up with about 15 task runs per second, tuned with about 200.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from areal_pipe.contract.errors import ArealPipeError

START_SECONDS = 90.0
STOP_SECONDS = 2.5
"""For the server to end by itself; what it has received is in its database by then."""
DRAIN_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1

TUNED = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}


class ServerError(ArealPipeError):
    """The Prefect server did not start, or died."""


class PrefectServer:
    """A running server."""

    def __init__(self, url: str) -> None:
        """
        Args:
            url: address of the UI; the API is below it.
        """
        self.url = url

    def revive(self) -> None:
        """Start it again if it died: only where it is ours."""

    @property
    def api_url(self) -> str:
        return f"{self.url}/api"

    def count_task_runs(self, tag: str, *, ended: bool = False) -> int:
        """Task runs with a tag that the server has recorded."""
        runs: dict[str, Any] = {"tags": {"all_": [tag]}}
        if ended:
            runs["state"] = {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]}}
        request = urllib.request.Request(
            f"{self.api_url}/task_runs/count",
            data=json.dumps({"task_runs": runs}).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return int(response.read())
        except OSError as error:
            raise ServerError(
                f"the Prefect server at {self.url} does not answer ({error}); what is committed "
                "is in the store, run again for the rest"
            ) from error

    def is_healthy(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"{self.api_url}/health", timeout=5) as response:
                return response.status == 200
        except OSError:
            return False

    def drain(self, tag: str, expected: int) -> int:
        """Wait until `expected` ended task runs are recorded; returns how many are."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while True:
            recorded = self.count_task_runs(tag, ended=True)
            if recorded >= expected or time.monotonic() > deadline:
                return recorded
            time.sleep(0.5)


class ManagedServer(PrefectServer):
    """A server that is our child process; started by the constructor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = _free_port()
        super().__init__(f"http://127.0.0.1:{self._port}")
        (folder / "server.log").unlink(missing_ok=True)
        self.process = _start(folder, self._port)

    def revive(self) -> None:
        if self.process.poll() is not None:
            self.process = _start(self._folder, self._port)

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self.is_healthy():
            died = self.process.poll() is not None
            if died or time.monotonic() > deadline:
                why = "exited" if died else f"is not up after {START_SECONDS:g} s"
                tail = (self._folder / "server.log").read_text(errors="replace")[-2000:]
                raise ServerError(f"the local Prefect server {why}; the end of its log:\n{tail}")
            time.sleep(0.2)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to the whole process group."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)


@contextlib.contextmanager
def managed_server(
    state_folder: Path | None = None, *, while_starting: Callable[[], object] = lambda: None
) -> Generator[ManagedServer]:
    """A server on a free port of this machine, stopped at the end.

    Args:
        state_folder: database and log; by default `~/.local/state/areal-pipe/prefect`. A folder
            that another server is using is left to it: this one then gets a temporary one.
        while_starting: called while the server starts, which takes some seconds.
    """
    with _own_folder(state_folder or default_state_folder()) as folder:
        server = ManagedServer(folder)
        try:
            while_starting()
            server.wait_until_healthy()
            yield server
        finally:
            server.stop()


def default_state_folder() -> Path:
    """Where state belongs by the XDG base directory specification."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "areal-pipe" / "prefect"


@contextlib.contextmanager
def _own_folder(folder: Path) -> Generator[Path]:
    """The folder, locked; or a temporary one, if another process holds the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with tempfile.TemporaryDirectory(prefix="areal-pipe-prefect-") as temporary:
                yield Path(temporary)
            return
        yield folder


def _start(folder: Path, port: int) -> "subprocess.Popen[bytes]":
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    environment |= TUNED | {
        "PREFECT_HOME": str(folder),
        # The UI is a page that asks the API by itself: it must know our port.
        "PREFECT_SERVER_UI_API_URL": f"http://127.0.0.1:{port}/api",
    }
    with (folder / "server.log").open("ab") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "prefect",
                "server",
                "start",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one C call, no locks
        )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
