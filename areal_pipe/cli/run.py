"""`areal-pipe run`: progress while it runs, a summary at the end."""

import asyncio
import importlib
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

from areal_pipe.campaign.config import load_config
from areal_pipe.campaign.inspection import inspect_campaign
from areal_pipe.campaign.run import count_missing, run_campaign
from areal_pipe.campaign.runtime import Campaign
from areal_pipe.campaign.summary import summarize
from areal_pipe.cli import outcome
from areal_pipe.cli.foreground import LoopBlocked, sigterm_as_interrupt, wait_for
from areal_pipe.cli.progress import RunMeter, progress_bar
from areal_pipe.cli.tables import print_summary
from areal_pipe.contract.errors import ConfigError
from areal_pipe.episodes import prints

console = Console()

LAUNCHER = "infra.launch"
"""Starts the flows. Not part of the wheel: the library works without it."""

Launch = Callable[[Campaign, list[int]], None]


def run_command(
    path: str, overrides: list[str], *, with_prefect: bool, verbose: bool = False
) -> int:
    """Run what is missing of a campaign; returns the exit code."""
    with sigterm_as_interrupt():
        try:
            return _run(path, overrides, with_prefect=with_prefect, verbose=verbose)
        except LoopBlocked:
            _say_interrupted("User code still blocks the event loop, so the process is ended.")
            outcome.end_process(outcome.EXIT_INTERRUPTED)
        except KeyboardInterrupt:
            _say_interrupted()
            return outcome.EXIT_INTERRUPTED


def _say_interrupted(more: str = "") -> None:
    console.print(
        f"\nInterrupted. Finished episodes are kept; the same command goes on from here. {more}"
    )


def _run(path: str, overrides: list[str], *, with_prefect: bool, verbose: bool) -> int:
    config = load_config(path, overrides)
    launch = _launcher() if with_prefect else _run_in_library
    campaign = Campaign.open(config, register=False)
    campaign.on_notice = lambda text: console.print(text, markup=False)
    blocked = False
    try:
        missing = asyncio.run(count_missing(campaign))
        if missing and not sum(missing.values()):
            console.print(f"{escape(campaign.url)}: every episode is stored; finishing the commit.")
            asyncio.run(run_campaign(campaign, sorted(missing)))
            return _finish(campaign, verbose=verbose)
        if not missing:
            console.print(f"Everything is committed: {escape(campaign.url)}. Nothing to do.")
            return _finish(campaign, verbose=verbose)
        return _run_missing(campaign, missing, launch, verbose=verbose)
    except LoopBlocked:
        blocked = True
        raise
    finally:
        if not blocked:
            campaign.close()


def _run_missing(
    campaign: Campaign, missing: dict[int, int], launch: Launch, *, verbose: bool
) -> int:
    total, episodes = campaign.record.num_episodes, sum(missing.values())
    inspect_campaign(campaign)
    campaign.register()
    kept = f", {total - episodes} are stored already" if episodes < total else ""
    console.print(f"[bold]{escape(campaign.url)}[/]: {episodes} of {total} episodes to run{kept}.")
    meter = RunMeter()
    with prints.hidden(), progress_bar(console, campaign, episodes, meter):
        launch(campaign, sorted(missing))
    return _finish(campaign, meter, verbose=verbose)


def _finish(campaign: Campaign, meter: RunMeter | None = None, *, verbose: bool) -> int:
    summary = summarize(campaign.stored)
    this_run = meter.describe() if meter else None
    print_summary(console, campaign.url, summary, this_run=this_run, verbose=verbose)
    return 0 if summary.is_whole else outcome.EXIT_FAILED_EPISODES


def _run_in_library(campaign: Campaign, shards: list[int]) -> None:
    _ = campaign.engine  # loaded here: the loop would hang meanwhile

    async def body() -> None:
        await run_campaign(campaign, shards)

    wait_for(campaign.engine.executor, body(), console)


def _launcher() -> Launch:
    try:
        return importlib.import_module(LAUNCHER).run_with_prefect
    except ImportError as error:
        raise ConfigError(
            f"running with Prefect needs the checkout (pip install -e '.[all]'): {error}; "
            "or pass --no-prefect"
        ) from error
