"""User code may raise anything: it is its own episode's failure, and nobody else's."""

import asyncio
from typing import Any

import pytest

from areal_pipe import GroupedRolloutWorkflow, RolloutWorkflow, ScriptedEngine, workflow_context
from areal_pipe.contract.trajectory import Episode, Status
from areal_pipe.episodes.episode import EpisodePolicy, GroupRun
from areal_pipe.rollout.executor import WorkflowExecutor


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class Unpicklable(BaseException):
    def __reduce__(self) -> Any:
        raise TypeError("not me")


ANYTHING: list[BaseException] = [
    StopIteration("once"),
    StopAsyncIteration(),
    KeyboardInterrupt(),
    GeneratorExit(),
    SystemExit(3),
    asyncio.CancelledError("not ours"),
    Unprintable(),
    Unpicklable("x"),
    BaseExceptionGroup("both", [KeyboardInterrupt(), ValueError("x")]),
]


class Raising(RolloutWorkflow):
    """Sample 0 raises; the others say something and are rejected."""

    def __init__(self, error: BaseException, *, in_task: bool = False) -> None:
        self._error = error
        self._in_task = in_task

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        if workflow_context.get().sample_idx == 0:
            print("about to fail")
            if self._in_task:
                await asyncio.create_task(self._fail())
            await self._fail()
        await asyncio.sleep(0.01)

    async def _fail(self) -> None:
        raise self._error


async def group_of(workflow: RolloutWorkflow) -> list[Episode]:
    engine = ScriptedEngine([])
    group = GroupRun(workflow, engine, {}, task_id=7, samples=(0, 1), policy=EpisodePolicy())
    return await group.run()


@pytest.mark.parametrize("error", ANYTHING, ids=lambda e: type(e).__name__)
async def test_whatever_a_workflow_raises_is_its_episodes_failure(error: BaseException) -> None:
    failed, sibling = await group_of(Raising(error))
    assert failed.status is Status.FAILED
    assert sibling.status is Status.REJECTED
    assert failed.failure is not None
    assert "in _fail" in failed.failure.traceback
    assert failed.failure.output == "about to fail\n"


@pytest.mark.parametrize("error", ANYTHING, ids=lambda e: type(e).__name__)
def test_the_executor_outlives_whatever_its_users_raise(error: BaseException) -> None:
    executor = WorkflowExecutor(ScriptedEngine([]))
    try:
        for in_task in (False, True):
            executor.submit({}, Raising(error, in_task=in_task))
        outcomes = executor.wait(2, timeout=10)
        assert [o.status for o in outcomes] == [Status.FAILED, Status.FAILED]
    finally:
        executor.destroy()


@pytest.mark.parametrize("error", ANYTHING, ids=lambda e: type(e).__name__)
def test_a_filter_may_raise_anything_too(error: BaseException) -> None:
    def accept(result: Any) -> bool:
        raise error

    engine = ScriptedEngine([])
    try:
        engine.submit({}, One(), should_accept_fn=accept)
        [outcome] = engine.executor.wait(1, timeout=10)
        assert outcome.status is Status.FAILED
    finally:
        engine.destroy()


class One(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        import torch

        ids = torch.tensor([[1, 2]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}


@pytest.mark.parametrize("policy", ["keep", "drop_group"])
async def test_a_group_never_gives_up_members_that_met_an_outage(policy: Any) -> None:
    group = GroupedRolloutWorkflow(Raising(ConnectionError("away")), 2, on_failed_member=policy)
    members = await group.run_members(
        ScriptedEngine([]), {}, task_id=0, policy=EpisodePolicy(infrastructure_retries=0)
    )
    with pytest.raises(ConnectionError, match="away"):
        group.merge(members)


async def test_a_shy_engine_makes_the_episodes_own_timeout_an_outage() -> None:
    class Asking(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
            from areal_pipe import ModelRequest

            await engine.agenerate(ModelRequest(input_ids=[1]))

    engine = ScriptedEngine(lambda _: [1], latency_seconds=30)
    policy = EpisodePolicy(episode_timeout_seconds=0.05)
    [episode] = await GroupRun(Asking(), engine, {}, task_id=0, samples=(0,), policy=policy).run()
    assert episode.failure is not None
    assert episode.failure.infrastructure
