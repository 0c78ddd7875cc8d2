"""Merging, padding, splitting and checking tensor dicts, as AReaL does it."""

import logging

import pytest
import torch

from areal_pipe.episodes import packing
from tests.vectors.vector_data import (
    Vector,
    assert_same,
    assert_same_facts,
    build,
    load,
    outcome,
)

CONCAT_OURS = {
    # AReaL takes the first batch's value and drops the others without a word.
    "concat_padded_tensors/scalar_nontensor_key": {
        "ok": False,
        "error_type": "ValueError",
        "error_message": "`meta` differs: 'x'",
    }
}


@pytest.mark.parametrize("vector", load("concat_padded_tensors", CONCAT_OURS))
def test_batches_are_merged_and_padded_as_the_vector_says(vector: Vector) -> None:
    with outcome(vector.expected):
        merged = packing.concat_padded_tensors(
            build(vector.input["dicts"]), pad_value=vector.input.get("pad_value", 0.0)
        )
        assert_same(merged, vector.expected["result"])


@pytest.mark.parametrize("vector", load("pad_sequences_to_tensors"))
def test_rows_are_padded_as_the_vector_says(vector: Vector) -> None:
    assert_same(packing.pad_sequences_to_tensors(vector.input), vector.expected)


@pytest.mark.parametrize("vector", load("get_batch_size"))
def test_the_batch_size_is_what_the_vector_says(vector: Vector) -> None:
    assert packing.get_batch_size(build(vector.input)) == vector.expected


@pytest.mark.parametrize("vector", load("split_and_unpad"))
def test_a_batch_is_split_as_the_vector_says(vector: Vector) -> None:
    pieces = packing.split_and_unpad(
        torch.tensor(vector.input["tensor"]), vector.input["group_sizes"], vector.input["seqlens"]
    )
    assert_same(pieces, vector.expected)


@pytest.mark.parametrize("vector", load("check_trajectory_format"))
def test_a_result_is_judged_as_the_vector_says(
    vector: Vector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with outcome(vector.expected):
        judged = packing.check_trajectory_format(
            build(vector.input["data"]), batch_size=vector.input.get("batch_size")
        )
        assert judged is vector.expected["result"]
    for level, key in ((logging.WARNING, "warnings"), (logging.INFO, "infos")):
        logged = [r.getMessage() for r in caplog.records if r.levelno == level]
        assert len(logged) == len(vector.expected[key])
        for message, expected in zip(logged, vector.expected[key], strict=True):
            assert_same_facts(message, expected)
