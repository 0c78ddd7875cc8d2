"""Campaigns open in this process, so that the shards of one share its engine."""

import json

from areal_pipe.campaign.config import CampaignConfig
from areal_pipe.campaign.runtime import Campaign

_open: dict[str, Campaign] = {}


def register(campaign: Campaign) -> None:
    """Make an open campaign the one that `campaign_of` finds for its configuration."""
    _open[_key(campaign.config)] = campaign


def campaign_of(config: CampaignConfig) -> Campaign:
    """The campaign of a configuration, opened on first use. See `Campaign.open` for errors."""
    if _key(config) not in _open:
        register(Campaign.open(config))
    return _open[_key(config)]


def forget(campaign: Campaign) -> None:
    """Take a campaign out again."""
    _open.pop(_key(campaign.config), None)


def _key(config: CampaignConfig) -> str:
    # Without credentials: flow parameters do not carry them.
    return json.dumps([config.storable(), config.cluster.s3.endpoint_url], sort_keys=True)
