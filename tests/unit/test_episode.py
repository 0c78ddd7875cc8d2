"""Where errors end: outcomes, retries and limits of one episode."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from areal_pipe.contract.errors import EngineUnavailable
from areal_pipe.contract.trajectory import Episode, Status
from areal_pipe.contract.workflow import RolloutWorkflow
from areal_pipe.contract.workflow_context import WorkflowContext
from areal_pipe.engines.scripted import ScriptedEngine
from areal_pipe.episodes.episode import EpisodePolicy, EpisodeRun

QUICK = EpisodePolicy(backoff_seconds=0.001, max_backoff_seconds=0.002)


class Doing(RolloutWorkflow):
    """Runs a function as the episode, counting its calls."""

    def __init__(self, body: Callable[[int], Any]) -> None:
        self._body = body
        self.calls = 0

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        self.calls += 1
        return self._body(self.calls)


async def outcome_of(workflow: RolloutWorkflow, policy: EpisodePolicy = QUICK) -> Episode:
    context = WorkflowContext(task_id=3, sample_idx=1)
    run = EpisodeRun(workflow, ScriptedEngine([]), {}, context=context, policy=policy)
    return await run.run()


def raising(error: Exception, times: int = 10**9) -> Callable[[int], Any]:
    def body(call: int) -> Any:
        if call <= times:
            raise error
        return None

    return body


async def test_an_outage_is_retried_until_it_is_over() -> None:
    workflow = Doing(raising(EngineUnavailable("restarting"), times=2))
    assert (await outcome_of(workflow)).status is Status.REJECTED
    assert workflow.calls == 3


async def test_an_outage_that_lasts_is_a_failure_with_its_attempts() -> None:
    episode = await outcome_of(Doing(raising(EngineUnavailable("gone"))))
    assert episode.failure is not None
    assert episode.failure.attempts == QUICK.infrastructure_retries + 1
    assert episode.failure.infrastructure


async def test_a_bug_fails_at_once() -> None:
    workflow = Doing(raising(KeyError("answer")))
    episode = await outcome_of(workflow)
    assert workflow.calls == 1
    assert episode.status is Status.FAILED
    assert episode.failure is not None
    assert (episode.failure.error_class, episode.failure.message) == ("KeyError", "'answer'")
    assert not episode.failure.infrastructure


async def test_the_data_budget_is_a_budget_of_its_own() -> None:
    workflow = Doing(raising(KeyError("x"), times=1))
    policy = EpisodePolicy(infrastructure_retries=0, data_retries=1)
    assert (await outcome_of(workflow, policy)).status is Status.REJECTED


async def test_an_episode_that_takes_too_long_fails() -> None:
    class Sleeping(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
            await asyncio.sleep(30)

    episode = await outcome_of(Sleeping(), EpisodePolicy(episode_timeout_seconds=0.02))
    assert episode.failure is not None
    assert episode.failure.error_class == "StageTimeout"
    assert "0.02 s" in episode.failure.message


async def test_cancellation_is_no_outcome() -> None:
    class Sleeping(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
            await asyncio.sleep(30)

    task = asyncio.create_task(outcome_of(Sleeping()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def tensors(**changes: Any) -> dict[str, Any]:
    return {
        "input_ids": torch.tensor([[1, 2]]),
        "attention_mask": torch.ones((1, 2), dtype=torch.bool),
    } | changes


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1], "None or dict, got <class 'list'>"),
        ({}, "cannot be empty"),
        (tensors(logprobs=torch.tensor([[0.0]])), "`logprobs` must be (1, 2)"),
        (tensors(input_ids=torch.tensor([[1.0, 2.0]])), "`input_ids` must be integers"),
        (tensors(logprobs=torch.tensor([[0.0, float("nan")]])), "logprobs must be finite"),
        (tensors(attention_mask=torch.tensor([[False, True]])), "padding on the right"),
        (tensors(rewards=torch.tensor([[1.0, 2.0]])), "`rewards` must hold one number per row"),
        (tensors(rewards=torch.tensor([float("inf")])), "rewards must be finite"),
        (tensors(attention_mask=torch.zeros((1, 2))), "at least one token"),
        ({"input_ids": torch.tensor([[1]])}, "attention_mask"),
    ],
)
async def test_what_is_no_trajectory_is_a_failed_episode(result: Any, message: str) -> None:
    episode = await outcome_of(Doing(lambda _: result))
    assert episode.status is Status.FAILED
    assert episode.failure is not None
    assert episode.failure.error_class == "TrajectoryError"
    assert message in episode.failure.message
