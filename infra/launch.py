"""Running a campaign's flows from the command line, with a Prefect server that is there or made."""

import contextlib
import os
import uuid
from collections.abc import Generator
from typing import Any

from rich.console import Console

from areal_pipe.campaign import registry
from areal_pipe.campaign.config import CampaignConfig
from areal_pipe.campaign.runtime import Campaign
from areal_pipe.cli.foreground import wait_for
from infra.prefect_server import PrefectServer, ServerError, managed_server
from infra.server_watch import while_answering

console = Console()

SEND_SECONDS = 20.0
"""Limit on handing the last events and log lines to the server."""
SEND_INTERRUPTED_SECONDS = 0.5
"""The same after Ctrl-C: nobody waits for log lines then."""


def run_with_prefect(campaign: Campaign, shards: list[int]) -> None:
    """Run the campaign flow in the engine's loop, beside its rollouts.

    Uses the server that PREFECT_API_URL or the active Prefect profile names; else starts a local
    one and stops it when everything has been recorded.
    """
    # The console belongs to the progress bar; the server still gets the log lines.
    for setting in ("HANDLERS_CONSOLE_LEVEL", "INTERNAL_LEVEL"):
        os.environ.setdefault(f"PREFECT_LOGGING_{setting}", "CRITICAL")
    with _server(campaign) as (server, is_ours):
        started = _run_flow(campaign, server, num_shards=len(shards))
        if is_ours:
            recorded = server.drain(*started)
            lost = f" of {started[1]}; the store has them all" if recorded < started[1] else ""
            console.print(f"Prefect recorded {recorded} task runs{lost}.")


@contextlib.contextmanager
def _server(campaign: Campaign) -> Generator[tuple[PrefectServer, bool]]:
    """The server, and whether we started it. The campaign's engine is loaded, too."""
    from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

    if url := get_current_settings().api.url:
        server = PrefectServer(url.removesuffix("/api"))
        if not server.is_healthy():
            raise ServerError(
                f"no Prefect server answers at {url} (PREFECT_API_URL or the active profile); "
                "start it, unset the setting to get a local one, or pass --no-prefect"
            )
        console.print(f"Prefect: {server.url}")
        _ = campaign.engine
        yield server, False
        return
    console.print("Starting a local Prefect server ...")
    with (
        managed_server(while_starting=lambda: campaign.engine) as server,
        temporary_settings({PREFECT_API_URL: server.api_url}),
    ):
        console.print(f"Prefect: {server.url} (until this run ends)")
        yield server, True


def _run_flow(campaign: Campaign, server: PrefectServer, *, num_shards: int) -> tuple[str, int]:
    """Run the campaign flow; (tag of its task runs, how many there were)."""
    from prefect import tags

    from flows.campaign import campaign as campaign_flow
    from tasks.policies import task_runs_started

    before = task_runs_started()
    run_tag = f"run:{uuid.uuid4().hex[:12]}"
    config = campaign.config
    described = (config.experiment_name, config.trial_name, f"version:{config.rollout.version}")
    registry.register(campaign)
    send_seconds = SEND_INTERRUPTED_SECONDS
    try:
        with tags(*described, run_tag):
            flow = _final_result(campaign_flow, config.without_secrets())
            watched = while_answering(server, flow, console)
            wait_for(campaign.engine.executor, watched, console)
        send_seconds = SEND_SECONDS
    finally:
        registry.forget(campaign)
        _send_everything(send_seconds)
    # Prefect adds a task run for each flow run that another flow run starts.
    return run_tag, task_runs_started() - before + num_shards


async def _final_result(flow: Any, config: CampaignConfig) -> None:
    """Run the campaign flow; raises what it raised. Failed episodes are stored, and no error."""
    from flows.campaign import raise_outage

    await raise_outage(await flow(config, return_state=True))


def _send_everything(limit_seconds: float) -> None:
    """Hand queued events and log lines to the server now: at exit it may be gone."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (EventsWorker, APILogWorker):
        worker.drain_all(timeout=limit_seconds, at_exit=True)
