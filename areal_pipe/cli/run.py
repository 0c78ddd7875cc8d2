"""`areal-pipe run`: progress while it runs, a summary at the end."""

import asyncio
import importlib
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console

from areal_pipe.campaign.config import load_config
from areal_pipe.campaign.run import count_missing, run_campaign
from areal_pipe.campaign.runtime import Campaign
from areal_pipe.campaign.summary import summarize
from areal_pipe.cli import outcome
from areal_pipe.cli.progress import RunMeter, progress_bar
from areal_pipe.cli.tables import print_summary
from areal_pipe.errors import ConfigError

console = Console()

STOP_SECONDS = 4.0
"""Limit on finishing what an interrupted run is writing."""

LAUNCHER = "infra.launch"
"""Starts the flows. Not part of the wheel: the library works without it."""


def run_command(path: str, overrides: list[str], *, with_prefect: bool) -> int:
    """Run what is missing of a campaign; returns the exit code."""
    config = load_config(path, overrides)
    launch = _launcher() if with_prefect else _run_in_library
    campaign = Campaign.open(config)
    try:
        missing = asyncio.run(count_missing(campaign))
        if missing and not sum(missing.values()):
            console.print(f"{campaign.url}: every episode is stored; finishing the commit.")
            asyncio.run(run_campaign(campaign, sorted(missing)))
            return _finish(campaign)
        if not missing:
            console.print(f"Everything is committed: {campaign.url}. Nothing to do.")
            return _finish(campaign)
        return _run_missing(campaign, missing, launch)
    finally:
        campaign.close()


def _run_missing(
    campaign: Campaign, missing: dict[int, int], launch: Callable[[Campaign, list[int]], None]
) -> int:
    total, episodes = campaign.record.num_episodes, sum(missing.values())
    kept = f", {total - episodes} are stored already" if episodes < total else ""
    console.print(f"[bold]{campaign.url}[/]: {episodes} of {total} episodes to run{kept}.")
    campaign.prepare()
    meter = RunMeter()
    try:
        with progress_bar(console, campaign, episodes, meter):
            launch(campaign, sorted(missing))
    except KeyboardInterrupt:
        console.print(
            "\nInterrupted. Finished episodes are kept; the same command goes on from here."
        )
        return outcome.EXIT_INTERRUPTED
    return _finish(campaign, meter)


def _finish(campaign: Campaign, meter: RunMeter | None = None) -> int:
    summary = summarize(campaign.stored)
    print_summary(console, campaign.url, summary, this_run=meter.describe() if meter else None)
    return 0 if summary.is_whole else outcome.EXIT_FAILED_EPISODES


def _run_in_library(campaign: Campaign, shards: list[int]) -> None:
    """Run in the loop of the engine's executor; Ctrl-C cancels and keeps what is done."""
    ended = threading.Event()

    async def body() -> None:
        try:
            await run_campaign(campaign, shards)
        finally:
            ended.set()

    running = campaign.engine.executor.run(body())
    with _sigterm_as_interrupt():
        try:
            running.result()
        except KeyboardInterrupt:
            running.cancel()
            ended.wait(STOP_SECONDS)  # writes under way are finished first
            raise


def _launcher() -> Callable[[Campaign, list[int]], None]:
    try:
        return importlib.import_module(LAUNCHER).run_with_prefect
    except ImportError as error:
        raise ConfigError(
            f"running with Prefect needs the checkout (pip install -e '.[all]'): {error}; "
            "or pass --no-prefect"
        ) from error


@contextmanager
def _sigterm_as_interrupt() -> Generator[None]:
    """Let SIGTERM end a run the way Ctrl-C does."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
