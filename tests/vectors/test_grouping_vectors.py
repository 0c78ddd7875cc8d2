"""Groups: which members' results are merged, and what becomes of the others."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from areal_pipe import (
    GroupedRolloutWorkflow,
    InteractionWithTokenLogpReward,
    ModelResponse,
    RolloutWorkflow,
    ScriptedEngine,
    workflow_context,
)
from tests.vectors.vector_data import Vector, assert_same, assert_same_facts, load, outcome

OURS: dict[str, Any] = {
    # An empty dict is no trajectory: the member failed.
    "grouped_rollout/interactions_empty_dict": {
        "ok": False,
        "error_type": "ValueError",
        "error_message": "dict cannot be empty",
        "logs": [],
    },
    "grouped_rollout/one_raises": {
        "ok": False,
        "error_type": "ValueError",
        "error_message": "boom",
        "logs": [],
    },
    "grouped_rollout/mixed_types": {
        "ok": False,
        "error_type": "WorkflowError",
        "error_message": "one kind of result: interactions from 1 of 2 members",
        "logs": [],
    },
    # Step rewards stay as they are; AReaL overwrites them with the episode's.
    "grouped_rollout/reward_norm_multiturn": {
        "ok": True,
        "result": {
            "kind": "interactions",
            "keys": ["a1", "a2", "b1"],
            "rewards": [0.25, 1.0, -1.0],
        },
        "logs": [],
    },
    # Without AReaL's advice on prepare_batch.
    "grouped_rollout/drop_incomplete": {
        "ok": True,
        "result": None,
        "logs": ["1/2 trajectories returned None, dropping group (drop_incomplete_group)"],
    },
}


def tokens(*ids: int, reward: float) -> dict[str, torch.Tensor]:
    """One prompt token, the rest generated."""
    generated = len(ids) - 1
    return {
        "input_ids": torch.tensor([ids], dtype=torch.int32),
        "loss_mask": torch.tensor([[0] + [1] * generated], dtype=torch.int32),
        "logprobs": torch.tensor([[0.0] + [-0.5] * generated]),
        "versions": torch.tensor([[-1] + [0] * generated], dtype=torch.int32),
        "attention_mask": torch.ones((1, len(ids)), dtype=torch.bool),
        "rewards": torch.tensor([reward]),
    }


def interactions(**rewards: float | None) -> dict[str, InteractionWithTokenLogpReward]:
    return {
        key: InteractionWithTokenLogpReward(
            model_response=ModelResponse(
                input_tokens=[1], output_tokens=[2], output_logprobs=[-0.5], output_versions=[0]
            ),
            reward=reward,
        )
        for key, reward in rewards.items()
    }


MEMBERS: dict[str, Sequence[Any]] = {
    "grouped_rollout/all_valid": [tokens(1, 2, reward=1.0), tokens(1, 3, 4, reward=0.0)],
    "grouped_rollout/partial_none": [
        tokens(1, 2, reward=1.0),
        None,
        tokens(1, 3, 4, reward=0.0),
        None,
    ],
    "grouped_rollout/all_none": [None, None],
    "grouped_rollout/one_raises": [tokens(1, 2, reward=1.0), ValueError("boom")],
    "grouped_rollout/interactions_empty_dict": [interactions(a=1.0), {}],
    "grouped_rollout/mixed_types": [interactions(a=1.0), tokens(1, 2, reward=1.0)],
    "grouped_rollout/size_zero": [],
    "grouped_rollout/reward_norm_equal": [interactions(a=1.0), interactions(b=1.0)],
    "grouped_rollout/reward_norm_missing": [interactions(a=1.0), None],
    "grouped_rollout/reward_norm_none_reward": [interactions(a=1.0), interactions(b=None)],
    "grouped_rollout/reward_norm_multiturn": [interactions(a1=0.25, a2=1.0), interactions(b1=0.0)],
    "grouped_rollout/drop_incomplete": [tokens(1, 2, reward=1.0), None],
}


class Members(RolloutWorkflow):
    """Sample i gives result i; exceptions are raised at once, results take a moment longer."""

    def __init__(self, results: Sequence[Any]) -> None:
        self.results = results
        self.ended: set[int | None] = set()

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        sample = workflow_context.get().sample_idx
        assert sample is not None
        result = self.results[sample]
        if isinstance(result, Exception):
            self.ended.add(sample)
            raise result
        await asyncio.sleep(0.01)
        self.ended.add(sample)
        return result


@pytest.mark.parametrize("vector", load("grouped_rollout", OURS))
async def test_a_group_ends_as_the_vector_says(
    vector: Vector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    members = Members(MEMBERS[vector.id])
    settings = {k: v for k, v in vector.input.items() if k != "results"}
    with outcome(vector.expected):
        grouped = GroupedRolloutWorkflow(members, **settings)
        result = await grouped.arun_episode(ScriptedEngine([]), {})
        assert_is_result(result, vector.expected["result"])
    assert members.ended == set(range(vector.input["group_size"]))
    assert len(caplog.messages) == len(vector.expected.get("logs", []))
    for message, expected in zip(caplog.messages, vector.expected.get("logs", []), strict=True):
        assert_same_facts(message, expected)


def assert_is_result(result: Any, expected: Any) -> None:
    if expected is None:
        assert result is None
    elif expected["kind"] == "interactions":
        assert list(result) == expected["keys"]
        assert [i.reward for i in result.values()] == expected["rewards"]
    else:
        assert_same({k: result[k] for k in ("input_ids", "rewards")}, without_kind(expected))


def without_kind(expected: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in expected.items() if key != "kind"}


async def test_a_member_that_raises_leaves_its_siblings_their_outcomes() -> None:
    grouped = GroupedRolloutWorkflow(Members(MEMBERS["grouped_rollout/one_raises"]), 2)
    episodes = await grouped.run_members(ScriptedEngine([]), {}, task_id=0)
    assert [str(episode.status) for episode in episodes] == ["accepted", "failed"]
