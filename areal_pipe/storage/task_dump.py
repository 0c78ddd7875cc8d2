"""The executor's dump: `{task_id}.jsonl` under the version that finished the trajectory."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from areal_pipe.contract.trajectory import Episode, Trajectory
from areal_pipe.storage.dump import to_jsonl
from areal_pipe.storage.keys import TrialKeys, VersionKeys
from areal_pipe.storage.objects import open_store
from areal_pipe.storage.rows import Decoder, rows_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpConfig:
    """Where the executor writes its results."""

    fileroot: str
    experiment_name: str
    trial_name: str
    tokenizer: Decoder | None = None
    """Turns tokens into the `prompt` and `completion` texts; without one they are null."""
    storage_options: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)


class TaskDump:
    """Writes one file per task, whole, never over another.

    A dump that fails is logged and changes no outcome.
    """

    def __init__(self, config: DumpConfig) -> None:
        self._config = config
        self._store = open_store(config.fileroot, config.storage_options)
        self._keys = TrialKeys.of(config.experiment_name, config.trial_name)

    def write(
        self,
        episodes: Sequence[Episode],
        *,
        data: Mapping[str, Any],
        is_eval: bool,
        engine_version: int,
    ) -> None:
        """Dump one task's episodes.

        Args:
            engine_version: stands in where a trajectory does not say which weights made it.
        """
        if not episodes:
            return
        task_id = episodes[0].task_id
        try:
            why_not = self._unwritable(episodes)
            if why_not:
                logger.warning("Failed to dump trajectory for task %d: %s", task_id, why_not)
                return
            known = [_with_versions(e, engine_version) for e in episodes]
            version = _tail_version(known, engine_version)
            rows = [r for e in known for r in rows_of(e, data=data, decoder=self._config.tokenizer)]
            scope = "eval-rollout" if is_eval else "rollout"
            self._write(self._keys.version(scope, version), task_id, to_jsonl(rows))
        # A dump must never change an outcome, whatever the result holds.
        except Exception as error:  # noqa: BLE001
            logger.error("Failed to dump trajectory for task %d: dump failed: %s", task_id, error)

    def _write(self, keys: VersionKeys, task_id: int, lines: bytes) -> None:
        """Under a name that is free: an earlier process may have had a task of this number."""
        n = 0
        while not self._store.create(keys.dump(task_id, n), lines):
            n += 1

    def _unwritable(self, episodes: Sequence[Episode]) -> str | None:
        trajectories = [t for e in episodes for t in e.trajectories]
        if any(t.reward is None or t.loss_mask is None for t in trajectories):
            return (
                "missing required tensor fields: input_ids, rewards, attention_mask, or loss_mask"
            )
        return None


def _with_versions(episode: Episode, engine_version: int) -> Episode:
    if all(t.versions is not None for t in episode.trajectories):
        return episode
    logger.warning(
        "Trajectory missing 'versions' field, defaulting to current inference engine version."
    )
    filled = tuple(_stamped(t, engine_version) for t in episode.trajectories)
    return replace(episode, trajectories=filled)


def _stamped(t: Trajectory, version: int) -> Trajectory:
    if t.versions is not None or t.loss_mask is None:
        return t
    versions = np.where(t.loss_mask == 1, version, -1).astype(np.int32)
    return replace(t, versions=versions)


def _tail_version(episodes: Sequence[Episode], engine_version: int) -> int:
    tails = [t.tail_version for e in episodes for t in e.trajectories]
    return max((v for v in tails if v is not None), default=engine_version)
