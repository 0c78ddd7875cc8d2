"""A stored trial, for readers: what its campaign and manifests name, and nothing else."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from areal_pipe.contract.errors import StorageError
from areal_pipe.storage.keys import CAMPAIGN_FILE, SCOPES, TrialKeys, VersionKeys
from areal_pipe.storage.manifest import CampaignRecord, Manifest, PartRecord, VersionRecord
from areal_pipe.storage.objects import ObjectStore, open_store
from areal_pipe.storage.parts import iterate_rows, open_part
from areal_pipe.storage.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredVersion:
    """One scope and weight version of a trial."""

    store: ObjectStore
    keys: VersionKeys
    record: VersionRecord

    @property
    def name(self) -> str:
        """`{scope}/{version}`, as in the path."""
        return f"{self.record.scope}/{self.record.version}"

    def manifest(self, shard: int) -> Manifest | None:
        """A shard's committed state; None if it was never committed."""
        key = self.keys.manifest(shard)
        data = self.store.get(key)
        return None if data is None else Manifest.from_bytes(data, where=self.store.where(key))

    def manifests(self) -> Iterator[Manifest]:
        """Committed states of all shards that have one."""
        for shard in range(self.record.num_shards):
            manifest = self.manifest(shard)
            if manifest is not None:
                yield manifest

    def rows(self, columns: list[str] | None = None) -> Iterator[Row]:
        """Rows of all committed parts, one row group in memory at a time."""
        for manifest in self.manifests():
            for part in manifest.parts:
                yield from self.part_rows(part, columns)

    def part_rows(self, part: PartRecord, columns: list[str] | None = None) -> Iterator[Row]:
        with self.store.open(part.key) as file:
            yield from iterate_rows(open_part(file, where=self.store.where(part.key)), columns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredTrial:
    """All versions of one trial."""

    url: str
    store: ObjectStore
    record: CampaignRecord
    versions: tuple[StoredVersion, ...]


def open_trial(url: str, options: Mapping[str, Any] | None = None) -> StoredTrial:
    """A trial by its address, or the address of one of its versions.

    Args:
        url: `{fileroot}/{experiment}/{trial}[/{scope}[/{version}]]`; with a version, only that one.

    Raises:
        StorageError: there is no campaign at that address.
    """
    root, wanted = _split(url)
    store = open_store(root, options)
    data = store.get(CAMPAIGN_FILE)
    if data is None:
        raise StorageError(
            f"no campaign at {url}: {store.where(CAMPAIGN_FILE)} does not exist; give the address "
            "of a trial, {fileroot}/{experiment}/{trial}"
        )
    record = CampaignRecord.from_bytes(data, where=store.where(CAMPAIGN_FILE))
    chosen = {name: v for name, v in record.versions.items() if f"{name}/".startswith(wanted)}
    if not chosen:
        raise StorageError(
            f"{root} has no version {wanted.rstrip('/')!r}; it has {', '.join(record.versions)}"
        )
    versions = tuple(
        StoredVersion(store=store, keys=TrialKeys("").version(v.scope, v.version), record=v)
        for v in chosen.values()
    )
    return StoredTrial(url=root, store=store, record=record, versions=versions)


def _split(url: str) -> tuple[str, str]:
    """(address of the trial, prefix of the versions meant)."""
    parts = url.rstrip("/").split("/")
    if len(parts) > 2 and parts[-2] in SCOPES and parts[-1].isdigit():
        return "/".join(parts[:-2]), f"{parts[-2]}/{parts[-1]}/"
    if len(parts) > 1 and parts[-1] in SCOPES:
        return "/".join(parts[:-1]), f"{parts[-1]}/"
    return url.rstrip("/"), ""
