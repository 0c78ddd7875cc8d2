"""The workflows that are shipped: tokens, masks, versions and rewards of whole episodes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from areal_pipe import (
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
    MultiTurnWorkflow,
    RLVRWorkflow,
    ScriptedEngine,
)
from tests.vectors.vector_data import Vector, assert_same, load, outcome

QUESTION = "2+2?"
ANSWER_IDS = [101, 60]
ROW = {"messages": [{"role": "user", "content": QUESTION}], "answer": "4"}


@dataclass(frozen=True, kw_only=True)
class ToyTokenizer:
    """Renders the question and the retry message as the tokens a vector gives for them.

    Both end with the token that opens the assistant's turn.
    """

    prompt_tokens: list[int]
    retry_tokens: list[int]
    eos_token_id: int = 2
    pad_token_id: int = 0

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool = False,
        enable_thinking: bool = False,
        return_dict: bool = False,
    ) -> list[int]:
        rendered = [token for message in messages for token in self._message(message)]
        return rendered + self.prompt_tokens[-1:] if add_generation_prompt else rendered

    def _message(self, message: dict[str, str]) -> list[int]:
        if message["role"] == "assistant":
            return [*ANSWER_IDS, self.eos_token_id]
        asked = message["content"] == QUESTION
        return (self.prompt_tokens if asked else self.retry_tokens)[:-1]

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


@pytest.mark.parametrize("vector", load("rlvr_workflow"))
async def test_an_rlvr_episode_gives_the_tensors_of_the_vector(vector: Vector) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    async def reward(*args: Any, **data: Any) -> float:
        calls.append((args, data))
        return vector.input["reward"]

    answer = ModelResponse(output_tokens=vector.input["output"], output_logprobs=[-0.5, -0.25])
    engine = ScriptedEngine([answer])
    engine.set_version(3)
    tokenizer = ToyTokenizer(prompt_tokens=vector.input["prompt_tokens"], retry_tokens=[])
    workflow = RLVRWorkflow(reward, GenerationHyperparameters(), tokenizer)
    result = await workflow.arun_episode(engine, ROW)

    assert_same(result, vector.expected["result"])
    [(args, data)] = calls
    assert [str(argument) for argument in args] == vector.expected["reward_fn_call"]["args"]
    assert sorted(data) == vector.expected["reward_fn_call"]["kwargs"]


@pytest.mark.parametrize("vector", load("multi_turn_workflow"))
async def test_a_multi_turn_episode_gives_the_tensors_of_the_vector(vector: Vector) -> None:
    with outcome(vector.expected):
        workflow = multi_turn_workflow(vector.input)
        engine = engine_that_learns_after_each_turn(vector.input["outputs"])
        result = await workflow.arun_episode(engine, ROW)
        assert_same(result, vector.expected["result"])
        assert len(engine.requests) == len(vector.input["rewards_per_turn"])


def multi_turn_workflow(case: dict[str, Any]) -> MultiTurnWorkflow:
    rewards = iter(case.get("rewards_per_turn", []))

    async def reward(*args: Any, **data: Any) -> float:
        return next(rewards)

    tokenizer = ToyTokenizer(
        prompt_tokens=case.get("prompt_tokens", []),
        retry_tokens=case.get("retry_prompt_tokens", []),
        eos_token_id=case.get("eos", 2),
    )
    gconfig = GenerationHyperparameters()
    return MultiTurnWorkflow(reward, gconfig, tokenizer, case["max_turns"], case["turn_discount"])


def engine_that_learns_after_each_turn(outputs: list[list[int]]) -> ScriptedEngine:
    turns: Iterator[list[int]] = iter(outputs)

    def answer(req: ModelRequest) -> list[int]:
        engine.set_version(engine.get_version() + 1)
        return next(turns)

    engine = ScriptedEngine(answer)
    return engine
