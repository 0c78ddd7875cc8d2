"""Tensor dicts: merging, padding, validating, and turning them into trajectories and back.

The contract, B episodes of at most L tokens, right padded: `input_ids` [B, L] int32,
`attention_mask` [B, L] bool, `loss_mask` [B, L] int32, `logprobs` [B, L] float32, `versions` [B, L]
int32, `rewards` [B] float32. Only the first two are required; further keys are kept.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_pipe.contract.errors import TrajectoryError
from areal_pipe.contract.interaction import InteractionWithTokenLogpReward
from areal_pipe.contract.tensors import TOKEN_COLUMNS, TensorDict
from areal_pipe.contract.trajectory import Trajectory

logger = logging.getLogger(__name__)

REQUIRED_KEYS = frozenset({"input_ids", "attention_mask"})
_INT_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)


def concat_padded_tensors(dicts: Sequence[TensorDict], pad_value: float = 0.0) -> TensorDict:
    """Merge batches along the batch dimension, right-padding to the longest.

    Args:
        dicts: batches with one set of keys. Lists are concatenated; any other non-tensor value must
            be equal in all of them.
        pad_value: fills every key but `attention_mask`, which is padded with 0.

    Returns:
        One batch; `{}` for no input. A single input comes back as a shallow copy.

    Raises:
        ValueError: keys or numbers of dimensions differ, or a non-tensor value does.
    """
    if len(dicts) <= 1:
        return dict(dicts[0]) if dicts else {}
    _check_same_keys(dicts)
    return {
        key: _merge_values(
            key, [d[key] for d in dicts], 0 if key == "attention_mask" else pad_value
        )
        for key in dicts[0]
    }


def _check_same_keys(dicts: Sequence[TensorDict]) -> None:
    expected = sorted(dicts[0])
    for i, d in enumerate(dicts):
        if sorted(d) != expected:
            raise ValueError(
                f"concat_padded_tensors: dict[{i}] has different keys than dict[0]. "
                f"Expected {expected}, got {sorted(d)}"
            )


def _merge_values(key: str, values: list[Any], pad_value: float) -> Any:
    if all(isinstance(v, Tensor) for v in values):
        return _pad_and_cat(values, pad_value)
    if all(isinstance(v, list) for v in values):
        return [item for v in values for item in v]
    if any(v != values[0] for v in values[1:]):
        raise ValueError(
            f"concat_padded_tensors: `{key}` is no tensor and differs between batches "
            f"({values[0]!r} and others); give one value per row as a list"
        )
    return values[0]


def _pad_and_cat(tensors: list[Tensor], pad_value: float) -> Tensor:
    ndim = tensors[0].ndim
    for t in tensors:
        if t.ndim != ndim:
            raise ValueError(f"Dimension mismatch: expected {ndim}D tensors, got {t.ndim}D")
    shape = [max(t.shape[i] for t in tensors) for i in range(1, ndim)]
    return torch.cat([_pad_to(t, shape, pad_value) for t in tensors], dim=0)


def _pad_to(tensor: Tensor, shape: list[int], pad_value: float) -> Tensor:
    """Right-pad all dimensions but the first to `shape`."""
    missing = [want - have for want, have in zip(shape, tensor.shape[1:], strict=True)]
    if not any(missing):
        return tensor
    pads = [p for n in reversed(missing) for p in (0, n)]
    value = bool(pad_value) if tensor.dtype == torch.bool else pad_value
    return torch.nn.functional.pad(tensor, pads, value=value)


def pad_sequences_to_tensors(
    rows: Sequence[Mapping[str, Any]], pad_value: float = 0.0
) -> TensorDict:
    """Right-pad rows of 1-D sequences into one batch, adding `attention_mask`.

    Args:
        rows: dicts of equally long sequences, one set of keys.

    Returns:
        Tensors [B, L] with torch's default dtypes, and a bool `attention_mask`; `{}` for no rows.
    """
    if not rows:
        return {}
    batches = [{k: torch.as_tensor(v).unsqueeze(0) for k, v in row.items()} for row in rows]
    for batch in batches:
        first = next(iter(batch.values()))
        batch["attention_mask"] = torch.ones_like(first, dtype=torch.bool)
    return concat_padded_tensors(batches, pad_value)


def get_batch_size(data: Mapping[str, Any]) -> int:
    """Rows in a batch: by `attention_mask`, `cu_seqlens`, `multi_modal_input`, or any tensor."""
    if isinstance(mask := data.get("attention_mask"), Tensor):
        return mask.shape[0]
    if isinstance(cu := data.get("cu_seqlens"), Tensor):
        return cu.shape[0] - 1
    if "multi_modal_input" in data:
        return len(data["multi_modal_input"])
    return next((v.shape[0] for v in data.values() if isinstance(v, Tensor) and v.ndim), 0)


def split_and_unpad(
    tensor: Tensor, group_sizes: Sequence[int], seqlens: Sequence[int]
) -> list[Tensor]:
    """Undo `concat_padded_tensors` for one key.

    Args:
        tensor: [B, L, ...] with B = sum(group_sizes).
        group_sizes: rows of each original batch.
        seqlens: length of each original batch.
    """
    pieces = torch.split(tensor, list(group_sizes))
    return [piece[:, :n] for piece, n in zip(pieces, seqlens, strict=True)]


def check_trajectory_format(
    data: Any, batch_size: int | None = None, expected_keys: set[str] | None = None
) -> bool:
    """Whether a workflow's return value keeps the contract.

    Args:
        data: None, a dict of interactions, or a tensor dict.
        batch_size: number of rows it must have.
        expected_keys: keys that earlier trajectories had; missing ones are errors.

    Raises:
        TrajectoryError: (a ValueError) it does not, and why.
    """
    if data is None:
        return True
    if not isinstance(data, dict):
        raise TrajectoryError(f"Expected data to be None or dict, got {type(data)}")
    result = cast(dict[str, Any], data)
    if not result:
        raise TrajectoryError("Data dict cannot be empty")
    if is_interactions(result):
        return True
    _check_tensor_dict(result, batch_size)
    if expected_keys:
        check_expected_keys(result, expected_keys)
    return True


def check_expected_keys(data: Mapping[str, Any], expected_keys: set[str]) -> None:
    """Trajectories that are to be batched need one set of keys; further ones are fine.

    Raises:
        TrajectoryError: naming the missing keys.
    """
    if gone := expected_keys - data.keys():
        raise TrajectoryError(
            f"Inconsistent keys compared to expected: expected {expected_keys}, "
            f"but {gone} are missing."
        )


def is_interactions(data: Mapping[str, Any]) -> bool:
    """Whether every value is a recorded interaction (and there is one)."""
    return bool(data) and all(isinstance(v, InteractionWithTokenLogpReward) for v in data.values())


def _check_tensor_dict(data: TensorDict, batch_size: int | None) -> None:
    if missing := REQUIRED_KEYS - data.keys():
        raise TrajectoryError(f"Missing required keys in tensor data: {set(missing)}")
    ids = data["input_ids"]
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise TrajectoryError(
            f"Expected 2D tensors with shape [batch_size, max_seqlen], got {_describe(ids)}"
        )
    if batch_size is not None and ids.shape[0] != batch_size:
        raise TrajectoryError(f"Expected batch size {batch_size}, got {ids.shape[0]}")
    for key, value in data.items():
        _check_entry(key, value, max_seqlen=ids.shape[1])


def _check_entry(key: str, value: Any, *, max_seqlen: int) -> None:
    if key == "multi_modal_input":
        rows = cast(list[Any], value) if isinstance(value, list) else []
        if not rows or not all(isinstance(row, dict) for row in rows):
            raise TrajectoryError("multi_modal_input should be a non-empty list of dicts")
    elif not isinstance(value, Tensor):
        logger.info("Encounter non-tensor data with key `%s`: %s", key, value)
    elif value.ndim >= 2 and value.shape[1] != max_seqlen:
        logger.warning(
            "The second dim of tensor `%s` is %d, rather than the max seqlen of input_ids (%d).",
            key,
            value.shape[1],
            max_seqlen,
        )


def _describe(value: Any) -> str:
    return f"{value.ndim}D" if isinstance(value, Tensor) else str(type(value))


def trajectories_of(data: TensorDict) -> list[Trajectory]:
    """Split a tensor dict into its unpadded rows.

    Raises:
        TrajectoryError: naming the key, when a row breaks the column contract.
    """
    check_trajectory_format(data)
    if is_interactions(data):
        return [interaction.to_trajectory() for interaction in data.values()]
    ids = data["input_ids"]
    lengths = _row_lengths(data["attention_mask"], ids)
    columns = _columns(data)
    return [_row(data, columns, row, length) for row, length in enumerate(lengths)]


def _row_lengths(mask: Any, ids: Tensor) -> list[int]:
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        raise TrajectoryError(
            f"attention_mask must have the shape of input_ids {tuple(ids.shape)}, "
            f"got {tuple(mask.shape) if isinstance(mask, Tensor) else type(mask)}"
        )
    valid = mask.bool()
    lengths = valid.sum(dim=1)
    if not torch.equal(valid, torch.arange(ids.shape[1]) < lengths[:, None]):
        raise TrajectoryError("attention_mask must be ones, then padding on the right")
    return lengths.tolist()


def _columns(data: TensorDict) -> dict[str, NDArray[Any]]:
    """The token columns of a batch, in the contract's dtypes."""
    batch, max_seqlen = data["input_ids"].shape
    return {
        name: _token_column(name, data[name], (batch, max_seqlen), dtype)
        for name, dtype in {"input_ids": np.int32, **TOKEN_COLUMNS}.items()
        if name in data
    }


