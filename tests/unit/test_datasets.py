"""Reading prompts: every format, and every bad row by file and line."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_pipe.contract.errors import DatasetError
from areal_pipe.datasets.config import DatasetConfig
from areal_pipe.datasets.load import load_prompts

CHAT = [{"role": "user", "content": "hi"}]


def prompts(path: Path, **settings: Any) -> list[Any]:
    return load_prompts(DatasetConfig(path=str(path), **settings))


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_jsonl_rows_keep_their_columns_and_number(tmp_path: Path) -> None:
    path = write(
        tmp_path / "d.jsonl",
        json.dumps({"messages": CHAT, "answer": "1"}) + "\n\n" + json.dumps({"prompt": "p"}),
    )
    first, second = prompts(path)
    assert (first.task_id, first.data) == (0, {"messages": CHAT, "answer": "1"})
    assert second.task_id == 1
    assert second.data["messages"] == [{"role": "user", "content": "p"}]


def test_json_csv_and_parquet_read_alike(tmp_path: Path) -> None:
    row = {"prompt": "say", "answer": "x"}
    json_path = write(tmp_path / "d.json", json.dumps([row]))
    csv_path = write(tmp_path / "d.csv", "prompt,answer\nsay,x\n")
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "d.parquet")
    expected = row | {"messages": [{"role": "user", "content": "say"}]}
    for path in (json_path, csv_path, tmp_path / "d.parquet"):
        [prompt] = prompts(path)
        assert prompt.data == expected


def test_a_template_makes_the_prompt_of_any_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", json.dumps({"question": "2+2", "unit": "apples"}))
    [prompt] = prompts(path, template="{question} in {unit}?", system="Be brief.")
    assert prompt.data["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2 in apples?"},
    ]


def test_shuffle_and_limit_keep_row_numbers(tmp_path: Path) -> None:
    path = write(
        tmp_path / "d.jsonl", "".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(9))
    )
    some = prompts(path, shuffle_seed=1, limit=3)
    assert len(some) == 3
    assert all(p.data["prompt"] == str(p.task_id) for p in some)
    assert some != prompts(path, limit=3)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", "", "holds no rows"),
        (
            "d.jsonl",
            '{"prompt": "a"}\n{"prompt": ',
            "d.jsonl:2: every line must be one JSON object",
        ),
        ("d.jsonl", "[1]\n{", "has 2 rows without a usable prompt"),
        ("d.jsonl", "[1]", "d.jsonl:1: a row must be a JSON object, got list"),
        ("d.jsonl", '{"text": "a"}', "d.jsonl:1: needs a column 'messages' or 'prompt'"),
        ("d.jsonl", '{"prompt": ""}', "must be non-empty text"),
        ("d.jsonl", '{"messages": []}', "d.jsonl:1: messages must be a non-empty list"),
        ("d.jsonl", '{"messages": [{"role": "robot", "content": ""}]}', "must have a role"),
        ("d.jsonl", '{"messages": [{"role": "user"}]}', "must have content"),
        ("d.jsonl", '{"prompt": "a", "x": NaN}', "the column 'x' must be finite"),
        (
            "d.jsonl",
            b'{"prompt": "a"}\n{"prompt": "\xff"}',
            "d.jsonl:2: must be UTF-8, got byte 0xff",
        ),
        ("d.json", '{"prompt": "a"}', "must hold a JSON list"),
        ("d.json", '[{"prompt": "a"},\n', "d.json:2: invalid JSON"),
        ("d.csv", "prompt,answer\nx\n", "d.csv:2: has not as many fields"),
        ("d.parquet", "PAR1", "not a readable Parquet file"),
    ],
)
def test_a_bad_file_or_row_is_named(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(DatasetError) as caught:
        prompts(write(tmp_path / name, content))
    assert message in str(caught.value)


def test_all_bad_rows_are_reported_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", "{}\n" * 12)
    with pytest.raises(DatasetError, match="12 rows") as caught:
        prompts(path)
    assert "d.jsonl:10" in str(caught.value)
    assert "... and 2 more" in str(caught.value)


def test_a_template_that_does_not_fit_is_reported_with_the_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", '{"question": "q"}')
    with pytest.raises(DatasetError, match="the row has 'question'"):
        prompts(path, template="{quesion}")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="does not exist"):
        prompts(tmp_path / "none.jsonl")


def test_a_hub_name_without_the_package_says_how_to_get_it() -> None:
    with pytest.raises(DatasetError, match="areal-pipe\\[hf\\]"):
        load_prompts(DatasetConfig(path="openai/gsm8k"))
