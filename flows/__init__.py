"""Prefect flows: a campaign, and the rollout of one of its shards."""
