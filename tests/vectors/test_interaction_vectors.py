"""Recorded model calls as tensors: what a call inherits from the one it continues."""

from typing import Any

import pytest

from areal_pipe import InteractionWithTokenLogpReward, ModelResponse
from tests.vectors.vector_data import Vector, assert_same, load


@pytest.mark.parametrize("vector", load("interaction_to_tensor"))
def test_an_interaction_becomes_the_tensors_of_the_vector(
    vector: Vector, caplog: pytest.LogCaptureFixture
) -> None:
    template = vector.input.get("chat_template_type", "concat")
    parent = interaction(vector.input["parent"], version=3, chat_template_type=template)
    child = interaction(
        vector.input["child"], version=4, chat_template_type=template, parent=parent
    )
    assert_same(child.to_tensor_dict(), with_int32(vector.expected))
    extends = len(vector.input["child"]["input"]) > len(vector.input["parent"]["input"])
    assert bool(caplog.messages) is not extends


def interaction(call: dict[str, Any], *, version: int, **known: Any) -> Any:
    output = call["output"]
    response = ModelResponse(
        input_tokens=call["input"],
        output_tokens=output,
        output_logprobs=[-0.1 * (i + 1) for i in range(len(output))],
        output_versions=[call.get("version", version)] * len(output),
        stop_reason=call.get("stop_reason", "stop"),
    )
    return InteractionWithTokenLogpReward(
        model_response=response, reward=call.get("reward"), **known
    )


def with_int32(expected: dict[str, Any]) -> dict[str, Any]:
    """AReaL exports int64; the trajectory contract says int32."""
    dtypes = {"int64": "int32"}
    return {k: v | {"dtype": dtypes.get(v["dtype"], v["dtype"])} for k, v in expected.items()}
