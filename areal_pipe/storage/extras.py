"""Extra keys of a trajectory as JSON that comes back: what a workflow adds to the contract."""

import base64
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from areal_pipe.contract.errors import TrajectoryError

_MARKS = frozenset({"__array__", "__bytes__", "__float__", "__dict__", "__tuple__"})


def encode_extra(key: str, value: Any) -> Any:
    """An extra value as strict JSON: arrays, bytes, tuples and odd dicts are marked, at any depth.

    Raises:
        TrajectoryError: it holds something that would not come back.
    """
    try:
        return _encode(key, value)
    except RecursionError as error:
        raise TrajectoryError(
            f"the extra key {key!r} is nested too deeply, or holds itself"
        ) from error


def _encode(key: str, value: Any) -> Any:
    if hasattr(value, "detach"):  # a tensor inside a list or dict
        value = value.detach().cpu().numpy()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        return _encode_array(key, value)
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if type(value) is tuple:
        return {"__tuple__": [_encode(key, item) for item in cast(Sequence[Any], value)]}
    if type(value) is list:
        return [_encode(key, item) for item in cast(list[Any], value)]
    if type(value) is dict:
        items = cast(dict[Any, Any], value)
        if all(type(k) is str for k in items) and not _MARKS & items.keys():
            return {_text(key, k): _encode(key, v) for k, v in items.items()}
        return {"__dict__": [[_encode(key, k), _encode(key, v)] for k, v in items.items()]}
    if type(value) is float and not math.isfinite(value):
        return {"__float__": repr(value)}
    if type(value) is str:
        return _text(key, value)
    if value is None or type(value) in (bool, int, float):
        return value
    raise TrajectoryError(
        f"the extra key {key!r} must hold tensors, arrays, bytes, or what JSON can say, "
        f"got {type(value).__name__}"
    )


def _encode_array(key: str, value: Any) -> Any:
    if value.dtype.hasobject or value.dtype.names is not None:
        raise TrajectoryError(
            f"the extra key {key!r} must hold plain arrays, got dtype {value.dtype}"
        )
    content = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"__array__": [value.dtype.str, list(value.shape), content]}


def _text(key: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TrajectoryError(
            f"the extra key {key!r} must hold text that UTF-8 can say, got {text[:40]!r}"
        ) from error
    return text


def decode_extra(value: Any) -> Any:
    """The inverse of `encode_extra`."""
    if isinstance(value, list):
        return [decode_extra(item) for item in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    items = cast(dict[str, Any], value)
    if "__array__" in items:
        dtype, shape, content = items["__array__"]
        return np.frombuffer(base64.b64decode(content), dtype=dtype).reshape(shape).copy()
    if "__bytes__" in items:
        return base64.b64decode(items["__bytes__"])
    if "__tuple__" in items:
        return tuple(decode_extra(item) for item in items["__tuple__"])
    if "__float__" in items:
        return float(items["__float__"])
    if "__dict__" in items:
        return {decode_extra(k): decode_extra(v) for k, v in items["__dict__"]}
    return {k: decode_extra(v) for k, v in items.items()}
