"""areal_pipe: rollouts for LLM reinforcement learning.

Public names are imported on first use, so that `import areal_pipe` needs neither torch nor Prefect.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_pipe import workflow_context as workflow_context
    from areal_pipe.advantages import NormConfig as NormConfig
    from areal_pipe.advantages import group_advantages as group_advantages
    from areal_pipe.advantages import normalize as normalize
    from areal_pipe.collation import collate as collate
    from areal_pipe.engine import GenerationHyperparameters as GenerationHyperparameters
    from areal_pipe.engine import InferenceEngine as InferenceEngine
    from areal_pipe.engine import ModelRequest as ModelRequest
    from areal_pipe.engine import ModelResponse as ModelResponse
    from areal_pipe.engines.scripted import ScriptedEngine as ScriptedEngine
    from areal_pipe.engines.transformers_local import TransformersEngine as TransformersEngine
    from areal_pipe.executor import WorkflowExecutor as WorkflowExecutor
    from areal_pipe.executor_config import ExecutorConfig as ExecutorConfig
    from areal_pipe.grouping import GroupedRolloutWorkflow as GroupedRolloutWorkflow
    from areal_pipe.interaction import (
        InteractionWithTokenLogpReward as InteractionWithTokenLogpReward,
    )
    from areal_pipe.packing import check_trajectory_format as check_trajectory_format
    from areal_pipe.packing import concat_padded_tensors as concat_padded_tensors
    from areal_pipe.resolution import resolve_should_accept_fn as resolve_should_accept_fn
    from areal_pipe.resolution import resolve_workflow as resolve_workflow
    from areal_pipe.rewards.call import AsyncRewardWrapper as AsyncRewardWrapper
    from areal_pipe.rewards.overlong import overlong_penalty as overlong_penalty
    from areal_pipe.staleness import StalenessManager as StalenessManager
    from areal_pipe.workflow import RolloutWorkflow as RolloutWorkflow
    from areal_pipe.workflow import StagedWorkflow as StagedWorkflow
    from areal_pipe.workflows.multi_turn import MultiTurnWorkflow as MultiTurnWorkflow
    from areal_pipe.workflows.rlvr import RLVRWorkflow as RLVRWorkflow

_HOMES = {
    "AsyncRewardWrapper": "rewards.call",
    "ExecutorConfig": "executor_config",
    "GenerationHyperparameters": "engine",
    "GroupedRolloutWorkflow": "grouping",
    "InferenceEngine": "engine",
    "InteractionWithTokenLogpReward": "interaction",
    "ModelRequest": "engine",
    "ModelResponse": "engine",
    "MultiTurnWorkflow": "workflows.multi_turn",
    "NormConfig": "advantages",
    "RLVRWorkflow": "workflows.rlvr",
    "RolloutWorkflow": "workflow",
    "ScriptedEngine": "engines.scripted",
    "StagedWorkflow": "workflow",
    "StalenessManager": "staleness",
    "TransformersEngine": "engines.transformers_local",
    "WorkflowExecutor": "executor",
    "check_trajectory_format": "packing",
    "collate": "collation",
    "concat_padded_tensors": "packing",
    "group_advantages": "advantages",
    "normalize": "advantages",
    "overlong_penalty": "rewards.overlong",
    "resolve_should_accept_fn": "resolution",
    "resolve_workflow": "resolution",
}

__all__ = [  # noqa: PLE0604 - names, lazily imported
    *_HOMES,  # pyright: ignore[reportUnsupportedDunderAll]
    "workflow_context",
]


def __getattr__(name: str) -> Any:
    if name == "workflow_context":
        return importlib.import_module("areal_pipe.workflow_context")
    if name not in _HOMES:
        raise AttributeError(f"module 'areal_pipe' has no attribute {name!r}")
    return getattr(importlib.import_module(f"areal_pipe.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
