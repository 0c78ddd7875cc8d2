"""What an episode leaves behind: outcomes, and trajectories as aligned token columns.

A `Trajectory` is one unpadded row of the tensor contract, in numpy, so that storage and readers
need no torch. `packing` converts between it and the padded tensor dicts that workflows return.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_pipe.contract.errors import TrajectoryError

Run = tuple[int, int]
"""(value, length): one run of equal values in a token column."""


class Status(StrEnum):
    """How an episode ended. Only `ACCEPTED` rows carry training weight."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    """The workflow returned None."""
    FILTERED = "filtered"
    """Finished, then refused by should_accept_fn or by its group, with a reason."""
    FAILED = "failed"
    """An exception; never counted as a rejection."""
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of tokens that came from one side: the policy, or what it was shown."""

    role: str
    """`prompt` before the first generated token, then `gen` and `context`."""
    start: int
    """Index of the first token."""
    length: int
    """Number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """One row a trainer can step on: aligned columns of length L, without padding.

    Raises:
        TrajectoryError: columns of different lengths, no tokens, negative ids, non-finite logprobs,
            a loss mask other than 0/1, or a trained token without a weight version.
    """

    input_ids: NDArray[np.int32]
    """[L] int32: prompt and generated tokens, as the engine returned them."""
    loss_mask: NDArray[np.int32] | None = None
    """[L] int32: 1 on tokens the policy generated and is trained on, else 0."""
    logprobs: NDArray[np.float32] | None = None
    """[L] float32: log-probability under the sampling policy; 0.0 where loss_mask is 0."""
    versions: NDArray[np.int32] | None = None
    """[L] int32: weight version that sampled the token; -1 on prompt and context tokens."""
    reward: float | None = None
    extras: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further columns, kept as they came: numpy arrays ([L, ...] or per row) or JSON values."""

    def __post_init__(self) -> None:
        check_columns(self)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def prompt_len(self) -> int:
        """Tokens before the first generated one (all of them if nothing was generated)."""
        if self.loss_mask is None or not self.loss_mask.any():
            return len(self)
        return int(self.loss_mask.argmax())

    @property
    def num_generated(self) -> int:
        return 0 if self.loss_mask is None else int(self.loss_mask.sum())

    @property
    def generated_versions(self) -> NDArray[np.int32]:
        """Versions of the generated tokens only: prompt tokens have none."""
        if self.loss_mask is None or self.versions is None:
            return np.empty(0, np.int32)
        return self.versions[self.loss_mask == 1]

    @property
    def head_version(self) -> int | None:
        """The oldest weights that contributed a token; None if nothing was generated."""
        versions = self.generated_versions
        return int(versions.min()) if len(versions) else None

    @property
    def tail_version(self) -> int | None:
        """The newest weights that contributed a token; None if nothing was generated."""
        versions = self.generated_versions
        return int(versions.max()) if len(versions) else None

    def segments(self) -> list[Segment]:
        """Alternating stretches of shown and generated tokens, in order."""
        mask = np.zeros(len(self), np.int32) if self.loss_mask is None else self.loss_mask
        found: list[Segment] = []
        start = 0
        for generated, length in run_lengths(mask):
            role = "gen" if generated else ("context" if found else "prompt")
            found.append(Segment(role=role, start=start, length=length))
            start += length
        return found


def run_lengths(column: NDArray[np.integer[Any]]) -> list[Run]:
    """Run-length encode a 1-D integer column into (value, length) pairs."""
    if len(column) == 0:
        return []
    starts = np.flatnonzero(np.concatenate(([True], column[1:] != column[:-1])))
    lengths = np.diff(np.append(starts, len(column)))
    return [(int(column[s]), int(n)) for s, n in zip(starts, lengths, strict=True)]


def expand_runs(runs: Sequence[Run]) -> NDArray[np.int32]:
    """The inverse of `run_lengths`."""
    if not runs:
        return np.empty(0, np.int32)
    values, lengths = zip(*runs, strict=True)
    return np.repeat(np.asarray(values, np.int32), lengths)


def check_columns(t: Trajectory) -> None:
    """Enforce the column contract (see `Trajectory`)."""
    length = len(t.input_ids)
    if length == 0:
        raise TrajectoryError("input_ids must hold at least one token, got 0")
    if int(t.input_ids.min()) < 0:
        raise TrajectoryError(f"input_ids must be token ids >= 0, got {int(t.input_ids.min())}")
    for name in ("loss_mask", "logprobs", "versions"):
        column = getattr(t, name)
        if column is not None and len(column) != length:
            raise TrajectoryError(
                f"columns must have one length, got input_ids={length} {name}={len(column)}"
            )
    if t.loss_mask is not None and not np.isin(t.loss_mask, (0, 1)).all():
        raise TrajectoryError(f"loss_mask must be 0 or 1, got {np.unique(t.loss_mask).tolist()}")
    if t.logprobs is not None and not np.isfinite(t.logprobs).all():
        at = int(np.flatnonzero(~np.isfinite(t.logprobs))[0])
        raise TrajectoryError(f"logprobs must be finite, got {t.logprobs[at]} at token {at}")
    if t.reward is not None and not np.isfinite(t.reward):
        raise TrajectoryError(f"rewards must be finite, got {t.reward}")
    check_versions(t)


def check_versions(t: Trajectory) -> None:
    """Generated tokens need a version; -1 marks tokens that nobody sampled."""
    if t.versions is None:
        return
    if int(t.versions.min()) < -1:
        raise TrajectoryError(f"versions must be >= -1, got {int(t.versions.min())}")
    generated = t.generated_versions
    if len(generated) and int(generated.min()) < 0:
        raise TrajectoryError(
            "versions must be >= 0 on tokens with loss_mask 1: a trained token needs the weight "
            f"version that sampled it, got {int(generated.min())}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an episode has no outcome: enough to decide on a retry and to find the cause."""

    stage: str
    """tokenize | generate | reward | pack | episode | store."""
    error_class: str
    """Name of the exception's class."""
    message: str
    attempts: int = 1
    """How often the stage was tried."""
    infrastructure: bool = False
    """True for outages, False for bad data and bad code."""
    traceback: str = ""
    """Where in the user's code it was raised, innermost line last; empty if it was not."""
    output: str = ""
    """The end of what user code printed before it failed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Episode:
    """The outcome of one `arun_episode`, whatever it was."""

    task_id: int
    sample_idx: int
    status: Status
    reason: str = ""
    """Why it was rejected or filtered; empty otherwise."""
    failure: Failure | None = None
    """Set if and only if status is FAILED."""
    trajectories: tuple[Trajectory, ...] = ()
    stop_reason: str | None = None
    """Of the last generation: stop | length | tool_calls | abort."""
    seeds: tuple[int, ...] = ()
    """Sampling seed of each generation, in order: enough to replay it alone."""
    duration_seconds: float = 0.0
    result: Any = None
    """What the workflow returned, as it came; not stored."""
    exception: BaseException | None = None
    """The live exception of a failed episode; not stored."""
    draft: Any = None
    """Of an episode that failed once its generation was done: where a retry goes on (a `Draft`)."""

    @property
    def reward(self) -> float | None:
        """The last trajectory's reward: the episode's own."""
        return self.trajectories[-1].reward if self.trajectories else None
