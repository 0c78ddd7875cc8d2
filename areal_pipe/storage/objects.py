"""Whole objects on any fsspec URL: written at once or not at all, created once, swapped safely.

A local file is written beside its place and renamed. An S3 object is one PUT, with `If-None-Match`
to create and `If-Match` to swap. Other stores get plain writes and a read-compare before a swap.
All methods block; from a running event loop, call them in a thread that owns the store.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import fsspec
from fsspec.asyn import sync
from fsspec.core import url_to_fs
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from areal_pipe.contract.errors import (
    ConcurrentWrite,
    ConfigError,
    StorageError,
    StorageUnavailable,
)
from areal_pipe.storage.faults import PreconditionFailed, local_errors, remote_errors

T = TypeVar("T")

OUTAGE_ATTEMPTS = 6


@dataclass(frozen=True, slots=True)
class Tagged:
    """An object's content and what identifies this state of it."""

    data: bytes
    tag: str


class ObjectStore(ABC):
    """Keys are relative to the fileroot and use `/`."""

    url: str
    """The fileroot, for messages."""

    @abstractmethod
    def get_tagged(self, key: str) -> Tagged | None:
        """An object with its tag, or None if there is none."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Write an object whole, replacing an older one."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless the key is taken; whether it was written."""

    @abstractmethod
    def swap(self, key: str, data: bytes, *, tag: str | None) -> str:
        """Replace the state known by `tag` (None: no object yet); returns the new tag.

        Raises:
            ConcurrentWrite: it is no longer in that state.
        """

    @abstractmethod
    def list(self, prefix: str) -> list[str]:
        """Keys below `{prefix}/`, sorted, never from a cache."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; missing ones are fine."""

    @abstractmethod
    def open(self, key: str) -> Any:
        """A seekable binary file to read."""

    def get(self, key: str) -> bytes | None:
        found = self.get_tagged(key)
        return found.data if found else None

    def put_many(self, objects: Mapping[str, bytes]) -> None:
        """Write several objects, each whole."""
        for key, data in objects.items():
            self.put(key, data)

    def where(self, key: str) -> str:
        """The full address, for people."""
        return f"{self.url.rstrip('/')}/{key}"


def open_store(url: str, options: Mapping[str, Any] | None = None) -> ObjectStore:
    """The store behind a fileroot.

    Args:
        url: a path or any fsspec URL.
        options: fsspec storage options (credentials, endpoint); never logged.

    Raises:
        ConfigError: the protocol is unknown or its package is not installed.
    """
    try:
        fs, root = url_to_fs(url, **(options or {}))
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"fileroot must be a path or an fsspec URL, got {url!r}: {error}"
        ) from error
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
    if "file" in protocols:
        return LocalStore(Path(root))
    if "s3" in protocols:
        return S3Store(fs, root, url)
    return FsspecStore(fs, root, url)


