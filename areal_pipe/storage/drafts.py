"""Drafts at rest: generations whose reward failed; a retry scores them and samples nothing."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from areal_pipe.contract.trajectory import Trajectory
from areal_pipe.contract.workflow import Draft
from areal_pipe.storage.extras import decode_extra, encode_extra

_SCALARS = ("prompt_len", "turns", "stop_reason", "discount", "finished")


def trajectory_of_draft(draft: Draft) -> Trajectory:
    """The draft's tokens so far, not scored.

    Raises:
        TrajectoryError: they break the column contract.
    """
    return Trajectory(
        input_ids=np.asarray(draft.input_ids, np.int32),
        loss_mask=np.asarray(draft.loss_mask, np.int32),
        logprobs=np.asarray(draft.logprobs, np.float32),
        versions=np.asarray(draft.versions, np.int32),
        extras={"turn_ids": np.asarray(draft.turn_ids, np.int32)} if draft.turn_ids else {},
    )


def to_draft_json(draft: Draft) -> str:
    """What of a draft is in no token column.

    Raises:
        TrajectoryError: its `state` holds something that would not come back.
    """
    content = {name: getattr(draft, name) for name in _SCALARS}
    state = {k: encode_extra(f"state.{k}", v) for k, v in draft.state.items()}
    return json.dumps(content | {"state": state}, allow_nan=False)


def draft_of(row: Mapping[str, Any], t: Trajectory, data: Mapping[str, Any]) -> Draft:
    """The draft stored in a row.

    Args:
        t: the row's tokens.
        data: the dataset row.
    """
    assert t.loss_mask is not None and t.logprobs is not None and t.versions is not None
    content = json.loads(row["draft"])
    state = {k: decode_extra(v) for k, v in content.pop("state").items()}
    turns = t.extras.get("turn_ids")
    return Draft(
        data=data,
        input_ids=tuple(t.input_ids.tolist()),
        loss_mask=tuple(t.loss_mask.tolist()),
        logprobs=tuple(t.logprobs.tolist()),
        versions=tuple(t.versions.tolist()),
        turn_ids=() if turns is None else tuple(turns.tolist()),
        seeds=tuple(row["seeds"]),
        state=state,
        **content,
    )