def _row(
    data: TensorDict, columns: Mapping[str, NDArray[Any]], row: int, length: int
) -> Trajectory:
    batch, max_seqlen = data["input_ids"].shape
    known = {"attention_mask", "rewards", *columns}
    extras = {
        key: _extra(key, value, row, (batch, max_seqlen), length)
        for key, value in data.items()
        if key not in known
    }
    reward = _reward(data["rewards"], batch, row) if "rewards" in data else None
    cut = {name: column[row, :length] for name, column in columns.items()}
    return Trajectory(reward=reward, extras=extras, **cut)


def _token_column(key: str, value: Any, shape: tuple[int, int], dtype: Any) -> NDArray[Any]:
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value)
        raise TrajectoryError(
            f"columns must have one length: `{key}` must be {shape} as input_ids, got {got}"
        )
    whole = np.issubdtype(dtype, np.integer)
    if whole != (value.dtype in _INT_DTYPES):
        wanted = "integers" if whole else "floating point"
        raise TrajectoryError(f"`{key}` must be {wanted}, got {value.dtype}")
    if whole and value.numel() and int(value.max()) > np.iinfo(np.int32).max:
        raise TrajectoryError(f"`{key}` must fit into int32, got {int(value.max())}")
    return value.detach().to(torch.int32 if whole else torch.float32).cpu().numpy()


def _reward(rewards: Any, batch: int, row: int) -> float:
    if not isinstance(rewards, Tensor) or tuple(rewards.shape) != (batch,):
        got = tuple(rewards.shape) if isinstance(rewards, Tensor) else type(rewards)
        raise TrajectoryError(f"`rewards` must hold one number per row ({batch},), got {got}")
    return float(rewards[row])


def _extra(key: str, value: Any, row: int, shape: tuple[int, int], length: int) -> Any:
    batch, max_seqlen = shape
    if isinstance(value, Tensor):
        if value.ndim == 0 or value.shape[0] != batch:
            raise TrajectoryError(f"`{key}` must have {batch} rows, got {tuple(value.shape)}")
        per_token = value.ndim >= 2 and value.shape[1] == max_seqlen
        cut = value[row, :length] if per_token else value[row]
        plain = cut.float() if cut.dtype == torch.bfloat16 else cut  # numpy has no bfloat16
        return plain.detach().cpu().numpy().copy()
    rows = cast(list[Any], value) if isinstance(value, list) else None
    return rows[row] if rows is not None and len(rows) == batch else value
