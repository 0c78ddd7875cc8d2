"""CPU milliseconds per episode of our own code, with a scripted engine.

    python -m tests.benchmarks.episode_cost [--prompts 100] [--group-size 8]

Runs one campaign without Prefect and one per granularity on a local Prefect server, and prints one
table: wall seconds, CPU of this process and its children (the server among them) per episode.
"""

import argparse
import asyncio
import json
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from areal_pipe.campaign.config import CampaignConfig
from areal_pipe.campaign.run import count_missing, run_campaign
from areal_pipe.campaign.runtime import Campaign
from areal_pipe.contract.engine import ModelRequest
from areal_pipe.storage.check import check_trial
from areal_pipe.storage.trial import open_trial

GRANULARITIES = ("group", "episode", "stage")
OUTPUT_TOKENS = 32


def many_tokens(req: ModelRequest) -> list[int]:
    """The scripted engine's answer."""
    return [7] * OUTPUT_TOKENS


async def no_reward(*args: object, **data: object) -> float:
    """A reward that costs nothing: the pool is measured elsewhere."""
    return 1.0


def campaign_config(
    folder: Path, *, name: str, granularity: str, args: argparse.Namespace
) -> CampaignConfig:
    data = folder / "prompts.jsonl"
    rows = [json.dumps({"prompt": f"What is {n}+{n}?"}) for n in range(args.prompts)]
    data.write_text("\n".join(rows))
    here = "tests.benchmarks.episode_cost"
    return CampaignConfig.model_validate(
        {
            "experiment_name": "bench",
            "trial_name": name,
            "cluster": {"fileroot": str(folder / "store")},
            "dataset": {"path": str(data)},
            "engine": {"kind": "scripted", "script": f"{here}.many_tokens"},
            "workflow": {"kwargs": {"reward_fn": f"{here}.no_reward"}},
            "rollout": {
                "group_size": args.group_size,
                "tokenizer_path": "configs/models/tiny-arith",
            },
            "orchestration": {"granularity": granularity},
        }
    )


def in_library(campaign: Campaign, shards: list[int]) -> None:
    campaign.engine.executor.run(run_campaign(campaign, shards)).result()


def measure(
    config: CampaignConfig, launch: Callable[[Campaign, list[int]], None]
) -> tuple[float, float]:
    """(wall seconds, CPU seconds) of rolling out a campaign."""
    campaign = Campaign.open(config)
    campaign.prepare()
    missing = asyncio.run(count_missing(campaign))
    wall, cpu = time.perf_counter(), cpu_seconds()
    launch(campaign, list(missing))
    spent = time.perf_counter() - wall, cpu_seconds() - cpu
    campaign.close()
    problems = list(check_trial(open_trial(config.trial_url)))
    assert not problems, problems
    return spent


def cpu_seconds() -> float:
    """User and system time of this process and of the children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--group-size", type=int, default=8)
    args = parser.parse_args()
    from infra.launch import run_with_prefect

    episodes = args.prompts * args.group_size
    table = Table("campaign", "episodes", "wall s", "CPU ms/episode", title=machine())
    with tempfile.TemporaryDirectory() as temporary:
        runs = [("no Prefect", "group", in_library)]
        runs += [(f"Prefect, {g}", g, run_with_prefect) for g in GRANULARITIES]
        for i, (label, granularity, launch) in enumerate(runs):
            config = campaign_config(
                Path(temporary), name=f"run{i}", granularity=granularity, args=args
            )
            wall, cpu = measure(config, launch)
            table.add_row(label, str(episodes), f"{wall:.1f}", f"{1000 * cpu / episodes:.2f}")
    Console().print(table)
    print("Prefect rows include the server's own CPU and its start (about 7 s, once per campaign).")


def machine() -> str:
    return f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}"


if __name__ == "__main__":
    main()
