"""Verifying a stored trial: every part and manifest, as a reader would meet them."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from areal_pipe.contract.errors import StorageError, TrajectoryError
from areal_pipe.contract.trajectory import Status
from areal_pipe.storage.manifest import Manifest, PartRecord, tally_of
from areal_pipe.storage.parts import iterate_rows, open_part
from areal_pipe.storage.rows import SCHEMA, Row, trajectory_of
from areal_pipe.storage.trial import StoredTrial, StoredVersion

_STATUSES = frozenset(Status)
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong."""

    where: str
    problem: str


def check_trial(trial: StoredTrial) -> Iterator[Finding]:
    """All problems of a trial's versions; nothing if it is sound."""
    for version in trial.versions:
        for shard in range(version.record.num_shards):
            yield from check_shard(version, shard)
        yield from _across_shards(version)


def _across_shards(version: StoredVersion) -> Iterator[Finding]:
    """A prompt belongs to one shard, and there are as many as planned."""
    where = version.store.where(version.keys.prefix)
    try:
        manifests = list(version.manifests())
    except StorageError:
        return  # reported with its shard
    shards = Counter(t for m in manifests for t in {*m.closed, *m.open})
    for task_id, times in shards.items():
        if times > 1:
            yield Finding(where=where, problem=f"group {task_id} is in {times} shards")
    if len(shards) > version.record.num_prompts:
        planned = version.record.num_prompts
        yield Finding(where=where, problem=f"{len(shards)} groups, but {planned} were planned")


def check_shard(version: StoredVersion, shard: int) -> Iterator[Finding]:
    """Problems of one shard: its manifest, its parts, and whether they tell the same story."""
    where = version.store.where(version.keys.manifest(shard))
    try:
        manifest = version.manifest(shard)
    except StorageError as error:
        yield Finding(where=where, problem=str(error))
        return
    if manifest is None:
        return
    rows: list[Row] = []
    for part in manifest.parts:
        part_where = version.store.where(part.key)
        try:
            part_rows = _part_rows(version, part, part_where)
        except StorageError as error:
            yield Finding(where=part_where, problem=str(error))
            return
        for row in part_rows:
            yield from (Finding(where=part_where, problem=p) for p in _row_problems(row))
        if part.rows != len(part_rows):
            yield Finding(
                where=part_where,
                problem=f"the manifest says {part.rows} rows, it has {len(part_rows)}",
            )
        rows += part_rows
    problems = _manifest_problems(manifest, rows, version)
    yield from (Finding(where=where, problem=problem) for problem in problems)


def _part_rows(version: StoredVersion, part: PartRecord, where: str) -> list[Row]:
    data = version.store.get(part.key)
    if data is None:
        raise StorageError("the manifest names it, but it does not exist")
    if hashlib.sha256(data).hexdigest() != part.sha256:
        raise StorageError("its content is not what was committed (SHA-256 differs)")
    with version.store.open(part.key) as file:
        parquet = open_part(file, where=where)
        if missing := set(SCHEMA.names) - set(parquet.schema_arrow.names):
            raise StorageError(f"columns are missing: {', '.join(sorted(missing))}")
        return list(iterate_rows(parquet))


def _row_problems(row: Row) -> Iterator[str]:
    label = f"{row['task_id']}/{row['sample_idx']}"
    if row["status"] not in _STATUSES:
        yield f"{label}: unknown status {row['status']!r}"
    if (row["status"] == Status.FAILED) != (row["error_class"] is not None):
        yield f"{label}: status {row['status']} with error class {row['error_class']}"
    if row["reward"] is not None and not math.isfinite(row["reward"]):
        yield f"{label}: reward {row['reward']}"
    try:
        t = trajectory_of(row)
    except TrajectoryError as error:
        yield f"{label}: {error}"
        return
    if t is None:
        if row["status"] == Status.ACCEPTED:
            yield f"{label}: accepted without a trajectory"
        return
    if row["seqlen"] != len(t):
        yield f"{label}: seqlen {row['seqlen']}, but {len(t)} tokens"
    for name in ("prompt_len", "head_version", "tail_version"):
        if row[name] != getattr(t, name):
            yield f"{label}: {name} {row[name]}, but the tokens say {getattr(t, name)}"


def _manifest_problems(
    manifest: Manifest, rows: list[Row], version: StoredVersion
) -> Iterator[str]:
    places = Counter((r["task_id"], r["sample_idx"], r["trajectory_idx"]) for r in rows)
    for place, times in places.items():
        if times > 1:
            yield f"task {place[0]} sample {place[1]} trajectory {place[2]} is stored {times} times"
    groups = Counter([*manifest.accepted, *manifest.rejected, *manifest.open])
    for task_id, times in groups.items():
        if times > 1:
            yield f"group {task_id} is listed {times} times"
    members = Counter(task for task, _ in {(r["task_id"], r["sample_idx"]) for r in rows})
    for task_id in sorted(manifest.closed | members.keys()):
        if task_id not in manifest.closed:
            yield f"group {task_id} has rows, but is not closed"
        elif members[task_id] != version.record.group_size:
            size = version.record.group_size
            yield f"group {task_id} is closed with {members[task_id]} of {size} episodes"
    actual, told = tally_of(rows, set(manifest.accepted)), manifest.tally
    for name in type(told).model_fields:
        if not _equal(getattr(actual, name), getattr(told, name)):
            yield f"{name} is {getattr(told, name)}, the rows say {getattr(actual, name)}"


def _equal(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return a == b
