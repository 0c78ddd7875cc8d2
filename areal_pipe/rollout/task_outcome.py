"""What became of a submitted prompt, and the statistics over many."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal_pipe.contract.trajectory import Episode, Status


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskOutcome:
    """What became of one submitted prompt."""

    task_id: int
    data: Mapping[str, Any]
    status: Status
    is_eval: bool = False
    result: dict[str, Any] | None = None
    """The (merged) result if accepted, else None."""
    reason: str = ""
    error: BaseException | None = None
    """Why it failed."""
    episodes: Sequence[Episode] = ()
    """Every member's own outcome: members of a failed group are not lost."""


class RolloutStatistics:
    """Counts of outcomes and the sum of accepted rewards, since they were last taken."""

    def __init__(self) -> None:
        self._outcomes: Counter[str] = Counter()
        self._reward_sum, self._reward_count = 0.0, 0

    def add(self, outcome: TaskOutcome) -> None:
        self._outcomes[outcome.status] += 1
        for episode in outcome.episodes:
            if episode.status is Status.ACCEPTED and episode.reward is not None:
                self._reward_sum += episode.reward
                self._reward_count += 1

    def take(self) -> dict[str, float]:
        """`rollout/{status}` counts, mean `rollout/reward` with `rollout/reward__count`; resets."""
        stats = {f"rollout/{s}": float(self._outcomes[s]) for s in Status}
        stats["rollout/reward__count"] = float(self._reward_count)
        if self._reward_count:
            stats["rollout/reward"] = self._reward_sum / self._reward_count
        self.__init__()
        return stats


def refused(episodes: Sequence[Episode], reason: str) -> list[Episode]:
    """Episodes of a result nobody trains on: none of them stays `accepted`."""
    return [
        replace(e, status=Status.FILTERED, reason=reason) if e.status is Status.ACCEPTED else e
        for e in episodes
    ]
