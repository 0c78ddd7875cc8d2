"""Claiming a shard: a slot in this process, a lease among all, and the recipe as it was planned."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

from areal_pipe.campaign.runtime import Campaign
from areal_pipe.campaign.shard import ShardRun
from areal_pipe.contract.errors import ConcurrentWrite, ShardBusy, StorageError
from areal_pipe.storage.lease import RENEW_SECONDS, Lease

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""How often a shard that another run works on is looked at."""


@contextlib.asynccontextmanager
async def claimed(campaign: Campaign, shard: int) -> AsyncGenerator[ShardRun]:
    """A shard, open, while nobody else works on it.

    Waits, without taking a slot, while another run has it; what that run completed is then found
    complete. Its process dying frees the shard.

    Raises:
        RecipeMismatch: the version was planned anew, with another recipe, since it was opened.
    """
    told = False
    while True:
        async with campaign.shard_slots:
            try:
                lease = await campaign.run_blocking(
                    Lease.acquire, campaign.store, campaign.keys.lease(shard)
                )
            except ShardBusy as holder:
                if not told:
                    campaign.on_notice(f"shard {shard} is being run by {holder}; waiting for it")
                told = True
            else:
                async with _kept(campaign, lease):
                    await campaign.run_blocking(campaign.check_recipe)
                    yield await ShardRun.open(campaign, shard)
                return
        await asyncio.sleep(LOOK_SECONDS)


@contextlib.asynccontextmanager
async def _kept(campaign: Campaign, lease: Lease) -> AsyncGenerator[None]:
    """Renew a lease until the block ends, then give it back."""
    renewing = asyncio.ensure_future(_renew(campaign, lease))
    try:
        yield
    finally:
        renewing.cancel()
        # Best effort: a lease that cannot be given back ends with this process.
        with contextlib.suppress(StorageError):
            await campaign.run_blocking(lease.release)


async def _renew(campaign: Campaign, lease: Lease) -> None:
    while True:
        await asyncio.sleep(RENEW_SECONDS)
        try:
            await campaign.run_blocking(lease.renew)
        except ConcurrentWrite as error:
            logger.warning("%s", error)
            return
        except StorageError as error:  # an outage: the work itself will say so if it lasts
            logger.warning("a lease could not be renewed: %s", error)
