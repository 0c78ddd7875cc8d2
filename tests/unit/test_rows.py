"""Workflow result -> row -> Parquet or ledger -> row -> tensor dict, bit for bit."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_pipe.contract.tensors import tensor_dict_of
from areal_pipe.contract.trajectory import Episode, Status
from areal_pipe.episodes.packing import trajectories_of
from areal_pipe.storage.dump import to_jsonl
from areal_pipe.storage.parts import (
    from_ipc,
    iterate_rows,
    open_part,
    table_rows,
    to_ipc,
    to_parquet,
)
from areal_pipe.storage.rows import rows_of, table_of, trajectory_of

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def tensor_dicts(draw: st.DrawFn) -> dict[str, Any]:
    """One episode's tensors, with optional and extra keys."""
    n = draw(st.integers(1, 40))
    mask = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    version = draw(st.integers(0, 2**31 - 1))
    data: dict[str, Any] = {
        "input_ids": torch.tensor(
            [draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n))], dtype=torch.int32
        ),
        "attention_mask": torch.ones((1, n), dtype=torch.bool),
        "loss_mask": torch.tensor([mask], dtype=torch.int32),
        "logprobs": torch.tensor([draw(st.lists(FLOATS, min_size=n, max_size=n))]),
        "versions": torch.tensor([[version if m else -1 for m in mask]], dtype=torch.int32),
        "rewards": torch.tensor([draw(FLOATS)]),
        "turn_ids": torch.tensor([[m - 1 for m in mask]], dtype=torch.int32),
        "values": torch.tensor([draw(st.lists(FLOATS, min_size=n, max_size=n))]),
        "weight": torch.tensor([draw(st.floats(allow_nan=False))], dtype=torch.float64),
        "note": [draw(st.text(st.characters(exclude_categories=["Cs"])))],
    }
    for key in draw(
        st.sets(st.sampled_from(sorted(data.keys() - {"input_ids", "attention_mask"})))
    ):
        del data[key]
    return data


def through_parquet(rows: list[Any]) -> list[Any]:
    return list(iterate_rows(open_part(io.BytesIO(to_parquet(table_of(rows))), where="memory")))


def through_ledger(rows: list[Any]) -> list[Any]:
    return list(table_rows(from_ipc(to_ipc(table_of(rows)), where="memory")))


@settings(max_examples=60, deadline=None)
@given(tensor_dicts())
def test_what_a_workflow_returned_comes_back_bit_for_bit(data: dict[str, Any]) -> None:
    [t] = trajectories_of(data)
    episode = Episode(task_id=1, sample_idx=2, status=Status.ACCEPTED, trajectories=(t,))
    rows = rows_of(episode, data={"a": 1}, decoder=None)
    for back in (through_parquet(rows), through_ledger(rows)):
        restored = trajectory_of(back[0])
        assert restored is not None
        result = tensor_dict_of(restored)
        assert result.keys() == data.keys()
        for key, value in data.items():
            if isinstance(value, torch.Tensor):
                assert result[key].dtype == value.dtype, key
                assert np.array_equal(result[key].numpy(), value.numpy(), equal_nan=True), key
            else:
                assert result[key] == value, key


def test_an_episode_without_trajectories_is_one_row_with_null_columns() -> None:
    rejected = Episode(task_id=1, sample_idx=0, status=Status.REJECTED, reason="no")
    [row] = through_parquet(rows_of(rejected, data={}, decoder=None))
    assert row["input_ids"] is None
    assert trajectory_of(row) is None
    assert b'"status":"rejected"' in to_jsonl([row])


class Shouting:
    """A decoder with a lone surrogate, as byte-level tokenizers can produce."""

    def decode(self, token_ids: Any) -> str:
        return "\ud800 broken" if list(token_ids) == [7] else "fine"


def test_text_that_utf8_cannot_hold_is_replaced_and_flagged_while_ids_stay() -> None:
    [t] = trajectories_of(
        {
            "input_ids": torch.tensor([[5, 7]]),
            "attention_mask": torch.ones((1, 2), dtype=torch.bool),
            "loss_mask": torch.tensor([[0, 1]]),
        }
    )
    episode = Episode(task_id=0, sample_idx=0, status=Status.ACCEPTED, trajectories=(t,))
    [row] = through_parquet(rows_of(episode, data={"q": "\ud800"}, decoder=Shouting()))
    assert row["completion"] == "\ufffd broken"
    assert row["text_replaced"]
    assert row["input_ids"].tolist() == [5, 7]
    to_jsonl([row]).decode("utf-8")


@pytest.mark.parametrize("text", ["\0", "שלום 😀", "x" * 1_000_000, "a\nb\r\n\t"])
def test_odd_texts_are_kept(text: str) -> None:
    episode = Episode(task_id=0, sample_idx=0, status=Status.REJECTED, reason=text)
    [row] = through_parquet(rows_of(episode, data={"q": text}, decoder=None))
    assert row["reason"] == text
    assert to_jsonl([row]).count(b"\n") == 1
