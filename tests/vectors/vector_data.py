"""Loads the conformance vectors in `data/`, builds what they describe, compares with what came.

A vector's expected value is AReaL's main branch where the versions differ. Where ours differs by
design, or AReaL's behaviour is a quirk, the test module says what ours must do (`ours`).
"""

import builtins
import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_pipe import ScriptedEngine
from areal_pipe.contract import errors
from areal_pipe.contract.interaction import InteractionWithTokenLogpReward

StartEngine = Callable[..., ScriptedEngine]
"""The `start_engine` fixture: `start_engine(script, **executor_config)`."""

DATA = Path(__file__).parent / "data"
_FACTS = re.compile(r"\d+(?:\.\d+)?|\w+(?:\.\w+)+|\w*_\w+|'[\w.]+'|`\w+`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """One observation: what went in and what must come out."""

    id: str
    input: Any
    expected: Any


def load(area: str, ours: Mapping[str, Any] | None = None) -> list[Any]:
    """The vectors of an area as pytest parameters.

    Args:
        ours: expected values by vector id, instead of those in the file.

    Raises:
        ValueError: a quirk nobody decided about, or `ours` names a vector that does not exist.
    """
    replaced = dict(ours or {})
    entries = json.loads((DATA / f"{area}.json").read_text())
    if unknown := replaced.keys() - {e["id"] for e in entries}:
        raise ValueError(f"{area} has no vectors {sorted(unknown)}")
    vectors = [_vector(entry, replaced) for entry in entries]
    return [pytest.param(v, id=v.id) for v in vectors]


def _vector(entry: Mapping[str, Any], replaced: Mapping[str, Any]) -> Vector:
    name = entry["id"]
    mainline = "expected_main" in entry
    if entry.get("anchor_quirk") and not mainline and name not in replaced:
        raise ValueError(f"{name} is a quirk: say what ours must do ({entry['recommended']})")
    theirs = entry["expected_main"] if mainline else entry["expected"]
    return Vector(id=name, input=entry["input"], expected=replaced.get(name, theirs))


def is_tensor(spec: Any) -> bool:
    return isinstance(spec, dict) and {"shape", "dtype"} <= spec.keys()


def tensor(spec: Mapping[str, Any]) -> torch.Tensor:
    """The tensor that a spec describes; ones where it gives no data."""
    dtype = getattr(torch, spec["dtype"])
    if "data" not in spec:
        return torch.ones(spec["shape"], dtype=dtype)
    return torch.tensor(spec["data"], dtype=dtype).reshape(spec["shape"])


def build(spec: Any) -> Any:
    """A spec with its tensors and interactions made real."""
    if is_tensor(spec):
        return tensor(spec)
    if spec == "InteractionWithTokenLogpReward":
        return InteractionWithTokenLogpReward()
    if isinstance(spec, dict):
        return {key: build(value) for key, value in spec.items()}
    if isinstance(spec, list):
        return [build(value) for value in spec]
    return spec


def assert_same(actual: Any, spec: Any) -> None:
    """What came is what the spec says: tensors by shape, dtype and value, keys exactly."""
    if is_tensor(spec):
        torch.testing.assert_close(actual, tensor(spec))
    elif isinstance(spec, dict):
        assert set(actual) == set(spec)
        for key, value in spec.items():
            assert_same(actual[key], value)
    elif isinstance(spec, list):
        assert len(actual) == len(spec)
        for one, value in zip(actual, spec, strict=True):
            assert_same(one, value)
    else:
        assert actual == (pytest.approx(spec) if isinstance(spec, float) else spec)


def outcome(expected: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """A `with` block that must raise the expected error; one that must not, where there is none."""
    if expected["ok"]:
        return nullcontext()
    return failing(expected["error_type"], expected["error_message"])


@contextmanager
def failing(error_type: str, message: str) -> Iterator[None]:
    """The block raises this type, or a subclass, and the message holds the same facts."""
    with pytest.raises(_error_type(error_type)) as caught:
        yield
    assert_same_facts(str(caught.value), message)


def _error_type(name: str) -> type[BaseException]:
    homes = (builtins, pickle, errors)
    return next(getattr(home, name) for home in homes if hasattr(home, name))


def assert_same_facts(actual: str, expected: str) -> None:
    """Numbers and names of the expected text appear; its words, where it has none of those."""
    facts = _FACTS.findall(expected) or re.findall(r"\w+", expected)
    missing = [fact for fact in facts if fact.strip("'`").lower() not in actual.lower()]
    assert not missing, f"{actual!r} does not say {missing}"
