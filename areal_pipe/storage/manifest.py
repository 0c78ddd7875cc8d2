"""Manifests: what is committed. Readers believe these files and nothing else.

`_manifest/{shard}.json` names the shard's parts and says what is in them. It is written last and
swapped atomically, so a reader sees a shard before or after a commit, never in between.
`campaign.json` says how many shards each version has, and which recipe made them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from areal_pipe.contract.errors import SchemaError, StorageError
from areal_pipe.contract.trajectory import Status
from areal_pipe.storage.rows import SCHEMA_MAJOR, SCHEMA_MINOR, Row

_M = TypeVar("_M", bound="_Stored")


class _Stored(BaseModel):
    model_config = ConfigDict(extra="ignore")

    schema_version: str = f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}"

    def to_bytes(self) -> bytes:
        return orjson.dumps(self.model_dump(mode="json"), option=orjson.OPT_INDENT_2)


class PartRecord(BaseModel):
    """One immutable Parquet file."""

    key: str
    """Relative to the trial, so that a trial can be moved as a whole."""
    rows: int
    episodes: int
    size_bytes: int
    sha256: str


class FailureRecord(BaseModel):
    """A failed episode of an open group: what a retry will run again."""

    task_id: int
    sample_idx: int
    stage: str
    error_class: str
    message: str
    attempts: int
    infrastructure: bool = False
    traceback: str = ""
    output: str = ""
    """The end of what user code printed."""


class Tally(BaseModel):
    """Sums over closed groups, so that a summary needs no part to be read."""

    episodes: dict[str, int] = Field(default_factory=dict[str, int])
    """Closed episodes by status."""
    reward_sum: float = 0.0
    """Over accepted episodes that have a reward."""
    reward_count: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    correct: list[tuple[int, int, int]] = Field(default_factory=list[tuple[int, int, int]])
    """(n, c, groups): groups with n scored members, c of which have a reward above 0."""
    mixed_groups: int = 0
    """Accepted groups whose rewards differ: those with a group-relative advantage."""

    @classmethod
    def total(cls, tallies: Iterable["Tally"]) -> "Tally":
        """Everything added up."""
        tallies = list(tallies)
        episodes: Counter[str] = Counter()
        correct: Counter[tuple[int, int]] = Counter()
        for tally in tallies:
            episodes.update(tally.episodes)
            for n, c, groups in tally.correct:
                correct[n, c] += groups
        return cls(
            episodes=dict(sorted(episodes.items())),
            reward_sum=sum(t.reward_sum for t in tallies),
            reward_count=sum(t.reward_count for t in tallies),
            prompt_tokens=sum(t.prompt_tokens for t in tallies),
            generated_tokens=sum(t.generated_tokens for t in tallies),
            correct=[(n, c, groups) for (n, c), groups in sorted(correct.items())],
            mixed_groups=sum(t.mixed_groups for t in tallies),
        )


class Manifest(_Stored):
    """The committed state of one shard."""

    shard: int
    group_size: int
    parts: list[PartRecord] = Field(default_factory=list[PartRecord])
    accepted: list[int] = Field(default_factory=list[int])
    """task_ids of accepted groups."""
    rejected: list[int] = Field(default_factory=list[int])
    """task_ids of rejected groups."""
    open: list[int] = Field(default_factory=list[int])
    """task_ids of groups that a retry may complete."""
    failures: list[FailureRecord] = Field(default_factory=list[FailureRecord])
    given_up: list[int] = Field(default_factory=list[int])
    """task_ids of closed groups that lost members to failures (`on_failed_member`)."""
    undumped: list[int] = Field(default_factory=list[int])
    """task_ids of closed groups whose JSONL dump may not be written yet."""
    tally: Tally = Field(default_factory=Tally)
    busy_seconds: float = 0.0
    """Wall time that runs spent on this shard."""
    updated_at: float = 0.0
    """Unix time of the commit."""

    @property
    def closed(self) -> set[int]:
        return {*self.accepted, *self.rejected}

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> "Manifest":
        return _parse(cls, data, where)


class VersionRecord(BaseModel):
    """What one scope and weight version of a trial consists of."""

    scope: str
    version: int
    num_prompts: int
    group_size: int
    num_shards: int
    prompts_per_shard: int
    recipe: dict[str, Any]
    """What determines the trajectories: dataset, workflow, sampling, model, tokenizer."""
    fingerprint: str
    """SHA-256 of the recipe."""
    config: dict[str, Any]
    """The resolved configuration, without secrets."""
    lineage: dict[str, Any] = Field(default_factory=dict[str, Any])
    """What is known of how it was made: engine, logprobs mode, releases."""
    created_at: float = 0.0

    @property
    def num_episodes(self) -> int:
        return self.num_prompts * self.group_size


class CampaignRecord(_Stored):
    """`campaign.json`: the versions of one trial."""

    experiment_name: str
    trial_name: str
    versions: dict[str, VersionRecord] = Field(default_factory=dict[str, VersionRecord])
    """By `{scope}/{version}`."""

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> "CampaignRecord":
        return _parse(cls, data, where)


def _parse(model: type[_M], data: bytes, where: str) -> _M:
    try:
        value = orjson.loads(data)
        if int(str(value["schema_version"]).split(".")[0]) > SCHEMA_MAJOR:
            raise SchemaError(
                f"{where} has schema version {value['schema_version']}, this release reads up to "
                f"{SCHEMA_MAJOR}.x; upgrade areal-pipe"
            )
        return model.model_validate(value)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValidationError) as error:
        raise StorageError(f"{where} is damaged: {error}") from error


def tally_of(rows: Iterable[Row], accepted_groups: set[int]) -> Tally:
    """Sums over the rows of closed groups.

    Args:
        accepted_groups: task_ids of the groups among them that were accepted.
    """
    episodes: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        episodes.setdefault((row["task_id"], row["sample_idx"]), []).append(row)
    last = [max(rows, key=lambda r: r["trajectory_idx"]) for rows in episodes.values()]
    rewards: dict[int, list[float]] = {}
    for row in last:
        if row["status"] == Status.ACCEPTED and row["reward"] is not None:
            rewards.setdefault(row["task_id"], []).append(row["reward"])
    every = [reward for group in rewards.values() for reward in group]
    kept = [row for rows in episodes.values() for row in rows if row["input_ids"] is not None]
    return Tally(
        episodes=dict(sorted(Counter(row["status"] for row in last).items())),
        reward_sum=sum(every),
        reward_count=len(every),
        prompt_tokens=sum(row["prompt_len"] for row in kept),
        generated_tokens=sum(_generated(row) for row in kept),
        correct=_correct(rewards.values()),
        mixed_groups=sum(
            len(set(group)) > 1 for task, group in rewards.items() if task in accepted_groups
        ),
    )


def _generated(row: Row) -> int:
    return 0 if row["loss_mask"] is None else int(row["loss_mask"].sum())


def _correct(groups: Iterable[Sequence[float]]) -> list[tuple[int, int, int]]:
    counts = Counter((len(group), sum(r > 0 for r in group)) for group in groups)
    return [(n, c, groups) for (n, c), groups in sorted(counts.items())]
