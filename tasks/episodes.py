"""The stages of an episode, and episodes and groups as a whole, as task runs."""

import functools
from collections.abc import Awaitable, Callable
from typing import cast

from prefect.logging import get_run_logger

from areal_pipe.campaign.shard import ShardRun
from areal_pipe.contract.engine import InferenceEngine
from areal_pipe.episodes.episode import EpisodeRun, GroupRun
from areal_pipe.episodes.watched import WatchedEngine
from tasks.policies import pipeline_task


@pipeline_task("tokenize {group.task_id}")
async def tokenize(group: GroupRun) -> None:
    await group.tokenize()


@pipeline_task("generate {member.label}")
async def generate(member: EpisodeRun) -> None:
    await member.generate()
    draft = member.draft
    get_run_logger().info("%d tokens, %s", len(draft.completion_ids), draft.stop_reason)


@pipeline_task("reward {member.label}")
async def reward(member: EpisodeRun) -> None:
    await member.reward()
    get_run_logger().info("reward %s", member.draft.reward)


@pipeline_task("pack {member.label}")
async def pack(member: EpisodeRun) -> None:
    await member.pack()


@pipeline_task("generate {member.label}")
async def generate_within(member: EpisodeRun, call: Callable[[], Awaitable[None]]) -> None:
    """One model call of a workflow that has no stages of its own."""
    await call()


@pipeline_task("episode {member.label}")
async def episode(member: EpisodeRun) -> None:
    await member.stages()


@pipeline_task("episode {member.label}")
async def watched_episode(member: EpisodeRun) -> None:
    """An episode without stages, its model calls as task runs beneath it."""
    around = functools.partial(generate_within, member)
    member.engine = cast(InferenceEngine, WatchedEngine(member.engine, around))
    await member.whole()


class EpisodesFailed(Exception):
    """Episodes of a group failed. They are recorded: this is for those who look at the UI."""


@pipeline_task("group {group.task_id}")
async def roll_out_group(run: ShardRun, group: GroupRun) -> None:
    """
    Raises:
        EpisodesFailed: some did, and were recorded as such.
    """
    episodes = await run.record_group(group)
    failures = [e.failure for e in episodes if e.failure is not None]
    get_run_logger().info("%d episodes, %d failed", len(episodes), len(failures))
    if failures:
        first = failures[0]
        raise EpisodesFailed(
            f"{len(failures)} of {len(episodes)} episodes failed, the first in {first.stage}: "
            f"{first.error_class}: {first.message}"
        )
