"""Groups: the episodes of one prompt, and the rule by which they are closed.

Closing is a pure function of the members' outcomes, so that it gives one verdict whatever the order
in which they finished, and in whatever run.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, cast

from areal_pipe.contract import workflow_context
from areal_pipe.contract.engine import InferenceEngine
from areal_pipe.contract.errors import WorkflowError
from areal_pipe.contract.interaction import InteractionWithTokenLogpReward
from areal_pipe.contract.trajectory import Episode, Status
from areal_pipe.contract.workflow import RolloutWorkflow
from areal_pipe.episodes import packing
from areal_pipe.episodes.episode import EpisodePolicy, GroupRun

logger = logging.getLogger(__name__)

OnFailedMember = Literal["retry", "keep", "drop_group"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPolicy:
    """When a group may be closed, and what it is worth then."""

    group_size: int = 1
    on_failed_member: OnFailedMember = "retry"
    """What becomes of members that failed of bad data or bad code. `retry`: the group stays open;
    `keep`: close it without them; `drop_group`: give it up. An outage always leaves it open."""
    min_group_size: int = 1
    """Fewer accepted members than this, and the group is rejected."""

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"group_size must be >= 1, got {self.group_size}")
        if not 1 <= self.min_group_size <= self.group_size:
            raise ValueError(
                f"min_group_size must be in 1..group_size={self.group_size}, "
                f"got {self.min_group_size}"
            )


class GroupState(StrEnum):
    """What became of a group."""

    OPEN = "open"
    """Members are missing or failed: a later run may complete it."""
    ACCEPTED = "accepted"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupVerdict:
    """The outcome of closing a group."""

    state: GroupState
    reason: str = ""
    """Why it is open or rejected."""


def close_group(
    statuses: Mapping[int, Status], policy: GroupPolicy, *, outages: Collection[int] = ()
) -> GroupVerdict:
    """Decide on a group from its members' outcomes.

    Args:
        statuses: outcome by sample_idx, for the members that have one.
        outages: those of the failed ones that failed of an outage; they are never given up.

    Rejected members are dropped and the rest is merged; a group whose members were all rejected is
    rejected. Failed members keep it open unless the policy gives them up.
    """
    missing = [i for i in range(policy.group_size) if i not in statuses]
    if missing:
        return GroupVerdict(state=GroupState.OPEN, reason=f"{len(missing)} members are missing")
    failed = sum(s in (Status.FAILED, Status.CANCELLED) for s in statuses.values())
    if outages:
        return GroupVerdict(state=GroupState.OPEN, reason=f"{len(outages)} members met an outage")
    if failed and policy.on_failed_member == "retry":
        return GroupVerdict(state=GroupState.OPEN, reason=f"{failed} members failed")
    if failed and policy.on_failed_member == "drop_group":
        return GroupVerdict(
            state=GroupState.REJECTED, reason=f"{failed} members failed (on_failed_member)"
        )
    accepted = sum(s is Status.ACCEPTED for s in statuses.values())
    if accepted == 0:
        return GroupVerdict(state=GroupState.REJECTED, reason="no member was accepted")
    if accepted < policy.min_group_size:
        return GroupVerdict(
            state=GroupState.REJECTED,
            reason=f"{accepted} accepted members, min_group_size is {policy.min_group_size}",
        )
    return GroupVerdict(state=GroupState.ACCEPTED)


class GroupedRolloutWorkflow(RolloutWorkflow):
    """Runs a workflow `group_size` times on each prompt and merges the results."""

    def __init__(
        self,
        workflow: RolloutWorkflow,
        group_size: int,
        *,
        on_failed_member: Literal["raise", "keep", "drop_group"] = "raise",
        drop_incomplete_group: bool = False,
        reward_normalization: bool = False,
    ) -> None:
        """
        Args:
            on_failed_member: what an exception in one member does once all have ended: raise it
                (the others ran to their end), keep the rest, or reject the group. An outage is
                always raised.
            drop_incomplete_group: reject the group if any member was rejected.
            reward_normalization: replace each episode's last reward by its z-score in the group.

        Raises:
            ValueError: group_size < 1.
        """
        GroupPolicy(group_size=group_size)
        self.workflow = workflow
        self.group_size = group_size
        self._on_failed_member = on_failed_member
        self._drop_incomplete_group = drop_incomplete_group
        self._reward_normalization = reward_normalization

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        context = workflow_context.get()
        episodes = await self.run_members(
            engine, data, task_id=context.task_id or 0, is_eval=context.is_eval
        )
        return self.merge(episodes)

    async def run_members(
        self,
        engine: InferenceEngine,
        data: Mapping[str, Any],
        *,
        task_id: int,
        is_eval: bool = False,
        policy: EpisodePolicy | None = None,
    ) -> list[Episode]:
        """All members' outcomes, by sample_idx; no exception of one touches another."""
        group = GroupRun(
            self.workflow,
            engine,
            data,
            task_id=task_id,
            samples=range(self.group_size),
            is_eval=is_eval,
            policy=policy,
        )
        return await group.run()

    def merge(self, episodes: Sequence[Episode]) -> Any:
        """One result of the members' results; None rejects the group.

        Raises:
            Exception: the first failed member's, under `on_failed_member="raise"`.
            WorkflowError: members returned results of different kinds.
        """
        failed = [e for e in episodes if e.status is Status.FAILED]
        is_outage = any(e.failure is not None and e.failure.infrastructure for e in failed)
        if failed and (is_outage or self._on_failed_member == "raise"):
            raise _first_of(failed, self.group_size)
        if failed and self._on_failed_member == "drop_group":
            return None
        kept = [e.result for e in episodes if e.status is Status.ACCEPTED]
        if not self._complete_enough(kept):
            return None
        if self._reward_normalization and not _normalize_rewards(kept, self.group_size):
            return None
        return merge_results(kept)

    def _complete_enough(self, kept: Sequence[Any]) -> bool:
        gone = self.group_size - len(kept)
        if not kept or not gone:
            return bool(kept)
        drop = self._drop_incomplete_group
        if self._reward_normalization and not drop:
            return True  # normalization drops the group, and says so
        logger.info(
            "GroupedRolloutWorkflow: %d/%d trajectories returned None, %s",
            gone,
            self.group_size,
            "dropping entire group (drop_incomplete_group=True)"
            if drop
            else "using remaining results",
        )
        return not drop


