"""Normalized rewards, and the penalty on long responses. A group has the size it really has."""

import math
from typing import Any

import numpy as np
import pytest

from areal_pipe import NormConfig, normalize, overlong_penalty
from tests.vectors.vector_data import Vector, load

OURS = {
    # AReaL knows no group of fewer than `group_size` rows: no mean, and 1e5 times the reward.
    "normalization/partial_group_tail_only": {
        "ok": True,
        "result": [(x - 11 / 3) / (math.sqrt(16 / 3) + 1e-5) for x in (5.0, 5.0, 1.0)],
    }
}


def group_sizes_of(case: dict[str, Any], group_size: int) -> list[int]:
    """The vector's own sizes, else full groups and what is left."""
    batch = len(case["x"])
    full, rest = divmod(batch, group_size)
    return case.get("group_sizes") or [group_size] * full + [rest] * bool(rest)


@pytest.mark.parametrize("vector", load("normalization", OURS))
def test_values_are_normalized_as_the_vector_says(vector: Vector) -> None:
    settings = dict(vector.input["config"])
    sizes = group_sizes_of(vector.input, settings.pop("group_size", len(vector.input["x"])))
    result = normalize(
        vector.input["x"], NormConfig(**settings), group_sizes=sizes, mask=vector.input["mask"]
    )
    np.testing.assert_allclose(result, vector.expected["result"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("vector", load("overlong_penalty"))
def test_a_long_response_is_punished_as_the_vector_says(vector: Vector) -> None:
    case = vector.input
    rewards = [
        case["base_reward"]
        + overlong_penalty(
            length,
            max_response_length=case["max_response_length"],
            overlong_tokens=case["overlong_tokens"],
            factor=case["factor"],
        )
        for length in case["gen_lens"]
    ]
    assert rewards == vector.expected["result"]
