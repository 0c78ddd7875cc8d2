"""Roll out one shard: run what is missing of it, close its groups, commit."""

import asyncio
import contextlib
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from areal_pipe.campaign.claim import claimed
from areal_pipe.campaign.config import CampaignConfig
from areal_pipe.campaign.registry import campaign_of
from areal_pipe.campaign.shard import ShardRun
from areal_pipe.campaign.summary import describe_open
from areal_pipe.episodes.episode import EpisodeRun, GroupRun
from tasks import episodes
from tasks.shards import commit, list_failures


@flow(name="rollout", flow_run_name="shard {shard}", persist_result=False)
async def rollout(config: CampaignConfig, shard: int) -> State[Any]:
    """Roll out one shard of a campaign; run again, it runs only what is missing.

    Args:
        config: the campaign.
        shard: number of the shard in the campaign's plan.
    """
    campaign = campaign_of(config)
    async with claimed(campaign, shard) as run:
        async with run.group_tasks() as groups:
            for group in run.groups():
                groups.create_task(roll_out_group(run, group))
        manifest = await commit(run)
        if manifest.failures:
            await list_failures(run, manifest.failures)
        if not run.is_closed:
            return Failed(message=describe_open(manifest, run.num_episodes))
    return Completed(message=f"{run.num_episodes} episodes committed")


async def roll_out_group(run: ShardRun, group: GroupRun) -> None:
    """One prompt's missing episodes, in as many task runs as the campaign wants to see."""
    async with run.campaign.group_slots:
        if run.campaign.config.orchestration.granularity == "group":
            with contextlib.suppress(episodes.EpisodesFailed):  # recorded, and shown as failed
                await episodes.roll_out_group(run, group)
            return
        if failed := await group.tokenized(tokenize(run, group)):
            await run.record_all(failed)
            return
        async with asyncio.TaskGroup() as members:
            for member in group.members():
                members.create_task(roll_out_member(run, member))


async def tokenize(run: ShardRun, group: GroupRun) -> None:
    """A task run where stages are shown; nobody wants to see it otherwise."""
    if run.campaign.config.orchestration.granularity == "stage" and group.is_staged:
        await episodes.tokenize(group)
    else:
        await group.tokenize()


async def roll_out_member(run: ShardRun, member: EpisodeRun) -> None:
    """One episode, recorded whatever its outcome."""
    if run.campaign.config.orchestration.granularity == "episode":
        body = episodes.episode(member)
    elif member.is_staged:
        body = stage_by_stage(member)
    else:
        body = episodes.watched_episode(member)
    await run.record(await member.settle(body))


async def stage_by_stage(member: EpisodeRun) -> None:
    if member.owes_reward:
        await episodes.reward(member)
    while not member.draft.finished:
        await episodes.generate(member)
        await episodes.reward(member)
    await episodes.pack(member)