def merge_results(results: Sequence[Any]) -> Any:
    """Merge members' results: tensors along the batch dimension, interactions by id.

    Raises:
        WorkflowError: some members returned tensors and others interactions.
    """
    interactions = [packing.is_interactions(r) for r in results]
    if all(interactions):
        return {key: value for r in results for key, value in r.items()}
    if any(interactions):
        raise WorkflowError(
            "all members of a group must return one kind of result, "
            f"got interactions from {sum(interactions)} of {len(interactions)} members"
        )
    return packing.concat_padded_tensors(list(results))


def _first_of(failed: Sequence[Episode], group_size: int) -> BaseException:
    error = failed[0].exception
    assert error is not None
    members = ", ".join(str(e.sample_idx) for e in failed)
    error.add_note(f"{len(failed)} of {group_size} members of the group failed: {members}")
    return error


def _normalize_rewards(results: Sequence[Any], group_size: int) -> bool:
    """Z-score the episodes' outcomes in place; False if an episode has none.

    Only the last interaction of an episode carries its outcome: step rewards stay as they are.
    """
    outcomes = [_outcome(r) for r in results]
    known = [o for o in outcomes if o is not None]
    if len(known) < group_size:
        logger.info(
            "reward_normalization: dropping group (%d/%d rollouts have None reward)",
            group_size - len(known),
            group_size,
        )
        return False
    mean = math.fsum(known) / len(known)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in known) / len(known))
    for result, outcome in zip(results, known, strict=True):
        _set_outcome(result, (outcome - mean) / std if std > 0 else 0.0)
    return True


def _outcome(result: Mapping[str, Any]) -> float | None:
    if packing.is_interactions(result):
        return _last_interaction(result).reward
    return float(result["rewards"][-1]) if "rewards" in result else None


def _set_outcome(result: dict[str, Any], value: float) -> None:
    if packing.is_interactions(result):
        _last_interaction(result).reward = value
    else:
        result["rewards"] = result["rewards"].clone()
        result["rewards"][-1] = value


def _last_interaction(result: Mapping[str, Any]) -> InteractionWithTokenLogpReward:
    return cast(InteractionWithTokenLogpReward, list(result.values())[-1])
