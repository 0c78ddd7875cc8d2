"""The row: one trajectory of one episode, whatever its outcome, as it is stored.

An episode without trajectories (rejected, failed) is one row with null columns. Token columns are
exact; texts are for reading, with characters that UTF-8 cannot hold replaced and flagged.
"""

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from areal_pipe.contract.errors import TrajectoryError
from areal_pipe.contract.trajectory import Episode, Trajectory, expand_runs, run_lengths
from areal_pipe.storage.drafts import to_draft_json, trajectory_of_draft
from areal_pipe.storage.extras import decode_extra, encode_extra

Row = dict[str, Any]

SCHEMA_MAJOR, SCHEMA_MINOR = 1, 1
SCHEMA_VERSION_KEY = b"areal_pipe.schema_version"

_RUNS = pa.large_list(pa.struct([("value", pa.int32()), ("length", pa.int32())]))

SCHEMA = pa.schema(
    [
        ("task_id", pa.int64()),
        ("sample_idx", pa.int32()),
        ("trajectory_idx", pa.int32()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("group_state", pa.string()),
        ("reward", pa.float32()),
        ("seqlen", pa.int32()),
        ("prompt_len", pa.int32()),
        ("head_version", pa.int32()),
        ("tail_version", pa.int32()),
        ("stop_reason", pa.string()),
        ("input_ids", pa.large_list(pa.int32())),
        ("loss_mask", pa.large_list(pa.int8())),
        ("logprobs", pa.large_list(pa.float32())),
        ("version_runs", _RUNS),
        ("turn_runs", _RUNS),
        ("extras", pa.string()),
        ("seeds", pa.list_(pa.int64())),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("segments", pa.string()),
        ("text_replaced", pa.bool_()),
        ("data", pa.string()),
        ("draft", pa.string()),
        ("error_stage", pa.string()),
        ("error_class", pa.string()),
        ("error_message", pa.string()),
        ("error_traceback", pa.string()),
        ("error_output", pa.string()),
        ("attempts", pa.int32()),
        ("infrastructure", pa.bool_()),
        ("duration_seconds", pa.float32()),
        ("finished_at", pa.float64()),
    ],
    metadata={SCHEMA_VERSION_KEY: f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}".encode()},
)
"""Columns of parts and ledger entries. `version_runs` covers all tokens, -1 included."""


class Decoder(Protocol):
    """What of a tokenizer is needed to show tokens as text."""

    def decode(self, token_ids: Any) -> str: ...


def rows_of(episode: Episode, *, data: Mapping[str, Any], decoder: Decoder | None) -> list[Row]:
    """An episode's rows.

    Args:
        data: the dataset row it ran on, stored as JSON.
        decoder: turns tokens into text; without one, the text columns are null.
    """
    shared = _episode_columns(episode, data)
    if episode.draft is not None:
        return [shared | _draft_columns(episode, decoder)]
    if not episode.trajectories:
        return [shared]
    return [
        shared | {"trajectory_idx": i} | _trajectory_columns(t, decoder)
        for i, t in enumerate(episode.trajectories)
    ]


def _episode_columns(episode: Episode, data: Mapping[str, Any]) -> Row:
    failure = episode.failure
    row: Row = dict.fromkeys(SCHEMA.names)
    row |= {
        "task_id": episode.task_id,
        "sample_idx": episode.sample_idx,
        "trajectory_idx": 0,
        "status": str(episode.status),
        "reason": clean_text(episode.reason)[0],
        "stop_reason": episode.stop_reason,
        "seeds": list(episode.seeds),
        "data": to_json(data),
        "duration_seconds": episode.duration_seconds,
        "finished_at": time.time(),
    }
    if failure is not None:
        row |= {
            "error_stage": failure.stage,
            "error_class": clean_text(failure.error_class)[0],
            "error_message": clean_text(failure.message)[0],
            "error_traceback": clean_text(failure.traceback)[0],
            "error_output": clean_text(failure.output)[0] or None,
            "attempts": failure.attempts,
            "infrastructure": failure.infrastructure,
        }
    return row


def _trajectory_columns(t: Trajectory, decoder: Decoder | None) -> Row:
    extras = dict(t.extras)
    turns = extras.pop("turn_ids", None) if _is_token_column(t, "turn_ids") else None
    columns: Row = {
        "reward": t.reward,
        "seqlen": len(t),
        "prompt_len": t.prompt_len,
        "head_version": t.head_version,
        "tail_version": t.tail_version,
        "input_ids": t.input_ids,
        "loss_mask": None if t.loss_mask is None else t.loss_mask.astype(np.int8),
        "logprobs": t.logprobs,
        "version_runs": None if t.versions is None else _as_structs(t.versions),
        "turn_runs": None if turns is None else _as_structs(turns),
        "extras": to_json({k: encode_extra(k, v) for k, v in extras.items()}) if extras else None,
    }
    return columns | (_text_columns(t, decoder) if decoder else {})


def _draft_columns(episode: Episode, decoder: Decoder | None) -> Row:
    """The tokens of a generation that could not be scored; none if they are no trajectory."""
    try:
        kept = to_draft_json(episode.draft)
        return _trajectory_columns(trajectory_of_draft(episode.draft), decoder) | {"draft": kept}
    except TrajectoryError:
        return {}


def _is_token_column(t: Trajectory, key: str) -> bool:
    value = t.extras.get(key)
    return isinstance(value, np.ndarray) and value.dtype == np.int32 and value.shape == (len(t),)


def _as_structs(column: Any) -> list[dict[str, int]]:
    return [{"value": v, "length": n} for v, n in run_lengths(column)]


def _text_columns(t: Trajectory, decoder: Decoder) -> Row:
    ids = t.input_ids.tolist()
    segments = t.segments()
    prompt, prompt_replaced = clean_text(decoder.decode(ids[: t.prompt_len]))
    rest = ids[t.prompt_len :]
    completion, completion_replaced = clean_text(decoder.decode(rest)) if rest else ("", False)
    texts: Row = {
        "prompt": prompt,
        "completion": completion,
        "text_replaced": prompt_replaced or completion_replaced,
    }
    if len(segments) > 2:  # more than one turn: prompt and completion do not show who said what
        texts["segments"] = to_json(
            [
                {
                    "role": s.role,
                    "len": s.length,
                    "text": decoder.decode(ids[s.start : s.start + s.length]),
                }
                for s in segments
            ]
        )
    return texts


def clean_text(text: str) -> tuple[str, bool]:
    """Text that UTF-8, Arrow and JSON can hold, and whether anything was replaced (by U+FFFD)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), True
    return text, False


def to_json(value: Any) -> str:
    """Compact JSON for people; what JSON cannot say becomes its `repr`."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=repr)
    except (TypeError, ValueError):  # keys that are no text, or a cycle
        text = json.dumps(repr(value), ensure_ascii=False)
    return clean_text(text)[0]


def trajectory_of(row: Mapping[str, Any]) -> Trajectory | None:
    """The trajectory stored in a row, bit for bit; None if the episode had none."""
    if row["input_ids"] is None:
        return None
    extras = {k: decode_extra(v) for k, v in json.loads(row["extras"] or "{}").items()}
    if row["turn_runs"] is not None:
        extras["turn_ids"] = _expand(row["turn_runs"])
    return Trajectory(
        input_ids=np.asarray(row["input_ids"], np.int32),
        loss_mask=_column(row["loss_mask"], np.int32),
        logprobs=_column(row["logprobs"], np.float32),
        versions=None if row["version_runs"] is None else _expand(row["version_runs"]),
        reward=row["reward"],
        extras=extras,
    )


def _column(value: Any, dtype: Any) -> Any:
    return None if value is None else np.asarray(value, dtype)


def _expand(runs: Iterable[Mapping[str, int]]) -> Any:
    return expand_runs([(run["value"], run["length"]) for run in runs])


def table_of(rows: Iterable[Row]) -> pa.Table:
    """Rows as an Arrow table in `SCHEMA`."""
    rows = list(rows)
    columns = [pa.array([row[f.name] for row in rows], type=f.type) for f in SCHEMA]
    return pa.Table.from_arrays(columns, schema=SCHEMA)
