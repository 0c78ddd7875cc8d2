"""The executor in bad weather: whatever a prompt does, whoever waits gets an answer."""

import asyncio
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from areal_pipe.contract.engine import ModelRequest
from areal_pipe.contract.errors import WorkflowError
from areal_pipe.contract.trajectory import Status
from areal_pipe.contract.workflow import RolloutWorkflow
from areal_pipe.engines.scripted import ScriptedEngine
from areal_pipe.rollout.executor_config import ExecutorConfig
from areal_pipe.storage.task_dump import DumpConfig
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


def tight(*, batch_size: int = 1, staleness: int = 0) -> ScriptedEngine:
    """An engine that may run no more than the staleness bound allows."""
    config = ExecutorConfig(max_head_offpolicyness=staleness, consumer_batch_size=batch_size)
    return ScriptedEngine(lambda req: [7], executor_config=config)


class Loader:
    """A dataloader of single rows."""

    def __init__(self, rows: list[Any], batch_size: int, **attributes: Any) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self.__dict__ |= attributes

    def __iter__(self) -> Iterator[Any]:
        yield from self.rows


def test_a_batch_that_can_never_be_filled_is_refused_with_its_reason() -> None:
    engine = tight()
    loader = Loader([{"number": n} for n in range(4)], batch_size=2)
    try:
        with pytest.raises(WorkflowError, match=r"max_head_offpolicyness=0.*batch_size=1"):
            engine.prepare_batch(loader, Answering())
        engine.set_version(1)
        assert len(engine.prepare_batch(loader, Answering())) == 2, "the one result was kept"
    finally:
        engine.destroy()


def test_results_of_evaluations_are_no_training_data(engine: ScriptedEngine) -> None:
    evaluation = engine.submit({"number": 100}, Answering(), is_eval=True)
    engine.submit({"number": 101}, Answering(), is_eval=True)
    batch = engine.prepare_batch(Loader([{"number": n} for n in range(3)], 3), Answering())
    assert sorted(b["input_ids"][0, 0].item() for b in batch) == [0, 1, 2]
    result = engine.wait_for_task(evaluation, timeout=10)
    assert result is not None
    assert result["input_ids"][0, 0].item() == 100


def test_torchs_default_collate_is_refused_in_one_sentence(engine: ScriptedEngine) -> None:
    from torch.utils.data import DataLoader

    rows: Any = [{"number": n} for n in range(4)]
    with pytest.raises(WorkflowError, match="pass collate_fn=list"):
        engine.prepare_batch(DataLoader(rows, batch_size=2), Answering())
    batch = engine.prepare_batch(DataLoader(rows, batch_size=2, collate_fn=list), Answering())
    assert len(batch) == 2


def test_a_failed_call_does_not_poison_the_next(engine: ScriptedEngine) -> None:
    def submit(row: Any) -> int:
        if row["number"] == 2:
            raise ValueError("no second one")
        return engine.submit(row, Answering())

    with pytest.raises(ValueError, match="no second one"):
        engine.executor.rollout_batch([{"number": 1}, {"number": 2}], submit)
    with pytest.raises(TimeoutError):
        engine.wait(1, timeout=0.2)
    rows: list[Any] = [{"number": n} for n in range(2)]
    broken = Loader(rows, 2)

    def breaking() -> Iterator[Any]:
        yield rows[0]
        raise OSError("the disk of the dataset is gone")

    broken.__class__ = type("Broken", (Loader,), {"__iter__": lambda _: breaking()})
    with pytest.raises(OSError, match="gone"):
        engine.prepare_batch(broken, Answering())
    broken.__class__ = Loader
    assert len(engine.prepare_batch(broken, Answering())) == 2


def test_dumps_of_an_earlier_process_are_kept(tmp_path: Any) -> None:
    dump = DumpConfig(fileroot=str(tmp_path), experiment_name="e", trial_name="t")
    for number in (1, 2):
        engine = ScriptedEngine(lambda req: [7], executor_config=ExecutorConfig(dump=dump))
        engine.rollout_batch([{"number": number}], Answering())
        engine.destroy()
    dumped = sorted((tmp_path / "e/t/rollout/0").iterdir())
    assert [p.name for p in dumped] == ["0.1.jsonl", "0.jsonl"]
    assert '"input_ids":[2,7]' in dumped[0].read_text()
    assert '"input_ids":[1,7]' in dumped[1].read_text()
