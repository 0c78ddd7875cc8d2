"""Running a campaign with the library alone: the same groups, store and outcome as the flows."""

import asyncio

from areal_pipe.campaign.runtime import Campaign
from areal_pipe.campaign.shard import ShardRun
from areal_pipe.episode import GroupRun
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
    settings = campaign.config
    shard_slots = asyncio.Semaphore(settings.orchestration.max_concurrent_shards)
    group_slots = asyncio.Semaphore(settings.rollout.max_concurrent_rollouts)

    async def bounded(shard: int) -> Manifest:
        async with shard_slots:
            return await run_shard(campaign, shard, group_slots)

    try:
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(bounded(shard)) for shard in shards]
    except BaseExceptionGroup as errors:
        raise root_cause(errors) from errors
    return [task.result() for task in tasks]


async def run_shard(campaign: Campaign, shard: int, group_slots: asyncio.Semaphore) -> Manifest:
    """Run a shard's missing episodes and commit it."""
    run = await ShardRun.open(campaign, shard)

    async def bounded(group: GroupRun) -> None:
        async with group_slots:
            await run.record_group(group)

    try:
        async with asyncio.TaskGroup() as groups:
            for group in run.groups():
                groups.create_task(bounded(group))
    finally:
        await run.drain()
    return await run.commit()


def root_cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first single exception inside nested groups."""
    first = errors.exceptions[0]
    return root_cause(first) if isinstance(first, BaseExceptionGroup) else first
