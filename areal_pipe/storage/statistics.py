"""Distributions over stored rows, for people."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from areal_pipe.contract.trajectory import Status
from areal_pipe.storage.rows import Row

COLUMNS = [
    "task_id", "sample_idx", "trajectory_idx", "status", "reward", "seqlen", "prompt_len",
    "head_version", "tail_version", "stop_reason", "error_class",
]  # fmt: skip
"""What `distributions_of` reads of a row."""
_BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Of one quantity over accepted rows."""

    count: int
    mean: float
    minimum: float
    median: float
    p95: float
    maximum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributions:
    """What `areal-pipe stats` shows beyond the summary."""

    quantiles: dict[str, Quantiles]
    """reward, prompt and generated length, by name; those with values."""
    rewards: list[tuple[str, int]]
    """Reward histogram: each value if there are few, else ten bins."""
    stop_reasons: dict[str, int]
    versions: dict[str, int]
    """Rows by `head..tail` weight version."""
    errors: dict[str, int]
    """Failed rows by class."""


def distributions_of(rows: Iterable[Row]) -> Distributions:
    """Distributions over a version's rows."""
    accepted: list[Row] = []
    errors: Counter[str] = Counter()
    for row in rows:
        if row["status"] == Status.ACCEPTED:
            accepted.append(row)
        elif row["error_class"]:
            errors[row["error_class"]] += 1
    rewards = [r["reward"] for r in accepted if r["reward"] is not None]
    columns = {
        "reward": rewards,
        "prompt tokens": [r["prompt_len"] for r in accepted],
        "generated tokens": [r["seqlen"] - r["prompt_len"] for r in accepted],
    }
    return Distributions(
        quantiles={name: quantiles_of(values) for name, values in columns.items() if values},
        rewards=histogram(rewards),
        stop_reasons=dict(Counter(r["stop_reason"] or "unknown" for r in accepted).most_common()),
        versions=dict(Counter(_versions(r) for r in accepted).most_common()),
        errors=dict(errors.most_common()),
    )


def _versions(row: Row) -> str:
    head, tail = row["head_version"], row["tail_version"]
    return str(head) if head == tail else f"{head}..{tail}"


def quantiles_of(values: Sequence[float]) -> Quantiles:
    """Of at least one value."""
    array = np.asarray(values, np.float64)
    median, p95 = np.quantile(array, [0.5, 0.95])
    return Quantiles(
        count=len(array),
        mean=float(array.mean()),
        minimum=float(array.min()),
        median=float(median),
        p95=float(p95),
        maximum=float(array.max()),
    )


def histogram(values: Sequence[float]) -> list[tuple[str, int]]:
    """(label, count), in order of value."""
    counts = Counter(values)
    if len(counts) <= _BINS:
        return [(f"{value:g}", n) for value, n in sorted(counts.items())]
    heights, edges = np.histogram(values, bins=_BINS)
    labels = [f"{a:.3g} to {b:.3g}" for a, b in pairwise(edges)]
    return list(zip(labels, heights.tolist(), strict=True))
