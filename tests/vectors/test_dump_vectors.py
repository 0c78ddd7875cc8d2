"""The files that the executor leaves behind: where they lie, and AReaL's fields in them.

Ours have no `logs/{user}` in their path, record every outcome, and hold further fields.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from areal_pipe import RolloutWorkflow
from areal_pipe.contract import workflow_context
from areal_pipe.storage.task_dump import DumpConfig
from tests.vectors.vector_data import StartEngine, Vector, assert_same_facts, build, is_tensor, load

THEIR_ROOT = "{fileroot}/logs/{user}/"
NOTHING = {"seqlen": 0, "prompt_len": 0, "prompt": None, "completion": None, "reward": None}


def only_line(version: int, **fields: Any) -> dict[str, Any]:
    line = {"task_id": 0, "sample_idx": 0, "head_version": None, "tail_version": None} | fields
    return {f"exp/t0/rollout/{version}/0.jsonl": [line]}


def ended(status: str, *logs: str, **fields: Any) -> dict[str, Any]:
    return {
        "wait": ["None"],
        "stats": {status: 1},
        "files": only_line(0, **NOTHING, status=status, **fields),
        "logs": list(logs),
    }


OURS: dict[str, Any] = {
    # AReaL writes an empty file under version -1.
    "dump/no_generation": {
        "wait": ["traj"],
        "stats": {"accepted": 1},
        "files": only_line(
            0, seqlen=2, prompt_len=2, reward=1.0, prompt="ab", completion="", status="accepted"
        ),
        "logs": [],
    },
    # A finished episode is not thrown away for want of its texts.
    "dump/no_tokenizer": {
        "wait": ["traj"],
        "stats": {"accepted": 1},
        "files": {
            "exp/t0/rollout/0/0.jsonl": [
                {
                    "task_id": 0,
                    "seqlen": 3,
                    "prompt_len": 1,
                    "reward": 1.0,
                    "prompt": None,
                    "completion": None,
                    "input_ids": [1, 2, 3],
                    "status": "accepted",
                }
            ]
        },
        "logs": [],
    },
    "dump/none": ended("rejected", reason="the workflow returned None"),
    "dump/exception": ended(
        "failed",
        "boom",
        error={"stage": "episode", "class": "ValueError", "message": "boom", "attempts": 1},
    ),
    # Rewards of this shape are no trajectory: found when it comes back, not when it is dumped.
    "dump/dump_error_dtype": ended(
        "failed", "second dim of `rewards` is 2, max seqlen 3", "`rewards` (1,) (1, 2)"
    ),
}


class LetterTokenizer:
    """Token n is the n-th letter."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join("_abcdefghijklmnopqrstuvwxyz"[i] for i in token_ids)


class Replay(RolloutWorkflow):
    """Returns (or raises) what the vector gives for this task and sample."""

    def __init__(self, members: list[list[Any]]) -> None:
        self.members = members

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        result = self.members[data["number"]][workflow_context.get().sample_idx or 0]
        if isinstance(result, Exception):
            raise result
        return result


def members_of(spec: Any) -> list[Any]:
    """A task's results, one per sample: a batch of several rows is what a group's members made."""
    if spec == "None":
        return [None]
    if spec == "raise ValueError":
        return [ValueError("boom")]
    assert all(is_tensor(value) for value in spec.values())
    batch = build(spec)
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    return [unpadded(batch, row, length) for row, length in enumerate(lengths)]


def unpadded(batch: Mapping[str, Any], row: int, length: int) -> dict[str, Any]:
    per_token = {k for k, v in batch.items() if v.shape == batch["input_ids"].shape}
    return {
        k: v[row : row + 1, :length] if k in per_token else v[row : row + 1]
        for k, v in batch.items()
    }


@pytest.mark.parametrize("vector", load("dump", OURS))
def test_the_dump_holds_what_the_vector_says(
    vector: Vector, start_engine: StartEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case, expected = vector.input, vector.expected
    dump = DumpConfig(
        fileroot=str(tmp_path),
        experiment_name="exp",
        trial_name="t0",
        tokenizer=LetterTokenizer() if case["tokenizer"] else None,
    )
    engine = start_engine([], dump=dump)
    engine.set_version(case["engine_version"])
    members = [members_of(spec) for spec in case["trajectories"]]
    for number, samples in enumerate(members):
        engine.submit(
            {"number": number},
            Replay(members),
            group_size=len(samples),
            should_accept_fn=case["should_accept"],
            is_eval=case["is_eval"],
        )
    results = engine.wait(len(members), timeout=10)

    assert ["None" if r is None else "traj" for r in results] == expected["wait"]
    stats = engine.executor.stats()
    for status, number in stats_of(expected).items():
        assert getattr(stats, status) == number
    assert_files(tmp_path, {k.removeprefix(THEIR_ROOT): v for k, v in expected["files"].items()})
    assert len(caplog.messages) == len(expected["logs"])
    for message, logged in zip(caplog.messages, expected["logs"], strict=True):
        assert_same_facts(message, logged)


def stats_of(expected: Mapping[str, Any]) -> dict[str, int]:
    theirs = {k: expected[k] for k in ("accepted", "rejected") if k in expected}
    return {"accepted": 0, "rejected": 0, "failed": 0} | theirs | expected.get("stats", {})


def assert_files(root: Path, expected: Mapping[str, list[dict[str, Any]]]) -> None:
    paths = {p.relative_to(root).as_posix(): p for p in root.rglob("*") if p.is_file()}
    assert set(paths) == set(expected)
    for name, lines in expected.items():
        written = [orjson.loads(line) for line in paths[name].read_bytes().splitlines()]
        assert len(written) == len(lines)
        for got, line in zip(written, lines, strict=True):
            assert {key: got[key] for key in line} == line | _with_traceback(got, line)


def _with_traceback(got: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
    """The expected error of a line, with the traceback that only a run can know."""
    if "error" not in line:
        return {}
    traceback = got["error"]["traceback"]
    assert "in arun_episode" in traceback
    return {"error": line["error"] | {"traceback": traceback, "output": None}}
