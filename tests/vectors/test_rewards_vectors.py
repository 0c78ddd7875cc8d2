"""The verdicts of the math and counting rewards. Judged by math-verify 0.9, observed with 0.8."""

from typing import Any

import pytest

from areal_pipe.rewards import math_answers
from tests.vectors.vector_data import Vector, load, outcome


def score(fn: str, completion: Any, answer: Any) -> float:
    return getattr(math_answers, fn)("", completion, [], [], answer=answer)


@pytest.mark.parametrize("vector", load("math_reward"))
def test_a_math_answer_earns_what_the_vector_says(vector: Vector) -> None:
    detailed = isinstance(vector.expected, dict)
    expected = vector.expected if detailed else {"reward": vector.expected}
    assert score(**vector.input) == expected["reward"]
    if "extracted" in expected:
        extracted = math_answers.extract_bracketed_answer(vector.input["completion"])
        assert extracted == expected["extracted"]


@pytest.mark.parametrize("vector", load("math_verify_worker"))
def test_the_worker_compares_answers_as_the_vector_says(vector: Vector) -> None:
    worker = math_answers.MathVerifyWorker(precision=vector.input["precision"])
    verdict = worker.verify(vector.input["response"], vector.input["ground_truth"])
    assert verdict == vector.expected


@pytest.mark.parametrize("vector", load("clevr_reward"))
def test_a_count_in_brackets_earns_what_the_vector_says(vector: Vector) -> None:
    with outcome(vector.expected):
        assert score("clevr_count_70k_reward_fn", **vector.input) == vector.expected["result"]
