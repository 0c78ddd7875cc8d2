"""A lease on a shard: while one run works on it, others leave it alone.

It saves work and nothing else: what keeps two runs from harming each other is the manifest's
compare-and-swap. So a lease may be wrong now and then, when clocks differ or a store is away.

On one machine the holder is alive as long as its process is, and a killed one is free at once.
Elsewhere a lease that has not been renewed for `VALID_SECONDS` is free.
"""

import os
import socket
import time
import uuid
from pathlib import Path

from pydantic import BaseModel, ValidationError

from areal_pipe.contract.errors import ConcurrentWrite, ShardBusy
from areal_pipe.storage.objects import ObjectStore

VALID_SECONDS = 90.0
RENEW_SECONDS = 20.0
_ATTEMPTS = 3


class Holder(BaseModel):
    """Who holds a lease."""

    run: str
    host: str
    machine: str
    """Boot and process namespace: two holders with one `machine` can see each other's processes."""
    pid: int
    process_started: str
    """Start time of the process, by the kernel's clock: process ids are used again."""
    renewed_at: float
    """Unix time."""

    @classmethod
    def this_process(cls) -> "Holder":
        return cls(
            run=uuid.uuid4().hex,
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            process_started=_started(os.getpid()) or "",
            renewed_at=time.time(),
        )

    def is_alive(self) -> bool:
        """Whether it may still be at work."""
        if self.machine == _machine():
            return _started(self.pid) == self.process_started
        return time.time() - self.renewed_at < VALID_SECONDS

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Lease:
    """A lease that this process holds. All methods block."""

    def __init__(self, store: ObjectStore, key: str, holder: Holder, tag: str) -> None:
        self._store, self._key = store, key
        self._holder, self._tag = holder, tag

    @classmethod
    def acquire(cls, store: ObjectStore, key: str) -> "Lease":
        """Take a lease that is free.

        Raises:
            ShardBusy: a living run holds it.
        """
        holder = Holder.this_process()
        for attempt in range(1, _ATTEMPTS + 1):
            stored = store.get_tagged(key)
            if stored and (other := _parsed(stored.data)) and other.is_alive():
                raise ShardBusy(str(other))
            try:
                tag = store.swap(key, _bytes(holder), tag=stored.tag if stored else None)
            except ConcurrentWrite:  # another one was faster: look who
                if attempt == _ATTEMPTS:
                    raise
            else:
                return cls(store, key, holder, tag)
        raise AssertionError("the last attempt returns or raises")

    def renew(self) -> None:
        """Say that we are alive.

        Raises:
            ConcurrentWrite: somebody took us for dead; the manifest decides who commits.
        """
        self._holder = self._holder.model_copy(update={"renewed_at": time.time()})
        self._tag = self._store.swap(self._key, _bytes(self._holder), tag=self._tag)

    def release(self) -> None:
        """Give it back, unless somebody else has taken it."""
        stored = self._store.get_tagged(self._key)
        if stored and stored.tag == self._tag:
            self._store.delete([self._key])


def is_held(store: ObjectStore, key: str) -> bool:
    """Whether a living run holds the lease."""
    holder = _parsed(data) if (data := store.get(key)) else None
    return holder is not None and holder.is_alive()


def _bytes(holder: Holder) -> bytes:
    return holder.model_dump_json().encode()


def _parsed(data: bytes) -> Holder | None:
    try:
        return Holder.model_validate_json(data)
    except ValidationError:  # of another release, or damaged: it protects nothing
        return None


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # no /proc: leases then end by time alone
        return uuid.uuid4().hex


def _started(pid: int) -> str | None:
    """When a process was started; None if there is no such process, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
