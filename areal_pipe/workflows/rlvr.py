"""One turn, one verifiable reward: the workhorse of RLVR training."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from areal_pipe.contract import workflow_context
from areal_pipe.contract.engine import GenerationHyperparameters, InferenceEngine, ModelRequest
from areal_pipe.contract.errors import WorkflowError
from areal_pipe.contract.workflow import Draft, StagedWorkflow
from areal_pipe.episodes.seeding import derive_seed
from areal_pipe.rewards.call import AsyncRewardWrapper, Isolation

RewardFn = Callable[..., Any]


class RLVRWorkflow(StagedWorkflow):
    """Tokenize the row's messages, generate once, score with `reward_fn`.

    `reward_fn(prompt, completions, prompt_ids, completion_ids, **data)` gets the decoded texts
    (special tokens included), the token ids, and the columns of the dataset row.
    """

    def __init__(
        self,
        reward_fn: RewardFn | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        enable_thinking: bool = False,
        get_input_ids_fn: Callable[[Any, Any, bool], list[int]] | None = None,
        data_extract_prompt_fn: Callable[[dict[str, Any]], Any] | None = None,
        *,
        reward_timeout_seconds: float = 15.0,
        reward_retries: int = 0,
        reward_isolation: Isolation = "worker",
    ) -> None:
        """
        Args:
            reward_fn: a function, or its import string.
            gconfig: how to sample; `seed` is a base from which each sample derives its own.
            tokenizer: with a chat template, unless `get_input_ids_fn` does without.
            enable_thinking: passed to the chat template.
            get_input_ids_fn: `(messages, tokenizer, enable_thinking)` to prompt tokens.
            data_extract_prompt_fn: row to messages; the `messages` column by default.
            reward_timeout_seconds: limit on one reward; beyond it the episode fails.
            reward_retries: further attempts after a failed reward.
            reward_isolation: `call` gives every reward a process of its own.
        """
        self.reward_fn = AsyncRewardWrapper(
            reward_fn,
            reward_timeout_seconds,
            max_retries=reward_retries,
            isolation=reward_isolation,
        )
        self.tokenizer = tokenizer
        self.gconfig = gconfig.new(n_samples=1)
        self.enable_thinking = enable_thinking
        self._get_input_ids = get_input_ids_fn or input_ids_of_messages
        self._extract_prompt = data_extract_prompt_fn or messages_of

    async def tokenize(self, data: dict[str, Any]) -> Draft:
        ids = self._get_input_ids(self._extract_prompt(data), self.tokenizer, self.enable_thinking)
        return Draft.of_prompt(data, list(ids))

    async def generate(self, engine: InferenceEngine, draft: Draft) -> Draft:
        context = workflow_context.get()
        gconfig, seeds = self.gconfig, draft.seeds
        if gconfig.seed is not None:
            place = (context.task_id or 0, context.sample_idx or 0, draft.turns)
            gconfig = gconfig.new(seed=derive_seed(gconfig.seed, *place))
            seeds = (*seeds, gconfig.seed or 0)
        request = ModelRequest(
            input_ids=list(draft.input_ids), gconfig=gconfig, tokenizer=self.tokenizer
        )
        response = await engine.agenerate(request)
        generated = draft.with_generated(
            response.output_tokens,
            response.output_logprobs,
            response.output_versions,
            response.stop_reason,
        )
        return replace(generated, seeds=seeds)

    async def reward(self, draft: Draft) -> Draft:
        return replace(draft, reward=await self.score(draft), finished=True)

    async def score(self, draft: Draft) -> float:
        """The reward function's verdict on the last turn."""
        prompt_ids = list(draft.input_ids[: draft.prompt_len])
        completion_ids = draft.completion_ids
        reserved = {"prompt", "completions", "prompt_ids", "completion_ids"}
        columns = {k: v for k, v in draft.data.items() if k not in reserved}
        return await self.reward_fn(
            self.tokenizer.decode(prompt_ids),
            self.tokenizer.decode(completion_ids),
            prompt_ids,
            completion_ids,
            **columns,
        )

    async def pack(self, draft: Draft) -> dict[str, torch.Tensor]:
        return pack_draft(draft)


def pack_draft(draft: Draft) -> dict[str, torch.Tensor]:
    """A finished draft as a tensor dict with a batch of one (see `packing` for the contract)."""
    row: dict[str, torch.Tensor] = {
        "input_ids": torch.tensor(draft.input_ids, dtype=torch.int32),
        "loss_mask": torch.tensor(draft.loss_mask, dtype=torch.int32),
        "logprobs": torch.tensor(draft.logprobs, dtype=torch.float32),
        "versions": torch.tensor(draft.versions, dtype=torch.int32),
        "turn_ids": torch.tensor(draft.turn_ids, dtype=torch.int32),
        "attention_mask": torch.ones(len(draft.input_ids), dtype=torch.bool),
        "rewards": torch.tensor(draft.reward, dtype=torch.float32),
    }
    return {key: value.unsqueeze(0) for key, value in row.items()}


def messages_of(data: Mapping[str, Any]) -> Any:
    """The row's `messages`.

    Raises:
        WorkflowError: it has none.
    """
    if "messages" not in data:
        raise WorkflowError(
            "RLVRWorkflow reads the column 'messages', the row has "
            f"{', '.join(map(repr, data)) or 'no columns'}; pass data_extract_prompt_fn"
        )
    return data["messages"]


def input_ids_of_messages(messages: Any, tokenizer: Any, enable_thinking: bool) -> list[int]:
    """Prompt tokens through the tokenizer's chat template, ready for the assistant's turn.

    Raises:
        WorkflowError: there is no tokenizer, or it has no chat template.
    """
    if tokenizer is None:
        raise WorkflowError(
            "RLVRWorkflow needs a tokenizer, got None; set rollout.tokenizer_path or engine.model"
        )
    if not getattr(tokenizer, "chat_template", "unknown"):
        raise WorkflowError(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template; use "
            "an instruction-tuned model's, put a chat_template.jinja into its folder, or pass "
            "get_input_ids_fn"
        )
    encoded = tokenizer.apply_chat_template(
        messages,
        tokenize=True,
        add_generation_prompt=True,
        enable_thinking=enable_thinking,
        return_dict=False,
    )
    return list(encoded)