class LocalStore(ObjectStore):
    """A folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.url = str(root)

    def get_tagged(self, key: str) -> Tagged | None:
        with local_errors(self.where(key)):
            try:
                data = self._path(key).read_bytes()
            except FileNotFoundError:
                return None
        return Tagged(data, _digest(data))

    def put(self, key: str, data: bytes) -> None:
        with self._written(key, data) as temporary:
            temporary.replace(self._path(key))

    def create(self, key: str, data: bytes) -> bool:
        with self._written(key, data) as temporary:
            try:
                os.link(temporary, self._path(key))
            except FileExistsError:
                return False
        return True

    def swap(self, key: str, data: bytes, *, tag: str | None) -> str:
        with local_errors(self.where(key)), self._locked_folder(key):
            current = self.get_tagged(key)
            if (current.tag if current else None) != tag:
                raise _changed(self.where(key))
            self.put(key, data)
        return _digest(data)

    def list(self, prefix: str) -> list[str]:
        with local_errors(self.where(prefix)):
            folder = self._path(prefix)
            files = [p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")]
        return sorted(p.relative_to(self._root).as_posix() for p in files)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            with local_errors(self.where(key)):
                self._path(key).unlink(missing_ok=True)

    def open(self, key: str) -> Any:
        with local_errors(self.where(key)):
            return self._path(key).open("rb")

    def _path(self, key: str) -> Path:
        return self._root / key

    @contextlib.contextmanager
    def _written(self, key: str, data: bytes) -> Generator[Path]:
        """The content on disk under a hidden name, removed at the end."""
        path = self._path(key)
        temporary = path.with_name(f".{path.name[:64]}.{uuid.uuid4().hex}")
        with local_errors(self.where(key)):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                yield temporary
                _sync_folder(path.parent)
            finally:
                temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked_folder(self, key: str) -> Generator[None]:
        folder = self._path(key).parent
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


class FsspecStore(ObjectStore):
    """Any other file system, with what fsspec offers everywhere."""

    def __init__(self, fs: fsspec.AbstractFileSystem, root: str, url: str) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self.url = url

    def get_tagged(self, key: str) -> Tagged | None:
        def read() -> Tagged | None:
            try:
                data = self._fs.cat_file(self._path(key))
            except FileNotFoundError:
                return None
            return Tagged(cast(bytes, data), _digest(cast(bytes, data)))

        return self._attempt(key, read)

    def put(self, key: str, data: bytes) -> None:
        self._attempt(key, lambda: self._fs.pipe_file(self._path(key), data))

    def create(self, key: str, data: bytes) -> bool:
        if self.get_tagged(key) is not None:
            return False
        self.put(key, data)
        return True

    def swap(self, key: str, data: bytes, *, tag: str | None) -> str:
        current = self.get_tagged(key)
        if (current.tag if current else None) != tag:
            raise _changed(self.where(key))
        self.put(key, data)
        return _digest(data)

    def put_many(self, objects: Mapping[str, bytes]) -> None:
        if objects:
            paths = {self._path(key): data for key, data in objects.items()}
            self._attempt(next(iter(objects)), lambda: self._fs.pipe(paths))

    def list(self, prefix: str) -> list[str]:
        def find() -> list[str]:
            self._fs.invalidate_cache()
            return cast(list[str], self._fs.find(self._path(prefix)))

        keys = (path[len(self._root) + 1 :] for path in self._attempt(prefix, find))
        # Some servers list the emptied folder itself.
        return sorted(key for key in keys if key.startswith(f"{prefix}/"))

    def delete(self, keys: Iterable[str]) -> None:
        def remove(key: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(key))

        for key in keys:
            self._attempt(key, functools.partial(remove, key))

    def open(self, key: str) -> Any:
        return self._attempt(key, lambda: self._fs.open(self._path(key), "rb"))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _attempt(self, key: str, call: Callable[[], T]) -> T:
        """Call, again after outages, with errors of the protocol turned into ours."""
        retrying = Retrying(
            retry=retry_if_exception_type(StorageUnavailable),
            stop=stop_after_attempt(OUTAGE_ATTEMPTS),
            wait=wait_random_exponential(0.2, max=10),
            reraise=True,
        )

        def translated() -> T:
            with remote_errors(self.where(key)):
                return call()

        return retrying(translated)


class S3Store(FsspecStore):
    """S3 with conditional writes."""

    def get_tagged(self, key: str) -> Tagged | None:
        def read() -> Tagged | None:
            try:
                answer = self._call("get_object", key)
            except FileNotFoundError:
                self._check_bucket()
                return None
            return answer

        return self._attempt(key, read)

    def create(self, key: str, data: bytes) -> bool:
        try:
            self._attempt(key, lambda: self._call("put_object", key, Body=data, IfNoneMatch="*"))
        except PreconditionFailed:
            # An attempt whose answer was lost may have written it: then it is ours.
            return self.get(key) == data
        return True

    def swap(self, key: str, data: bytes, *, tag: str | None) -> str:
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        try:
            return self._attempt(key, lambda: self._call("put_object", key, Body=data, **condition))
        except PreconditionFailed as error:
            current = self.get_tagged(key)
            if current is not None and current.data == data:
                return current.tag
            raise _changed(self.where(key)) from error

    def _call(self, method: str, key: str, **kwargs: Any) -> Any:
        """One S3 call through s3fs's own session."""
        bucket, _, path = self._path(key).partition("/")
        return sync(self._s3.loop, self._acall, method, bucket, path, kwargs)

    async def _acall(self, method: str, bucket: str, path: str, kwargs: dict[str, Any]) -> Any:
        answer = await self._s3._call_s3(method, Bucket=bucket, Key=path, **kwargs)
        if method == "put_object":
            return answer["ETag"]
        return Tagged(await answer["Body"].read(), answer["ETag"])

    @property
    def _s3(self) -> Any:
        """The s3fs file system, whose types are not published."""
        return self._fs

    def _check_bucket(self) -> None:
        bucket = self._root.partition("/")[0]
        if not self._fs.exists(bucket):
            raise StorageError(
                f"the bucket {bucket!r} does not exist; create it, or mend the fileroot"
            )


def _sync_folder(folder: Path) -> None:
    """Make a new name in a folder survive a power loss, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_s3(url: str) -> bool:
    """Whether an address is one of S3's."""
    return url.startswith(("s3://", "s3a://"))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _changed(where: str) -> ConcurrentWrite:
    return ConcurrentWrite(
        f"{where} was changed by another run while this one was writing it: two runs work on one "
        "shard. Let one of them end, then run again; finished episodes are kept"
    )
