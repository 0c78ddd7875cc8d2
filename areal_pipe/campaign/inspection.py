"""What can be known before the first GPU second: that workflow, reward, prompts and context fit.

Nothing here loads weights, asks a server or writes.
"""

import asyncio
import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from areal_pipe.campaign.runtime import Campaign
from areal_pipe.contract import workflow_context
from areal_pipe.contract.engine import GenerationHyperparameters
from areal_pipe.contract.errors import ArealPipeError, DatasetError, WorkflowError
from areal_pipe.contract.workflow import RolloutWorkflow, StagedWorkflow
from areal_pipe.contract.workflow_context import WorkflowContext
from areal_pipe.datasets.load import Prompt
from areal_pipe.episodes.grouping import GroupedRolloutWorkflow
from areal_pipe.rewards.call import AsyncRewardWrapper

MAX_TOKENIZED = 1000
"""Prompts tokenized: all of a small dataset, else the longest by characters."""
MAX_REPORTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLengths:
    """Tokens of the prompts that were looked at."""

    shortest: int
    longest: int
    looked_at: int


def inspect_campaign(campaign: Campaign) -> PromptLengths | None:
    """Find what cannot work; lengths of the prompts, if the workflow has a tokenize stage.

    Raises:
        WorkflowError: the workflow does not import, does not fit its arguments, or its reward
            function cannot be called.
        ConfigError: no such model, tokenizer or device.
        DatasetError: prompts that cannot be tokenized, or do not fit into the context.
    """
    workflow = campaign.workflow
    check_workflow(workflow)
    context = campaign.built_engine.context_length()
    if not isinstance(workflow, StagedWorkflow):
        return None
    lengths = asyncio.run(_tokenize(workflow, _longest(campaign.prompts)))
    if context is not None:
        _check_context(lengths, context, getattr(workflow, "gconfig", None))
    return PromptLengths(
        shortest=min(lengths.values()), longest=max(lengths.values()), looked_at=len(lengths)
    )


def check_workflow(workflow: RolloutWorkflow) -> None:
    """That its episode can be awaited and its reward function called.

    Raises:
        WorkflowError: it cannot.
    """
    inner = workflow.workflow if isinstance(workflow, GroupedRolloutWorkflow) else workflow
    if not inspect.iscoroutinefunction(inner.arun_episode):
        raise WorkflowError(
            f"{type(inner).__name__}.arun_episode must be `async def`, got a plain function"
        )
    reward = getattr(inner, "reward_fn", None)
    if isinstance(reward, AsyncRewardWrapper):
        reward.check()


def _longest(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    if len(prompts) <= MAX_TOKENIZED:
        return prompts
    return sorted(prompts, key=lambda p: len(str(p.data["messages"])), reverse=True)[:MAX_TOKENIZED]


async def _tokenize(workflow: StagedWorkflow, prompts: Sequence[Prompt]) -> dict[int, int]:
    """Prompt tokens by task_id."""
    lengths: dict[int, int] = {}
    problems: list[str] = []
    for prompt in prompts:
        context = WorkflowContext(is_eval=False, task_id=prompt.task_id, sample_idx=0)
        try:
            with workflow_context.within(context):
                draft = await workflow.tokenize(copy.deepcopy(dict(prompt.data)))
            lengths[prompt.task_id] = len(draft.input_ids)
        # Templates and tokenizers raise anything; what they say is what there is to tell.
        except Exception as error:
            if not problems and isinstance(error, WorkflowError):
                raise  # it says what is wrong with all of them
            kind = "" if isinstance(error, ArealPipeError) else f"{type(error).__name__}: "
            problems.append(f"prompt {prompt.task_id}: {kind}{error}")
    if problems:
        raise DatasetError(_report("prompts cannot be tokenized", problems))
    return lengths


def _check_context(
    lengths: dict[int, int], context: int, gconfig: GenerationHyperparameters | None
) -> None:
    """Prompts whose first request the engine would refuse."""
    wanted = GenerationHyperparameters(max_new_tokens=1) if gconfig is None else gconfig
    problems: list[str] = []
    for task_id, length in sorted(lengths.items()):
        budget = min(wanted.max_tokens - length, wanted.max_new_tokens)
        if budget <= 0 or length + budget > context:
            problems.append(f"prompt {task_id}: {length} tokens")
    if problems:
        raise DatasetError(
            f"prompt and gconfig.max_new_tokens={wanted.max_new_tokens} must fit into the context "
            f"of {context} tokens (and into gconfig.max_tokens={wanted.max_tokens}); lower "
            "max_new_tokens, shorten the prompts, or leave them out\n"
            + _report("prompts do not fit", problems)
        )


def _report(what: str, problems: Sequence[str]) -> str:
    more = len(problems) - MAX_REPORTED
    tail = [f"... and {more} more"] if more > 0 else []
    return "\n  ".join([f"{len(problems)} {what}:", *problems[:MAX_REPORTED], *tail])
