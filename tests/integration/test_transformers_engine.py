"""The transformers engine on the real demo model."""

import asyncio
from collections.abc import Generator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_pipe.contract.engine import GenerationHyperparameters, ModelRequest, ModelResponse
from areal_pipe.contract.errors import ConfigError, RequestError
from areal_pipe.engines.transformers_local import TransformersEngine
from tests.conftest import ROOT

MODEL = str(ROOT / "configs/models/tiny-arith")


@pytest.fixture(scope="module")
def engine() -> Generator[TransformersEngine]:
    engine = TransformersEngine(MODEL, num_threads=1, max_batch_size=32)
    engine.initialize()
    engine.set_version(4)
    yield engine
    engine.destroy()


def prompt_of(engine: TransformersEngine, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    return engine.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


def request(engine: TransformersEngine, question: str, **settings: Any) -> ModelRequest:
    g = GenerationHyperparameters(**({"max_new_tokens": 32} | settings))
    return ModelRequest(
        input_ids=prompt_of(engine, question), gconfig=g, tokenizer=engine.tokenizer
    )


async def generate(engine: TransformersEngine, requests: list[ModelRequest]) -> list[ModelResponse]:
    return await asyncio.gather(*(engine.agenerate(r) for r in requests))


def teacher_forced(response: ModelResponse, temperature: float) -> torch.Tensor:
    """Logprobs of the output tokens by one plain forward pass in fp32."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    ids = torch.tensor([[*response.input_tokens, *response.output_tokens]])
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, response.input_len - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs.gather(1, torch.tensor(response.output_tokens)[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_match_a_teacher_forced_pass_whatever_else_is_in_the_batch(
    engine: TransformersEngine, temperature: float
) -> None:
    requests = [
        request(engine, f"What is {a}+{3 * a}?", seed=a, temperature=temperature)
        for a in range(10, 30)
    ]
    for response in await generate(engine, requests):
        expected = teacher_forced(response, temperature)
        difference = (torch.tensor(response.output_logprobs) - expected).abs().max()
        assert difference < 1e-4
        assert response.output_versions == [4] * response.output_len


async def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_crowd(
    engine: TransformersEngine,
) -> None:
    one = request(engine, "What is 57+38?", seed=11, temperature=1.5)
    others = [request(engine, f"Compute {a}*7.", temperature=2.0) for a in range(2, 30)]
    [alone] = await generate(engine, [one])
    crowded = (await generate(engine, [*others, one, *others]))[len(others)]
    assert crowded.output_tokens == alone.output_tokens
    assert crowded.output_logprobs == pytest.approx(alone.output_logprobs, abs=1e-5)


async def test_other_seeds_give_other_tokens(engine: TransformersEngine) -> None:
    requests = [request(engine, "What is 57+38?", seed=s, temperature=2.0) for s in range(16)]
    responses = await generate(engine, requests)
    assert len({tuple(r.output_tokens) for r in responses}) > 1


async def test_end_of_sequence_is_kept_and_is_the_reason(engine: TransformersEngine) -> None:
    [response] = await generate(engine, [request(engine, "What is 12+30?", greedy=True)])
    assert response.output_tokens[-1] == engine.tokenizer.eos_token_id
    assert response.stop_reason == "stop"
    assert engine.tokenizer.decode(response.output_tokens_without_stop) == "The answer is 42."


async def test_limits_and_stops_end_it_as_they_say(engine: TransformersEngine) -> None:
    cut, stopped, by_id, unstoppable = await generate(
        engine,
        [
            request(engine, "What is 12+30?", greedy=True, max_new_tokens=3),
            request(engine, "What is 12+30?", greedy=True, stop=["answer is"]),
            request(engine, "What is 12+30?", greedy=True, stop_token_ids=[20]),
            request(engine, "What is 12+30?", greedy=True, ignore_eos=True, max_new_tokens=20),
        ],
    )
    assert (cut.stop_reason, cut.output_len) == ("length", 3)
    assert stopped.stop_reason == "stop"
    assert engine.tokenizer.decode(stopped.output_tokens).endswith("answer is")
    assert by_id.output_tokens[-1] == 20
    assert unstoppable.output_len == 20


async def test_min_new_tokens_holds_back_the_end(engine: TransformersEngine) -> None:
    [response] = await generate(
        engine, [request(engine, "What is 12+30?", greedy=True, min_new_tokens=15)]
    )
    assert response.output_len >= 15
    assert engine.tokenizer.eos_token_id not in response.output_tokens[:14]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": []}, "got 0 ids"),
        ({"input_ids": [100_000]}, "token ids in 0..393"),
        ({"input_ids": [-1]}, "token ids in"),
        ({"input_ids": [1] * 500}, "context of 512 tokens, got 500 [+] 32"),
    ],
)
async def test_a_request_that_cannot_work_is_refused(
    engine: TransformersEngine, changes: dict[str, Any], message: str
) -> None:
    bad = ModelRequest(gconfig=GenerationHyperparameters(max_new_tokens=32), **changes)
    with pytest.raises(RequestError, match=message):
        await engine.agenerate(bad)


@pytest.mark.parametrize(
    ("path", "message"),
    [("/no/such/model", "does not exist"), (str(ROOT / "configs"), "holds no config.json")],
)
def test_a_missing_model_is_named(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransformersEngine(path).initialize()
