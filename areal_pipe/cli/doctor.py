"""`areal-pipe doctor`: everything that can be known before the first GPU second."""

import uuid
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console
from rich.markup import escape

from areal_pipe.campaign.config import CampaignConfig, load_config
from areal_pipe.campaign.inspection import inspect_campaign
from areal_pipe.campaign.runtime import Campaign
from areal_pipe.contract.errors import ArealPipeError, WorkflowError
from areal_pipe.datasets.load import load_prompts
from areal_pipe.episodes.episode import GroupRun
from areal_pipe.storage.objects import open_store
from areal_pipe.storage.rows import rows_of

console = Console()


def doctor_command(path: str, overrides: list[str]) -> int:
    """Run all checks; returns how many failed."""
    config = load_config(path, overrides)
    console.print(f"[green]✓[/] configuration: {escape(path)}")
    problems = _check("dataset", lambda: _dataset(config)) + _check(
        "storage", lambda: _storage(config)
    )
    if problems:
        return problems
    opened: list[Campaign] = []
    if _check("recipe", lambda: _recipe(config, opened)):
        return 1
    [campaign] = opened
    try:
        for name, probe in (
            ("workflow", lambda: _workflow(campaign)),
            ("reward, prompts", lambda: _inspection(campaign)),
            ("engine", lambda: _engine(campaign)),
            ("episode", lambda: _episode(campaign)),
        ):
            if _check(name, probe):
                return problems + 1
    finally:
        campaign.close()
    return problems


def _check(name: str, probe: Callable[[], str]) -> int:
    try:
        console.print(f"[green]✓[/] {name}: {escape(probe())}", soft_wrap=True)
    # Whatever a probe runs into is what the doctor is there to tell.
    except Exception as error:  # noqa: BLE001
        console.print(f"[red]✗[/] {name}: ", end="")
        kind = "" if isinstance(error, ArealPipeError) else f"{type(error).__name__}: "
        console.print(f"{kind}{error}", markup=False, soft_wrap=True)
        return 1
    return 0


def _dataset(config: CampaignConfig) -> str:
    options = config.cluster.options_for(config.dataset.path)
    prompts = load_prompts(config.dataset, storage_options=options)
    return f"{len(prompts)} prompts in {config.dataset.path}"


def _storage(config: CampaignConfig) -> str:
    store = open_store(config.trial_url, config.cluster.options_for(config.trial_url))
    key = f"doctor-{uuid.uuid4().hex}"
    store.put(key, b"areal-pipe doctor")
    store.delete([key])
    return f"{config.trial_url} is writable"


def _recipe(config: CampaignConfig, opened: list[Campaign]) -> str:
    opened.append(Campaign.open(config, register=False))
    return f"{opened[0].record.num_episodes} episodes planned"


def _workflow(campaign: Campaign) -> str:
    return type(campaign.workflow).__name__


def _inspection(campaign: Campaign) -> str:
    lengths = inspect_campaign(campaign)
    if lengths is None:
        return "the workflow makes its own prompts"
    looked_at = f"{lengths.looked_at} prompts of {lengths.shortest} to {lengths.longest} tokens"
    context = campaign.built_engine.context_length()
    return f"{looked_at}, context {context or 'unknown'}"


def _engine(campaign: Campaign) -> str:
    return f"{type(campaign.engine).__name__} is ready"


def _episode(campaign: Campaign) -> str:
    """Run the first prompt once, for nothing: what it returns is judged and forgotten."""
    prompt = campaign.prompts[0]
    group = GroupRun(
        campaign.workflow,
        campaign.engine,
        prompt.data,
        task_id=prompt.task_id,
        samples=(0,),
        is_eval=campaign.config.rollout.is_eval,
        policy=replace(campaign.config.rollout.episode_policy(), infrastructure_retries=0),
    )
    [episode] = campaign.engine.executor.run(group.run()).result()
    rows = rows_of(episode, data=prompt.data, decoder=campaign.tokenizer)
    if episode.failure is not None:
        failure = episode.failure
        raise WorkflowError(
            f"it failed in stage {failure.stage}: {failure.error_class}: {failure.message}\n"
            f"{failure.traceback}"
        )
    tokens = sum(t.num_generated for t in episode.trajectories)
    return (
        f"{prompt.task_id}/0 {episode.status}, {tokens} tokens, reward {episode.reward}, "
        f"{len(rows)} rows"
    )
