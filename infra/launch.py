"""Running a campaign's flows from the command line, with a Prefect server that is there or made."""

import asyncio
import os
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from areal_pipe.campaign import registry
from areal_pipe.campaign.config import CampaignConfig
from areal_pipe.campaign.runtime import Campaign
from areal_pipe.errors import ArealPipeError
from infra.prefect_server import PrefectServer, ServerError, managed_server

console = Console()

SEND_SECONDS = 20.0
"""Limit on handing the last events and log lines to the server."""


def run_with_prefect(campaign: Campaign, shards: list[int]) -> None:
    """Run the campaign flow in this process.

    Uses the server that PREFECT_API_URL or the active Prefect profile names; else starts a local
    one and stops it when everything has been recorded.
    """
    # The console belongs to the progress bar; the server still gets the log lines.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    with _server() as server:
        _run_flow(campaign, server, num_shards=len(shards))


@contextmanager
def _server() -> Generator[PrefectServer | None]:
    """The server we started; None if there is one already."""
    from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

    if url := get_current_settings().api.url:
        server = PrefectServer(url.removesuffix("/api"))
        if not server.is_healthy():
            raise ServerError(
                f"no Prefect server answers at {url} (PREFECT_API_URL or the active profile); "
                "start it, unset the setting to get a local one, or pass --no-prefect"
            )
        console.print(f"Prefect: {server.url}")
        yield None
        return
    console.print("Starting a local Prefect server ...")
    with managed_server() as server, temporary_settings({PREFECT_API_URL: server.api_url}):
        console.print(f"Prefect: {server.url} (until this run ends)")
        yield server


def _run_flow(campaign: Campaign, server: PrefectServer | None, *, num_shards: int) -> None:
    from prefect import tags
    from prefect.exceptions import TerminationSignal

    from flows.campaign import campaign as campaign_flow
    from tasks.policies import task_runs_started

    before = task_runs_started()
    run_tag = f"run:{uuid.uuid4().hex[:12]}"
    config = campaign.config
    described = (config.experiment_name, config.trial_name, f"version:{config.rollout.version}")
    registry.register(campaign)
    try:
        with tags(*described, run_tag):
            asyncio.run(_final_result(campaign_flow, config.without_secrets()))
    except (TerminationSignal, BaseExceptionGroup) as error:
        # SIGTERM ends a run the way Ctrl-C does. Prefect raises it in whatever task is running.
        groups = isinstance(error, BaseExceptionGroup)
        if groups and error.subgroup(TerminationSignal) is None:
            raise
        raise KeyboardInterrupt from error
    finally:
        registry.forget(campaign)
        _send_everything()
    if server is not None:
        # Prefect adds a task run for each flow run that another flow run starts.
        started = task_runs_started() - before + num_shards
        recorded = server.drain(run_tag, started)
        lost = f" of {started}; the store has them all" if recorded < started else ""
        console.print(f"Prefect recorded {recorded} task runs{lost}.")


async def _final_result(flow: Any, config: CampaignConfig) -> None:
    """Run the campaign flow; raises our errors, but for failed episodes: those are stored."""
    state = await flow(config, return_state=True)
    error = await state.aresult(raise_on_failure=False)
    if isinstance(error, ArealPipeError):
        raise error


def _send_everything() -> None:
    """Hand queued events and log lines to the server now: at exit it may be gone."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (EventsWorker, APILogWorker):
        worker.drain_all(timeout=SEND_SECONDS, at_exit=True)
