"""The JSONL dump: one object per prompt, one line per trajectory, for people and their scripts.

Fields are AReaL's (`task_id`, `sample_idx`, `seqlen`, `prompt_len`, `head_version`,
`tail_version`, `version_rle`, `reward`, `prompt`, `completion`, `segments`), then ours: ids, mask,
logprobs, status, reason, failure. Versions are those of generated tokens only.
"""

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import orjson

from areal_pipe.contract.errors import StorageError
from areal_pipe.contract.trajectory import run_lengths
from areal_pipe.storage.rows import Row, trajectory_of


def to_jsonl(rows: Iterable[Row]) -> bytes:
    """The lines of one prompt, in the order of its samples."""
    ordered = sorted(rows, key=lambda r: (r["sample_idx"], r["trajectory_idx"]))
    return b"".join(
        orjson.dumps(line_of(row), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
        for row in ordered
    )


def line_of(row: Row) -> dict[str, Any]:
    """One line. Keys whose value is unknown are left out, except AReaL's own fields."""
    reward = row["reward"]
    if reward is not None and not math.isfinite(reward):  # orjson would write null, silently
        raise StorageError(f"a reward must be finite, got {reward} (task {row['task_id']})")
    line: dict[str, Any] = {
        "task_id": row["task_id"],
        "sample_idx": row["sample_idx"],
        "seqlen": row["seqlen"] or 0,
        "prompt_len": row["prompt_len"] or 0,
        "head_version": row["head_version"],
        "tail_version": row["tail_version"],
        "reward": reward,
        "prompt": row["prompt"],
        "completion": row["completion"],
        "status": row["status"],
    }
    optional = {
        "trajectory_idx": row["trajectory_idx"] or None,
        "reason": row["reason"] or None,
        "group_state": row["group_state"],
        "stop_reason": row["stop_reason"],
        "segments": json.loads(row["segments"]) if row["segments"] else None,
        "seeds": row["seeds"] or None,
        "error": _error_of(row),
        **_token_fields(row),
    }
    return line | {key: value for key, value in optional.items() if value is not None}


def _token_fields(row: Row) -> dict[str, Any]:
    t = trajectory_of(row)
    if t is None:
        return {}
    return {
        "version_rle": run_lengths(t.generated_versions) if t.versions is not None else None,
        "input_ids": np.ascontiguousarray(t.input_ids),
        "loss_mask": None if t.loss_mask is None else np.ascontiguousarray(t.loss_mask),
        "logprobs": None if t.logprobs is None else np.ascontiguousarray(t.logprobs),
    }


def _error_of(row: Row) -> dict[str, Any] | None:
    if row["error_class"] is None:
        return None
    return {
        "stage": row["error_stage"],
        "class": row["error_class"],
        "message": row["error_message"],
        "traceback": row["error_traceback"],
        "output": row["error_output"],
        "attempts": row["attempts"],
    }
