"""Rollouts in the background: what is accepted, what waiting gives, what holds prompts back.

The vectors describe their scenarios in prose; each is a function here. Errors in user code are
`failed` (AReaL: rejected), and results come in the order of submission.
"""

import ast
import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from areal_pipe import ModelRequest, RolloutWorkflow, ScriptedEngine
from areal_pipe.contract import workflow_context
from tests.vectors.vector_data import StartEngine, Vector, assert_same_facts, failing, load

PATIENCE_SECONDS = 10.0
A_MOMENT_SECONDS = 0.05

Scenario = Callable[[StartEngine, Vector], None]


def counts(**named: int) -> dict[str, int]:
    return {"enqueued": 0, "running": 0, "accepted": 0, "rejected": 0, "failed": 0} | named


def failed_alone(error: str, *logs: str) -> dict[str, Any]:
    return {
        "task_ids": [0],
        "stats": counts(failed=1),
        "results": ["None"],
        "errors": [error],
        "logs": list(logs),
    }


OURS: dict[str, Any] = {
    "executor/filter_raises": failed_alone("KeyError", "'x'"),
    "executor/empty_dict": failed_alone("TrajectoryError", "Data dict cannot be empty"),
    "executor/bad_type": failed_alone("TrajectoryError", "<class 'list'>"),
    "executor/missing_keys_checked": failed_alone("TrajectoryError", "{'attention_mask'}"),
    "executor/key_drift_checked": {
        "task_ids": [0, 1],
        "stats": counts(accepted=1, failed=1),
        "results": ["None", "rew=[1.0]"],
        "errors": ["TrajectoryError"],
        "logs": ["Inconsistent keys: {'versions'} are missing"],
    },
    # A quiet timeout hands out what is finished.
    "executor/wait_semantics": {
        "count0": "count must be positive, got 0",
        "count_neg": "count must be positive, got -1",
        "timeout_raise": "1 results, only received 0",
        "timeout_quiet": 0,
        "partial_timeout_quiet": 1,
        "then_1": 1,
        "wait_for_task_unknown": "Task 99 is never submitted.",
        "wait_for_task_none": None,
        "wait_for_task_again": "Task 1 is never submitted.",
    },
    # Only the duplicate is refused.
    "executor/duplicate_task_id": {
        "submit": "Duplicate task_id: 3",
        "later_submit": 4,
        "wait": 2,
    },
    # The new version starts what it allows.
    "executor/staleness_gate": {
        "first_wait": 2,
        "stats_v0": counts(enqueued=4, accepted=2),
        "capacity_v0": 0,
        "extra_wait": "1 results, only received 0",
        "after_version1": 2,
        "stats_v1": counts(enqueued=2, accepted=4),
        "max_parallel": 2,
    },
    # What was running when the pause came can be collected; what was queued starts after it.
    "executor/pause": {
        "wait_during_pause": 1,
        "queued_during_pause": "1 results, only received 0",
        "after_resume": 1,
    },
}


