"""Sampling: every row by its own parameters, and with the logprobs it was drawn with."""

from typing import Any

import pytest
import torch

from areal_pipe.contract.engine import GenerationHyperparameters
from areal_pipe.contract.errors import RequestError
from areal_pipe.engines.sampling import RowState, check_supported, sample


def row(**settings: Any) -> RowState:
    g = GenerationHyperparameters(**({"max_new_tokens": 4000, "seed": 0} | settings))
    return RowState(gconfig=g, stop_ids=frozenset({0}), decode=lambda ids: "".join(map(chr, ids)))


LOGITS = torch.tensor([[0.0, 1.0, 2.0, 3.0]])


def draws(state: RowState, count: int = 3000) -> list[tuple[int, float]]:
    drawn: list[tuple[int, float]] = []
    for _ in range(count):
        tokens, logprobs = sample(LOGITS, [state])
        drawn.append((int(tokens[0]), float(logprobs[0])))
        state.tokens.append(int(tokens[0]))
    return drawn


def test_tokens_are_drawn_with_the_probability_that_their_logprob_says() -> None:
    drawn = draws(row(temperature=0.7))
    expected = torch.log_softmax(LOGITS[0].double() / 0.7, -1)
    for token in range(4):
        share = sum(t == token for t, _ in drawn) / len(drawn)
        assert share == pytest.approx(float(expected[token].exp()), abs=0.03)
    assert all(lp == pytest.approx(float(expected[t])) for t, lp in drawn)


def test_top_k_keeps_the_k_best_and_renormalises() -> None:
    drawn = draws(row(top_k=2), 200)
    expected = torch.log_softmax(LOGITS[0, 2:].double(), -1)
    assert {t for t, _ in drawn} == {2, 3}
    assert all(lp == pytest.approx(float(expected[t - 2])) for t, lp in drawn)


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    # Probabilities are .032, .087, .237, .644: the best alone has less than 0.8, the best two more.
    assert {t for t, _ in draws(row(top_p=0.8), 200)} == {2, 3}
    assert {t for t, _ in draws(row(top_p=0.5), 50)} == {3}


def test_greedy_takes_the_best_under_the_plain_softmax() -> None:
    for state in (row(greedy=True), row(temperature=0.0)):
        [(token, logprob)] = draws(state, 1)
        assert token == 3
        assert logprob == pytest.approx(float(torch.log_softmax(LOGITS[0].double(), -1)[3]))


def test_rows_of_one_batch_do_not_touch_each_other() -> None:
    settings = [{"seed": 1}, {"seed": 2, "top_k": 2}, {"greedy": True}, {"temperature": 2.0}]
    alone = [sample(LOGITS, [row(**s)]) for s in settings]
    tokens, logprobs = sample(LOGITS.repeat(4, 1), [row(**s) for s in settings])
    assert tokens.tolist() == [int(t[0]) for t, _ in alone]
    assert logprobs.tolist() == [float(p[0]) for _, p in alone]


def test_no_stop_token_before_min_new_tokens() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0, 0.0]])
    state = row(min_new_tokens=1)
    tokens, _ = sample(logits, [state])
    assert tokens[0] != 0
    state.append(int(tokens[0]), 0.0)
    assert state.stop_reason is None
    tokens, _ = sample(logits, [state])
    state.append(int(tokens[0]), 0.0)
    assert (state.tokens[-1], state.stop_reason) == (0, "stop")


def test_a_stop_string_ends_with_the_token_that_completes_it() -> None:
    state = row(stop=["bc"])
    for letter in "abc":
        assert state.stop_reason is None
        state.append(ord(letter), 0.0)
    assert state.stop_reason == "stop"


def test_the_budget_ends_a_row() -> None:
    state = row(max_new_tokens=2)
    state.append(1, 0.0)
    state.append(1, 0.0)
    assert state.stop_reason == "length"


@pytest.mark.parametrize(
    "settings",
    [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": 0}, {"frequency_penalty": 1.0},
     {"use_beam_search": True}],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(settings))):
        check_supported(GenerationHyperparameters(**settings))
