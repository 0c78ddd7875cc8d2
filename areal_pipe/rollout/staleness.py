"""How many prompts may run, so that no accepted trajectory is staler than the trainer allows.

The bound is equation 3 of the AReaL paper (arXiv:2505.24298): after a submission that makes N
trajectories accepted or running, floor((N - 1) / B) <= version + eta, with consumer batch size B
and maximum staleness eta. That is N <= (version + eta + 1) * B.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStat:
    """Prompts by state. Failed ones are counted apart from rejected ones."""

    enqueued: int = 0
    running: int = 0
    accepted: int = 0
    rejected: int = 0
    """Rejected by the workflow, or filtered."""
    failed: int = 0


class StalenessManager:
    """Counts prompts and says how many more may start. Thread-safe."""

    def __init__(
        self,
        get_version: Callable[[], int],
        *,
        max_concurrent_rollouts: int,
        consumer_batch_size: int,
        max_staleness: int,
    ) -> None:
        """
        Args:
            get_version: the current weight version.
            max_concurrent_rollouts: prompts running at once.
            consumer_batch_size: trajectories the trainer takes per version.
            max_staleness: versions a trajectory may lag behind when it is consumed.
        """
        self._get_version = get_version
        self._max_concurrent = max_concurrent_rollouts
        self._batch_size = consumer_batch_size
        self._max_staleness = max_staleness
        self._lock = threading.Lock()
        self._stat = RolloutStat()

    def get_capacity(self) -> int:
        """Prompts that may start now; zero or less means none."""
        with self._lock:
            stat = self._stat
        horizon = self._max_staleness + self._get_version() + 1
        by_staleness = horizon * max(1, self._batch_size) - (stat.accepted + stat.running)
        by_concurrency = max(1, self._max_concurrent) - stat.running
        return min(by_staleness, by_concurrency)

    def get_pending_limit(self) -> int:
        """Prompts worth keeping queued: what the next versions can use."""
        return (self._max_staleness + 1) * self._batch_size

    def get_stats(self) -> RolloutStat:
        with self._lock:
            return self._stat

    def on_rollout_enqueued(self) -> None:
        self._add(enqueued=1)

    def on_rollout_dequeued(self) -> None:
        self._add(enqueued=-1)

    def on_rollout_submitted(self) -> None:
        self._add(enqueued=-1, running=1)

    def on_rollout_accepted(self) -> None:
        self._add(running=-1, accepted=1)

    def on_rollout_rejected(self) -> None:
        self._add(running=-1, rejected=1)

    def on_rollout_failed(self) -> None:
        self._add(running=-1, failed=1)

    def on_recover(self, version: int) -> None:
        """After a restart at `version`: the trainer has consumed one batch per version."""
        with self._lock:
            self._stat = replace(self._stat, accepted=version * self._batch_size)

    def _add(self, **deltas: int) -> None:
        with self._lock:
            counts = {name: getattr(self._stat, name) + n for name, n in deltas.items()}
            self._stat = replace(self._stat, **counts)
