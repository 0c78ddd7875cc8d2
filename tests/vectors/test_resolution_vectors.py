"""From objects, classes and import strings to workflows, filters and agents."""

from typing import Any

import pytest

from areal_pipe.episodes import resolution
from tests.vectors import vecmod
from tests.vectors.vector_data import (
    Vector,
    assert_same_facts,
    failing,
    load,
    outcome,
)

HERE = vecmod.__name__
WORKFLOWS: dict[str, Any] = {
    "RolloutWorkflow instance a=7": vecmod.MyW(a=7),
    "RolloutWorkflow class": vecmod.MyW,
    "str -> RolloutWorkflow class": f"{HERE}.MyW",
    "str -> RolloutWorkflow instance a=5": f"{HERE}.a_workflow",
    "'vecmod.Zzz'": f"{HERE}.Zzz",
    "str -> agent class": f"{HERE}.Agent",
    "str -> agent instance": f"{HERE}.an_agent",
    "agent class": vecmod.Agent,
    "agent instance": vecmod.an_agent,
    "object with sync run()": vecmod.SyncAgent(),
    "object without run": vecmod.NoRun(),
}
FILTERS: dict[str, Any] = {
    "None": None,
    "lambda": lambda result: True,
    "str -> int 3": f"{HERE}.notcallable",
    "5": 5,
}
OURS = {
    # AReaL takes 0 and negative sizes for 1.
    "resolve_workflow/group_zero": {
        "ok": False,
        "error_type": "ValueError",
        "error_message": "group_size must be >= 1, got 0",
        "logs": [],
    }
}


def in_our_words(text: str) -> str:
    """A message of the vectors with our names in it, without advice on AReaL's controller."""
    advice = " Ensure proxy workers are initialized via RolloutController.start_proxy()."
    text = text.replace(advice, "").replace("vecmod.", f"{HERE}.")
    return text.replace("__main__.", f"{HERE}.")


@pytest.mark.parametrize("vector", load("resolve_workflow", OURS))
def test_a_workflow_resolves_as_the_vector_says(
    vector: Vector, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = vector.input | {"workflow": WORKFLOWS[vector.input["workflow"]]}
    expected = dict(vector.expected)
    if not expected["ok"]:
        expected["error_message"] = in_our_words(expected["error_message"])
    with outcome(expected):
        assert describe(resolution.resolve_workflow(**arguments)) == expected["result"]
    assert len(caplog.messages) == len(expected["logs"])
    for message, logged in zip(caplog.messages, expected["logs"], strict=True):
        assert_same_facts(message, logged)


def describe(resolved: Any) -> dict[str, Any]:
    kind = type(resolved).__name__
    inner, agent = getattr(resolved, "workflow", None), getattr(resolved, "agent", None)
    return {
        "type": "OpenAIProxyWorkflow" if kind == "AgentWorkflow" else kind,
        "inner": type(inner).__name__ if inner else None,
        "agent": type(agent).__name__ if agent else None,
        "attr_a": getattr(resolved, "a", None),
    }


@pytest.mark.parametrize("vector", load("resolve_should_accept_fn"))
def test_a_filter_resolves_as_the_vector_says(vector: Vector) -> None:
    given = FILTERS[vector.input]
    if not vector.expected["ok"]:
        message = in_our_words(vector.expected["error_message"])
        with failing(vector.expected["error_type"], message):
            resolution.resolve_should_accept_fn(given)
        return
    resolved = resolution.resolve_should_accept_fn(given)
    assert ("callable" if callable(resolved) else resolved) == vector.expected["result"]


@pytest.mark.parametrize("vector", load("import_from_string"))
def test_an_import_string_resolves_as_the_vector_says(vector: Vector) -> None:
    with outcome(vector.expected):
        imported = resolution.import_from_string(vector.input)
        assert ("callable" if callable(imported) else imported) == vector.expected["result"]
