"""Running a campaign and reading what it stored, as tests of several folders do."""

import asyncio

from areal_pipe.campaign.config import CampaignConfig
from areal_pipe.campaign.run import count_missing, run_campaign
from areal_pipe.campaign.runtime import Campaign
from areal_pipe.storage.trial import StoredTrial, StoredVersion, open_trial


def roll_out(config: CampaignConfig) -> Campaign:
    """Open, run what is missing, close."""
    campaign = Campaign.open(config)
    try:
        missing = asyncio.run(count_missing(campaign))
        if missing:
            campaign.engine.executor.run(run_campaign(campaign, list(missing))).result(timeout=60)
    finally:
        campaign.close()
    return campaign


def trial_of(config: CampaignConfig) -> StoredTrial:
    return open_trial(config.trial_url, config.cluster.s3.storage_options() or None)


def version_of(config: CampaignConfig) -> StoredVersion:
    [version] = trial_of(config).versions
    return version
