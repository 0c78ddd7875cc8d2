"""Rewards to advantages: centered and scaled within groups or over the batch. Needs no torch.

Formulas: GRPO, arXiv:2402.03300, section 4.1 (group mean, group standard deviation); RLOO,
arXiv:2402.14740, section 3 (each sample's baseline is the mean of the others); Dr. GRPO,
arXiv:2503.20783, section 3.2 (GRPO without the division, which favours easy and hard prompts).

Groups have the sizes they really have: rejected members leave some smaller than others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Level = Literal["group", "batch"]
Estimator = Literal["grpo", "rloo", "dr_grpo"]

_FLOAT32_EPS = float(np.finfo(np.float32).eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """What is subtracted from a value and what it is divided by; fields and defaults are AReaL's.

    Raises:
        ValueError: an unknown level, or a negative `eps`.
    """

    mean_level: Level | None = "batch"
    """Over which values the mean is taken; None: nothing is subtracted."""
    std_level: Level | None = "batch"
    """Over which (centered) values the standard deviation is taken; None: nothing is divided."""
    mean_leave1out: bool = False
    """The mean of a value is that of the others; a value without others is its own mean."""
    std_unbiased: bool = True
    """Divide the squares by n - 1 instead of n."""
    eps: float = 1e-5
    """Added to the standard deviation."""

    def __post_init__(self) -> None:
        for name in ("mean_level", "std_level"):
            if (level := getattr(self, name)) not in ("group", "batch", None):
                raise ValueError(f"{name} must be 'group', 'batch' or None, got {level!r}")
        if not self.eps >= 0:
            raise ValueError(f"eps must be >= 0, got {self.eps}")


ESTIMATORS: Mapping[Estimator, NormConfig] = MappingProxyType(
    {
        "grpo": NormConfig(mean_level="group", std_level="group"),
        "rloo": NormConfig(mean_level="group", std_level=None, mean_leave1out=True),
        "dr_grpo": NormConfig(mean_level="group", std_level=None),
    }
)
"""The published estimators by name."""


def group_advantages(
    rewards: ArrayLike, group_sizes: Sequence[int], estimator: Estimator
) -> NDArray[np.float32]:
    """The advantage of each sample over the others of its prompt.

    Args:
        rewards: [B], group after group.
        group_sizes: samples of each group; they add up to B.
        estimator: a name in `ESTIMATORS`.

    Returns:
        [B] float32.

    Raises:
        ValueError: an unknown estimator, sizes that do not add up to B, or a reward that is not
            finite.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")
    return normalize(rewards, ESTIMATORS[estimator], group_sizes=group_sizes)


def normalize(
    values: ArrayLike,
    config: NormConfig,
    *,
    group_sizes: Sequence[int] | None = None,
    mask: ArrayLike | None = None,
) -> NDArray[np.float32]:
    """Center and scale values, computing in float64.

    Values that float32 cannot tell apart, or a single one, have no spread: nothing is divided.

    Args:
        values: [B] or [B, L], the rows of a group one after another.
        group_sizes: rows of each group; needed where a level is `group`.
        mask: the shape of `values`. What it is 0 on counts nowhere and comes back as it came.

    Returns:
        The shape of `values`, float32.

    Raises:
        ValueError: sizes that do not add up to B, a mask of another shape, or an unmasked value
            that is not finite.
    """
    x = np.asarray(values, np.float64)
    counts = np.ones(x.shape, bool) if mask is None else np.asarray(mask).astype(bool)
    if counts.shape != x.shape:
        raise ValueError(f"mask must have the shape of values {x.shape}, got {counts.shape}")
    if not np.isfinite(x[counts]).all():
        raise ValueError(f"values must be finite, got {x[counts & ~np.isfinite(x)][0]}")
    groups = _slices(group_sizes, len(x), needed="group" in (config.mean_level, config.std_level))
    levels = {"group": groups, "batch": [slice(0, len(x))]}
    result = x.copy()
    for rows in levels.get(config.mean_level or "", ()):
        used = counts[rows]
        result[rows][used] -= _means(result[rows][used], leave1out=config.mean_leave1out)
    for rows in levels.get(config.std_level or "", ()):
        used = counts[rows]
        result[rows][used] /= _divisor(result[rows][used], config)
    return result.astype(np.float32)


def _slices(sizes: Sequence[int] | None, batch: int, *, needed: bool) -> list[slice]:
    if sizes is None:
        if needed:
            raise ValueError("group_sizes must be given where mean_level or std_level is 'group'")
        return []
    if min(sizes, default=1) < 1 or sum(sizes) != batch:
        raise ValueError(
            f"group_sizes must be positive and add up to the {batch} rows, got {list(sizes)}"
        )
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _means(x: NDArray[np.float64], *, leave1out: bool) -> Any:
    """The mean to subtract from each value: one for all, or one for each."""
    if len(x) == 0 or (x == x[0]).all():  # exactly: rounding must not leave an advantage
        return x
    return (x.sum() - x) / (len(x) - 1) if leave1out else x.mean()


def _divisor(x: NDArray[np.float64], config: NormConfig) -> float:
    if len(x) == 0 or np.allclose(x, x[0], rtol=_FLOAT32_EPS, atol=0):
        return 1.0
    return float(x.std(ddof=int(config.std_unbiased))) + config.eps
