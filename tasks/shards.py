"""Committing a shard, and saying in the UI what failed."""

import re

from prefect.artifacts import acreate_table_artifact
from prefect.logging import get_run_logger

from areal_pipe.campaign.shard import ShardRun
from areal_pipe.storage.manifest import FailureRecord, Manifest
from tasks.policies import pipeline_task


@pipeline_task("commit shard {run.shard}")
async def commit(run: ShardRun) -> Manifest:
    manifest = await run.commit()
    get_run_logger().info(
        "%d groups accepted, %d rejected, %d open",
        len(manifest.accepted),
        len(manifest.rejected),
        len(manifest.open),
    )
    return manifest


@pipeline_task("list failed episodes of shard {run.shard}")
async def list_failures(run: ShardRun, failures: list[FailureRecord]) -> None:
    config = run.campaign.config
    await acreate_table_artifact(
        key=artifact_key(
            "failed",
            config.experiment_name,
            config.trial_name,
            config.rollout.scope,
            str(config.rollout.version),
            str(run.shard),
        ),
        table=[failure.model_dump() for failure in failures],
        description=f"Failed episodes of shard {run.shard}. Running again retries only these.",
    )


def artifact_key(*words: str) -> str:
    """A key as Prefect takes them: lowercase letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")
