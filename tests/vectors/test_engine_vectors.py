"""Requests, responses, sampling parameters, and generation across interruptions."""

from dataclasses import asdict, dataclass
from typing import Any

import pytest

from areal_pipe import GenerationHyperparameters, ModelRequest, ModelResponse, ScriptedEngine
from tests.vectors.vector_data import Vector, assert_same_facts, load, outcome

AGENERATE_OURS = {
    # AReaL asks on until the budget is used up.
    "agenerate/unknown_reason_loops": {
        "ok": False,
        "error_type": "RuntimeError",
        "error_message": "stop_reason 'weird'",
        "n_requests": 1,
    },
    # AReaL fails an assertion that shows three bare numbers.
    "agenerate/server_overshoots": {
        "ok": False,
        "error_type": "EngineError",
        "error_message": "generated 2 tokens where 1 were allowed",
        "n_requests": 1,
    },
}


@dataclass(frozen=True, kw_only=True)
class StopTokens:
    """The part of a tokenizer that knows where texts end."""

    eos_token_id: int
    pad_token_id: int


@pytest.mark.parametrize("vector", load("model_request"))
def test_a_request_has_the_defaults_of_the_vector(vector: Vector) -> None:
    request = asdict(ModelRequest(**vector.input))
    assert request["gconfig"].pop("seed") is None  # ours: AReaL has no seed
    assert request == vector.expected


@pytest.mark.parametrize("vector", load("model_response"))
def test_a_response_knows_its_lengths_and_stop_tokens_as_the_vector_says(vector: Vector) -> None:
    tokenizer = StopTokens(
        eos_token_id=vector.input["eos_token_id"], pad_token_id=vector.input["pad_token_id"]
    )
    response = ModelResponse(
        input_tokens=[3, 4],
        output_tokens=vector.input["output_tokens"],
        stop_reason=vector.input["stop_reason"],
        tokenizer=tokenizer,
    )
    assert response.input_len == vector.expected["input_len"]
    assert response.output_len == vector.expected["output_len"]
    for name in ("end_with_stop", "output_tokens_without_stop"):
        with outcome(vector.expected[name]):
            assert getattr(response, name) == vector.expected[name]["result"]


@pytest.mark.parametrize("vector", load("gconfig_openai_args"))
def test_sampling_parameters_become_the_openai_arguments_of_the_vector(
    vector: Vector, caplog: pytest.LogCaptureFixture
) -> None:
    api_format = vector.id.partition("/")[2]
    args = GenerationHyperparameters(**vector.input).to_openai_args_dict(api_format)
    assert args == vector.expected
    [message] = caplog.messages
    assert_same_facts(message, "top_k")


@pytest.mark.parametrize("vector", load("gconfig_stop_ids"))
def test_the_tokenizers_stop_tokens_are_added_as_the_vector_says(vector: Vector) -> None:
    gconfig = GenerationHyperparameters(stop_token_ids=vector.input["stop_token_ids"])
    tokenizer = StopTokens(eos_token_id=vector.input["eos"], pad_token_id=vector.input["pad"])
    stopping = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
    assert stopping.stop_token_ids == vector.expected
    assert gconfig.stop_token_ids == vector.input["stop_token_ids"]


@pytest.mark.parametrize("vector", load("agenerate", AGENERATE_OURS))
async def test_generation_goes_on_across_interruptions_as_the_vector_says(vector: Vector) -> None:
    asked_at: list[int] = []
    engine = engine_of(vector.input, asked_at)
    gconfig = GenerationHyperparameters(
        n_samples=vector.input["n_samples"],
        max_new_tokens=vector.input["max_new_tokens"],
        max_tokens=vector.input["max_tokens"],
    )
    request = ModelRequest(input_ids=vector.input["input_ids"], gconfig=gconfig)
    with outcome(vector.expected):
        response = await engine.agenerate(request)
        assert describe(response, engine, asked_at) == vector.expected["result"]
        assert response.output_logprobs == [-0.5] * response.output_len
    if not vector.expected["ok"]:
        assert len(engine.requests) == vector.expected.get("n_requests", 0)


def engine_of(case: dict[str, Any], asked_at: list[int]) -> ScriptedEngine:
    """Answers chunk by chunk; new weights arrive while it answers."""
    bumps = case["version_after_each_response"]

    def answer(req: ModelRequest) -> ModelResponse:
        chunk = case["server_chunks"][len(asked_at)]
        asked_at.append(engine.get_version())
        if bumps:
            engine.set_version(bumps[len(asked_at) - 1])
        return ModelResponse(
            output_tokens=chunk["tokens"],
            output_logprobs=[-0.5] * len(chunk["tokens"]),
            stop_reason=chunk["stop_reason"],
        )

    engine = ScriptedEngine(answer)
    engine.set_version(case["initial_version"])
    return engine


def describe(
    response: ModelResponse, engine: ScriptedEngine, asked_at: list[int]
) -> dict[str, Any]:
    names = ("input_tokens", "output_tokens", "output_versions", "stop_reason")
    requests = [
        {
            "input_ids": request.input_ids,
            "max_new_tokens": request.gconfig.max_new_tokens,
            "version": version,
        }
        for request, version in zip(engine.requests, asked_at, strict=True)
    ]
    described = {name: getattr(response, name) for name in names}
    return described | {"n_requests": len(requests), "requests": requests}
