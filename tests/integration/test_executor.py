"""The executor in bad weather: whatever a prompt does, whoever waits gets an answer."""

import asyncio
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest

from areal_pipe.contract.engine import ModelRequest
from areal_pipe.contract.trajectory import Status
from areal_pipe.contract.workflow import RolloutWorkflow
from areal_pipe.engines.scripted import ScriptedEngine
from areal_pipe.rollout.executor_config import ExecutorConfig
from tests.scenarios import tensors_of


class Doing(RolloutWorkflow):
    """Runs a function of the row as the episode."""

    def __init__(self, body: Callable[[Any], Any]) -> None:
        self._body = body

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        result = self._body(data)
        return await result if asyncio.iscoroutine(result) else result


class Answering(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        response = await engine.agenerate(ModelRequest(input_ids=[data["number"]]))
        return tensors_of(response, reward=1.0)


@pytest.fixture
def engine() -> Generator[ScriptedEngine]:
    engine = ScriptedEngine(lambda req: [req.input_ids[-1] + 1])
    yield engine
    engine.destroy()


async def cancel_itself() -> None:
    inner = asyncio.ensure_future(asyncio.sleep(10))
    inner.cancel()
    await inner


def leave() -> None:
    raise SystemExit(3)


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize(
    ("body", "data"),
    [
        (lambda _: None, {"lock": threading.Lock()}),
        (lambda _: None, 5),
        (lambda _: cancel_itself(), {}),
        (lambda _: leave(), {}),
    ],
    ids=["data that cannot be copied", "data that is no mapping", "inner cancellation", "exit"],
)
def test_a_prompt_that_breaks_everything_is_a_failed_prompt(
    engine: ScriptedEngine, body: Callable[[Any], Any], data: Any, group_size: int
) -> None:
    task_id = engine.submit(data, Doing(body), group_size=group_size)
    outcome = engine.executor.wait_for_task(task_id, timeout=10)
    assert outcome is not None
    assert outcome.status is Status.FAILED
    assert engine.executor.stats().running == 0
    assert engine.rollout_batch([{"number": 1}], Answering())[0] is not None, "it lives on"


def test_rollout_batch_does_not_wait_for_versions_that_cannot_come() -> None:
    config = ExecutorConfig(max_head_offpolicyness=0, consumer_batch_size=1)
    engine = ScriptedEngine(lambda req: [7], executor_config=config)
    results = engine.rollout_batch([{"number": n} for n in range(3)], Answering())
    engine.destroy()
    assert [r is not None for r in results] == [True] * 3


def test_who_waits_is_told_when_the_executor_is_destroyed(engine: ScriptedEngine) -> None:
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            engine.wait(1)
        except RuntimeError as error:
            caught.append(error)

    executor = engine.executor
    thread = threading.Thread(target=wait)
    thread.start()
    engine.destroy()
    thread.join(timeout=10)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="destroyed"):
        executor.submit({"number": 1}, Answering())
    assert len(caught) <= 1


def test_refused_results_are_neither_counted_nor_kept_as_accepted(engine: ScriptedEngine) -> None:
    task_id = engine.submit({"number": 1}, Answering(), should_accept_fn=lambda _: False)
    outcome = engine.executor.wait_for_task(task_id, timeout=10)
    assert outcome is not None
    assert (outcome.status, outcome.result) == (Status.FILTERED, None)
    assert [e.status for e in outcome.episodes] == [Status.FILTERED]
    stats = engine.export_stats()
    assert (stats["rollout/filtered"], stats["rollout/reward__count"]) == (1.0, 0.0)
    assert engine.export_stats()["rollout/filtered"] == 0.0, "counted since the last call"


async def test_an_engine_that_only_aborts_is_given_up_without_blocking_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from areal_pipe.contract.engine import ModelResponse
    from areal_pipe.contract.errors import EngineUnavailable
    from areal_pipe.episodes import continuation

    monkeypatch.setattr(continuation, "MAX_EMPTY_SEGMENTS", 3)
    engine = ScriptedEngine(lambda req: ModelResponse(stop_reason="abort"))
    with pytest.raises(EngineUnavailable, match="aborted 4 times in a row"):
        await asyncio.wait_for(engine.agenerate(ModelRequest(input_ids=[1])), 5)
