"""A campaign: all shards that are not whole yet, a few at a time."""

import asyncio
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.exceptions import FailedRun
from prefect.states import Completed, Failed

from areal_pipe.campaign.config import CampaignConfig
from areal_pipe.campaign.registry import campaign_of
from areal_pipe.campaign.run import count_missing
from flows.rollout import rollout


@flow(
    name="campaign",
    flow_run_name="{config.experiment_name}/{config.trial_name}",
    persist_result=False,
)
async def campaign(config: CampaignConfig) -> State[Any]:
    """Roll out a campaign; run again, it runs only what is missing.

    Args:
        config: the campaign.
    """
    missing = await count_missing(campaign_of(config))
    async with asyncio.TaskGroup() as shards:
        runs = [shards.create_task(final_state(config, shard)) for shard in missing]
    states = [run.result() for run in runs]
    for state in states:
        await raise_outage(state)
    failed = [state for state in states if not state.is_completed()]
    if failed:
        reasons = "; ".join(state.message or "no reason given" for state in failed)
        return Failed(message=f"{len(failed)} of {len(states)} shards are not whole: {reasons}")
    return Completed(message=f"{len(states)} shards committed")


async def final_state(config: CampaignConfig, shard: int) -> State[Any]:
    """Run a shard's rollout; its failure is a state here, not an exception."""
    run: Any = rollout(config, shard, return_state=True)
    return await run


async def raise_outage(state: State[Any]) -> None:
    """An error that is no episode's own, such as an unwritable store, is the campaign's error.

    A run that found episodes failed has said so with a state; everything else was raised.
    """
    error = await state.aresult(raise_on_failure=False)
    if isinstance(error, BaseException) and not isinstance(error, FailedRun):
        raise error
