"""Token columns and what is derived from them."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_pipe.contract.errors import TrajectoryError
from areal_pipe.contract.trajectory import Trajectory, expand_runs, run_lengths


def build(**columns: Any) -> Trajectory:
    dtypes = {"input_ids": np.int32, "loss_mask": np.int32, "versions": np.int32}
    arrays = {
        name: np.asarray(values, dtypes.get(name, np.float32))
        for name, values in columns.items()
        if name != "reward"
    }
    return Trajectory(**arrays, reward=columns.get("reward"))


def test_staleness_ignores_prompt_tokens() -> None:
    t = build(input_ids=[1, 2, 3], loss_mask=[0, 1, 1], versions=[-1, 5, 7])
    assert (t.head_version, t.tail_version) == (5, 7)


def test_versions_are_unknown_when_nothing_was_generated() -> None:
    t = build(input_ids=[1, 2], loss_mask=[0, 0], versions=[-1, -1])
    assert (t.head_version, t.tail_version, t.prompt_len) == (None, None, 2)


def test_the_prompt_ends_at_the_first_generated_token() -> None:
    t = build(input_ids=[1, 2, 3, 4, 5, 6], loss_mask=[0, 0, 1, 0, 0, 1])
    assert t.prompt_len == 2
    assert [(s.role, s.length) for s in t.segments()] == [
        ("prompt", 2), ("gen", 1), ("context", 2), ("gen", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": []}, "at least one token"),
        ({"input_ids": [-1]}, "token ids >= 0, got -1"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "one length, got input_ids=2 loss_mask=1"),
        ({"input_ids": [1], "loss_mask": [2]}, r"loss_mask must be 0 or 1, got \[2\]"),
        ({"input_ids": [1, 2], "logprobs": [0, float("nan")]}, "got nan at token 1"),
        ({"input_ids": [1], "logprobs": [float("-inf")]}, "finite, got -inf"),
        ({"input_ids": [1], "reward": float("nan")}, "rewards must be finite"),
        ({"input_ids": [1], "loss_mask": [1], "versions": [-1]}, "needs the weight version"),
        ({"input_ids": [1], "versions": [-2]}, "versions must be >= -1"),
    ],
)
def test_a_broken_column_is_refused_by_name(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        build(**columns)


def test_version_zero_is_accepted_on_prompt_tokens() -> None:
    build(input_ids=[1, 2], loss_mask=[0, 1], versions=[0, 0])


@given(st.lists(st.integers(-1, 3)))
def test_runs_expand_to_what_they_were_made_of(values: list[int]) -> None:
    column = np.asarray(values, np.int32)
    runs = run_lengths(column)
    assert expand_runs(runs).tolist() == values
    assert all(a[0] != b[0] for a, b in pairwise(runs))