class Replay(RolloutWorkflow):
    """Asks the engine once, then gives back what the row holds under `result`."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        await engine.agenerate(ModelRequest(input_ids=[data.get("prompt", 1)]))
        return data["result"]


class Gate:
    """A script that holds some prompts until they are opened; remembers how many it held.

    Opened from the test's thread, awaited in the executor's.
    """

    def __init__(self, *held_prompts: int) -> None:
        self._held = {prompt: threading.Event() for prompt in held_prompts}
        self._inside = 0
        self.max_inside = 0

    def open(self, prompt: int) -> None:
        self._held[prompt].set()

    async def __call__(self, req: ModelRequest) -> list[int]:
        self._inside += 1
        self.max_inside = max(self.max_inside, self._inside)
        if held := self._held.get(req.input_ids[0]):
            await asyncio.to_thread(held.wait, PATIENCE_SECONDS)
        await asyncio.sleep(0.002)
        self._inside -= 1
        return [2]


def tokens(reward: float, **extra: Any) -> dict[str, Any]:
    return {
        "input_ids": torch.tensor([[1, 2]], dtype=torch.int32),
        "loss_mask": torch.tensor([[0, 1]], dtype=torch.int32),
        "logprobs": torch.tensor([[0.0, -0.5]]),
        "versions": torch.tensor([[-1, 0]], dtype=torch.int32),
        "attention_mask": torch.ones((1, 2), dtype=torch.bool),
        "rewards": torch.tensor([reward]),
        **extra,
    }


def tokens_without(key: str) -> dict[str, Any]:
    return {name: value for name, value in tokens(1.0).items() if name != key}


def row(prompt: int) -> dict[str, Any]:
    return {"prompt": prompt, "result": tokens(1.0)}


def stats_of(engine: ScriptedEngine) -> dict[str, int]:
    return asdict(engine.executor.stats())


def show(result: Any) -> str:
    return "None" if result is None else f"rew={result['rewards'].tolist()}"


def run_in_order(
    start_engine: StartEngine, vector: Vector, results: Sequence[Any], **options: Any
) -> None:
    """Tasks that return `results`, one at a time."""
    engine = start_engine(lambda req: [2], max_concurrent_rollouts=1)
    rows = [{"result": result, "number": i} for i, result in enumerate(results)]
    task_ids = [engine.submit(data, Replay(), **options) for data in rows]
    outcomes = engine.executor.wait(len(rows), timeout=PATIENCE_SECONDS)
    expected = vector.expected
    assert task_ids == expected["task_ids"]
    assert stats_of(engine) == counts() | expected["stats"]
    assert sorted(show(o.result) for o in outcomes) == expected["results"]
    errors = [type(o.error).__name__ for o in outcomes if o.error]
    assert errors == expected.get("errors", [])
    # Ours: outcomes keep the order of submission, and their inputs.
    assert [o.data["number"] for o in outcomes] == list(range(len(rows)))


def filter_one_of_two(start_engine: StartEngine, vector: Vector) -> None:
    def accept(result: dict[str, Any]) -> bool:
        return bool((result["rewards"] > 0).all())

    run_in_order(start_engine, vector, [tokens(1.0), tokens(0.0)], should_accept_fn=accept)


def filter_that_raises(start_engine: StartEngine, vector: Vector) -> None:
    def accept(result: dict[str, Any]) -> bool:
        raise KeyError("x")

    run_in_order(start_engine, vector, [tokens(1.0)], should_accept_fn=accept)


def wait_in_all_ways(start_engine: StartEngine, vector: Vector) -> None:
    expected = vector.expected
    engine = start_engine(gate := Gate(10, 11))
    with failing("ValueError", expected["count0"]):
        engine.wait(0)
    with failing("ValueError", expected["count_neg"]):
        engine.wait(-1)
    engine.submit(row(10), Replay(), task_id=0)
    with failing("TimeoutError", expected["timeout_raise"]):
        engine.wait(1, timeout=A_MOMENT_SECONDS)
    quiet = engine.wait(1, timeout=A_MOMENT_SECONDS, raise_timeout=False)
    assert len(quiet) == expected["timeout_quiet"]

    engine.submit(row(11), Replay(), task_id=1)
    gate.open(10)
    partial = engine.wait(2, timeout=4 * A_MOMENT_SECONDS, raise_timeout=False)
    assert len(partial) == expected["partial_timeout_quiet"]
    not_yet = engine.wait_for_task(1, timeout=A_MOMENT_SECONDS, raise_timeout=False)
    assert not_yet is expected["wait_for_task_none"]
    with failing("ValueError", expected["wait_for_task_unknown"]):
        engine.wait_for_task(99)
    gate.open(11)
    assert len(engine.wait(1, timeout=PATIENCE_SECONDS)) == expected["then_1"]
    with failing("ValueError", expected["wait_for_task_again"]):
        engine.wait_for_task(1)


def submit_a_task_id_twice(start_engine: StartEngine, vector: Vector) -> None:
    expected = vector.expected
    engine = start_engine(gate := Gate(10))
    engine.submit(row(10), Replay(), task_id=3)
    with failing("ValueError", expected["submit"]):
        engine.submit(row(10), Replay(), task_id=3)
    assert engine.submit(row(10), Replay(), task_id=4) == expected["later_submit"]
    gate.open(10)
    assert len(engine.wait(2, timeout=PATIENCE_SECONDS)) == expected["wait"]


def bump_the_version(start_engine: StartEngine, vector: Vector) -> None:
    expected = vector.expected
    gate = Gate()
    engine = start_engine(gate, consumer_batch_size=2, max_head_offpolicyness=0)
    for _ in range(6):
        engine.submit(row(10), Replay())
    assert len(engine.wait(2, timeout=PATIENCE_SECONDS)) == expected["first_wait"]
    assert stats_of(engine) == expected["stats_v0"]
    assert engine.executor.staleness.get_capacity() == expected["capacity_v0"]
    with failing("TimeoutError", expected["extra_wait"]):
        engine.wait(1, timeout=A_MOMENT_SECONDS)
    engine.set_version(1)
    assert len(engine.wait(2, timeout=PATIENCE_SECONDS)) == expected["after_version1"]
    assert stats_of(engine) == expected["stats_v1"]
    assert gate.max_inside == expected["max_parallel"]


def prepare_a_batch(start_engine: StartEngine, vector: Vector) -> None:
    case = vector.input
    pattern = ast.literal_eval(case["pattern"].partition(": ")[2].removesuffix("..."))
    rows = [{"result": tokens(1.0) if accepted else None} for accepted in pattern * 4]
    engine = start_engine(lambda req: [2], max_concurrent_rollouts=case["max_concurrent_rollouts"])
    batches = DataLoader(rows, batch_size=case["batch_size"], collate_fn=list)
    batch = engine.prepare_batch(batches, Replay(), dynamic_bs=case["dynamic_bs"])
    assert len(batch) == vector.expected


def pause_and_resume(start_engine: StartEngine, vector: Vector) -> None:
    expected = vector.expected
    engine = start_engine(gate := Gate(10))
    engine.submit(row(10), Replay())
    wait_until(lambda: len(engine.requests) == 1)
    engine.pause()
    engine.submit(row(11), Replay())
    gate.open(10)
    assert len(engine.wait(1, timeout=PATIENCE_SECONDS)) == expected["wait_during_pause"]
    with failing("TimeoutError", expected["queued_during_pause"]):
        engine.wait(1, timeout=A_MOMENT_SECONDS)
    engine.resume()
    assert len(engine.wait(1, timeout=PATIENCE_SECONDS)) == expected["after_resume"]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def returning(*results: Any) -> Scenario:
    return lambda start_engine, vector: run_in_order(start_engine, vector, results)


SCENARIOS: dict[str, Scenario] = {
    "executor/filter": filter_one_of_two,
    "executor/filter_raises": filter_that_raises,
    "executor/empty_dict": returning({}),
    "executor/bad_type": returning([1]),
    "executor/missing_keys_checked": returning(tokens_without("attention_mask")),
    "executor/key_drift_checked": returning(tokens(1.0), tokens_without("versions")),
    "executor/key_extra_checked": returning(tokens(1.0), tokens(1.0, extra=torch.ones(1))),
    "executor/wait_semantics": wait_in_all_ways,
    "executor/duplicate_task_id": submit_a_task_id_twice,
    "executor/staleness_gate": bump_the_version,
    "executor/prepare_batch_static_all_ok": prepare_a_batch,
    "executor/prepare_batch_dynamic_half": prepare_a_batch,
    "executor/pause": pause_and_resume,
}


@pytest.mark.parametrize("vector", load("executor", OURS))
def test_the_executor_does_what_the_vector_says(
    vector: Vector, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    SCENARIOS[vector.id](start_engine, vector)
    logs = vector.expected.get("logs", []) if isinstance(vector.expected, dict) else []
    assert len(caplog.messages) == len(logs)
    for message, expected in zip(caplog.messages, logs, strict=True):
        assert_same_facts(message, expected)


@pytest.mark.parametrize("vector", load("task_ids"))
def test_task_ids_count_up_from_where_the_vector_says(
    vector: Vector, start_engine: StartEngine
) -> None:
    engine = start_engine(lambda req: [2])
    assert [engine.submit(row(1), Replay()) for _ in range(3)] == vector.expected
    assert len(engine.wait(3, timeout=PATIENCE_SECONDS)) == 3


@pytest.mark.parametrize("vector", load("stat_scope"))
def test_statistics_are_scoped_as_the_vector_says(vector: Vector) -> None:
    is_eval = {"is_eval=False": False}[vector.input]
    with workflow_context.within(workflow_context.WorkflowContext(is_eval=is_eval)):
        assert workflow_context.stat_scope() == vector.expected


def test_results_come_in_the_order_of_submission_not_of_completion(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(gate := Gate(10))
    slow, quick = engine.submit(row(10), Replay()), engine.submit(row(11), Replay())
    wait_until(lambda: engine.executor.stats().accepted == 1)
    gate.open(10)
    outcomes = engine.executor.wait(2, timeout=PATIENCE_SECONDS)
    assert [outcome.task_id for outcome in outcomes] == [slow, quick]
