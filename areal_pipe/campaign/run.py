"""Running a campaign with the library alone: the same groups, store and outcome as the flows."""

import asyncio

from areal_pipe.campaign.claim import claimed
from areal_pipe.campaign.runtime import Campaign
from areal_pipe.campaign.shard import ShardRun, root_cause
from areal_pipe.episodes.episode import GroupRun
from areal_pipe.storage.manifest import Manifest


async def count_missing(campaign: Campaign) -> dict[int, int]:
    """Episodes to run, by shard, for the shards that are not whole."""
    missing: dict[int, int] = {}
    for shard in range(campaign.record.num_shards):
        run = await ShardRun.open(campaign, shard)
        if not run.is_whole:
            missing[shard] = run.num_missing
    return missing


async def run_campaign(campaign: Campaign, shards: list[int]) -> list[Manifest]:
    """Run the given shards, a few at a time.

    Raises:
        ArealPipeError: the first error that is no episode's own, such as an unwritable store.
            Finished episodes are in the ledger.
    """
    try:
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(run_shard(campaign, shard)) for shard in shards]
    except BaseExceptionGroup as errors:
        raise root_cause(errors) from errors
    return [task.result() for task in tasks]


async def run_shard(campaign: Campaign, shard: int) -> Manifest:
    """Run a shard's missing episodes and commit it."""
    async with claimed(campaign, shard) as run:
        async with run.group_tasks() as groups:
            for group in run.groups():
                groups.create_task(roll_out(run, group))
        return await run.commit()


async def roll_out(run: ShardRun, group: GroupRun) -> None:
    """Run a group's missing members when it is its turn, keeping each outcome as it comes."""
    async with run.campaign.group_slots:
        await run.record_group(group)
