"""The ledger: finished episodes that are in no part yet. It is what makes a crash cheap.

Group commit: while one object is being written, further episodes gather, and the next object takes
them all. An episode counts as finished once the object that holds it is stored. Names are unique to
a run, so two runs never overwrite each other; an episode found twice is the same work done twice,
and the first one counts.
"""

import asyncio
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from areal_pipe.storage.keys import VersionKeys
from areal_pipe.storage.objects import ObjectStore
from areal_pipe.storage.parts import from_ipc, table_rows, to_ipc
from areal_pipe.storage.rows import Row, table_of

T = TypeVar("T")


def read_ledger(
    store: ObjectStore, keys: VersionKeys, shard: int
) -> Iterator[tuple[str, list[Row]]]:
    """(key, rows) of every ledger object of a shard, in the order of their names."""
    for key in store.list(keys.ledger(shard)):
        data = store.get(key)
        if data is not None:  # another run may have compacted it since it was listed
            yield key, list(table_rows(from_ipc(data, where=store.where(key))))


class LedgerWriter:
    """Appends finished episodes of one shard. Use from one event loop."""

    def __init__(
        self,
        store: ObjectStore,
        keys: VersionKeys,
        shard: int,
        *,
        run_blocking: Callable[..., Any],
    ) -> None:
        """
        Args:
            run_blocking: `await run_blocking(fn, *args)` runs a store call in its thread.
        """
        self._store = store
        self._keys = keys
        self._shard = shard
        self._run_blocking = run_blocking
        self._name = uuid.uuid4().hex[:12]
        self._written: list[str] = []
        self._pending: list[Row] = []
        self._next: asyncio.Task[None] | None = None
        self._current: asyncio.Task[None] | None = None

    @property
    def written(self) -> list[str]:
        """Keys of the objects written so far."""
        return list(self._written)

    async def append(self, rows: list[Row]) -> None:
        """Store rows; returns once they are durable.

        Raises:
            StorageError: they could not be stored.
        """
        self._pending += rows
        if self._next is None:
            self._next = asyncio.ensure_future(self._flush(after=self._current))
        # Shielded: a cancelled episode must not take the others' write with it.
        await asyncio.shield(self._next)

    async def drain(self) -> None:
        """Wait for writes under way, whoever started them."""
        writes = [write for write in (self._current, self._next) if write is not None]
        # Whoever waited for a write that failed was told; nobody is told twice.
        await asyncio.gather(*writes, return_exceptions=True)

    async def _flush(self, after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await asyncio.wait([after])
        self._current, self._next = self._next, None
        rows, self._pending = self._pending, []
        key = self._keys.ledger_entry(self._shard, f"{self._name}-{len(self._written):06d}")
        self._written.append(key)
        await self._run_blocking(self._store_rows, key, rows)

    def _store_rows(self, key: str, rows: list[Row]) -> None:
        self._store.put(key, to_ipc(table_of(rows)))
