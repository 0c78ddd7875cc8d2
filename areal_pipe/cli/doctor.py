"""`areal-pipe doctor`: everything that can be known before the first GPU second."""

import asyncio
import uuid
from collections.abc import Callable

from rich.console import Console

from areal_pipe.campaign.config import CampaignConfig, load_config
from areal_pipe.campaign.runtime import Campaign
from areal_pipe.datasets.load import load_prompts
from areal_pipe.engine import GenerationHyperparameters, ModelRequest
from areal_pipe.errors import ArealPipeError
from areal_pipe.storage.objects import open_store

console = Console()

PROBE_TOKENS = 16
"""Generated to see whether the engine answers."""


def doctor_command(path: str, overrides: list[str]) -> int:
    """Run all checks; returns how many failed."""
    config = load_config(path, overrides)
    console.print(f"[green]✓[/] configuration: {path}")
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
            ("tokenizer", lambda: _tokenizer(campaign)),
            ("workflow", lambda: type(campaign.workflow).__name__),
            ("engine", lambda: _engine(campaign)),
        ):
            problems += _check(name, probe)
    finally:
        campaign.close()
    return problems


def _check(name: str, probe: Callable[[], str]) -> int:
    try:
        console.print(f"[green]✓[/] {name}: {probe()}", soft_wrap=True)
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


def _tokenizer(campaign: Campaign) -> str:
    if campaign.tokenizer is None:
        return "none configured"
    lengths: list[int] = []
    for prompt in campaign.prompts:
        ids = campaign.tokenizer.apply_chat_template(
            prompt.data["messages"], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        lengths.append(len(ids))
    return f"prompts of {min(lengths)} to {max(lengths)} tokens"


def _engine(campaign: Campaign) -> str:
    request = ModelRequest(
        input_ids=[0], gconfig=GenerationHyperparameters(max_new_tokens=PROBE_TOKENS)
    )
    response = asyncio.run(campaign.engine.agenerate(request))
    return f"{type(campaign.engine).__name__} answered with {response.output_len} tokens"
