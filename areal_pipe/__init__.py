"""areal_pipe: rollouts for LLM reinforcement learning.

Public names are imported on first use, so that `import areal_pipe` needs neither torch nor Prefect.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_pipe.contract import workflow_context as workflow_context
    from areal_pipe.contract.engine import GenerationHyperparameters as GenerationHyperparameters
    from areal_pipe.contract.engine import InferenceEngine as InferenceEngine
    from areal_pipe.contract.engine import ModelRequest as ModelRequest
    from areal_pipe.contract.engine import ModelResponse as ModelResponse
    from areal_pipe.contract.errors import ArealPipeError as ArealPipeError
    from areal_pipe.contract.errors import EngineError as EngineError
    from areal_pipe.contract.errors import EngineUnavailable as EngineUnavailable
    from areal_pipe.contract.errors import InfrastructureError as InfrastructureError
    from areal_pipe.contract.errors import RequestError as RequestError
    from areal_pipe.contract.errors import RewardError as RewardError
    from areal_pipe.contract.errors import StorageError as StorageError
    from areal_pipe.contract.errors import TrajectoryError as TrajectoryError
    from areal_pipe.contract.errors import WorkflowError as WorkflowError
    from areal_pipe.contract.interaction import (
        InteractionWithTokenLogpReward as InteractionWithTokenLogpReward,
    )
    from areal_pipe.contract.workflow import RolloutWorkflow as RolloutWorkflow
    from areal_pipe.contract.workflow import StagedWorkflow as StagedWorkflow
    from areal_pipe.datasets.advantages import NormConfig as NormConfig
    from areal_pipe.datasets.advantages import group_advantages as group_advantages
    from areal_pipe.datasets.advantages import normalize as normalize
    from areal_pipe.datasets.collation import collate as collate
    from areal_pipe.engines.scripted import ScriptedEngine as ScriptedEngine
    from areal_pipe.engines.transformers_local import TransformersEngine as TransformersEngine
    from areal_pipe.episodes.grouping import GroupedRolloutWorkflow as GroupedRolloutWorkflow
    from areal_pipe.episodes.packing import check_trajectory_format as check_trajectory_format
    from areal_pipe.episodes.packing import concat_padded_tensors as concat_padded_tensors
    from areal_pipe.episodes.resolution import resolve_should_accept_fn as resolve_should_accept_fn
    from areal_pipe.episodes.resolution import resolve_workflow as resolve_workflow
    from areal_pipe.rewards.call import AsyncRewardWrapper as AsyncRewardWrapper
    from areal_pipe.rewards.overlong import overlong_penalty as overlong_penalty
    from areal_pipe.rollout.executor import WorkflowExecutor as WorkflowExecutor
    from areal_pipe.rollout.executor_config import ExecutorConfig as ExecutorConfig
    from areal_pipe.rollout.staleness import StalenessManager as StalenessManager
    from areal_pipe.workflows.multi_turn import MultiTurnWorkflow as MultiTurnWorkflow
    from areal_pipe.workflows.rlvr import RLVRWorkflow as RLVRWorkflow

_HOMES = {
    "ArealPipeError": "contract.errors",
    "AsyncRewardWrapper": "rewards.call",
    "EngineError": "contract.errors",
    "EngineUnavailable": "contract.errors",
    "ExecutorConfig": "rollout.executor_config",
    "GenerationHyperparameters": "contract.engine",
    "GroupedRolloutWorkflow": "episodes.grouping",
    "InferenceEngine": "contract.engine",
    "InfrastructureError": "contract.errors",
    "InteractionWithTokenLogpReward": "contract.interaction",
    "ModelRequest": "contract.engine",
    "ModelResponse": "contract.engine",
    "MultiTurnWorkflow": "workflows.multi_turn",
    "NormConfig": "datasets.advantages",
    "RLVRWorkflow": "workflows.rlvr",
    "RequestError": "contract.errors",
    "RewardError": "contract.errors",
    "RolloutWorkflow": "contract.workflow",
    "ScriptedEngine": "engines.scripted",
    "StagedWorkflow": "contract.workflow",
    "StalenessManager": "rollout.staleness",
    "StorageError": "contract.errors",
    "TrajectoryError": "contract.errors",
    "TransformersEngine": "engines.transformers_local",
    "WorkflowError": "contract.errors",
    "WorkflowExecutor": "rollout.executor",
    "check_trajectory_format": "episodes.packing",
    "collate": "datasets.collation",
    "concat_padded_tensors": "episodes.packing",
    "group_advantages": "datasets.advantages",
    "normalize": "datasets.advantages",
    "overlong_penalty": "rewards.overlong",
    "resolve_should_accept_fn": "episodes.resolution",
    "resolve_workflow": "episodes.resolution",
}

__all__ = [  # noqa: PLE0604 - names, lazily imported
    *_HOMES,  # pyright: ignore[reportUnsupportedDunderAll]
    "workflow_context",
]


def __getattr__(name: str) -> Any:
    if name == "workflow_context":
        return importlib.import_module("areal_pipe.contract.workflow_context")
    if name not in _HOMES:
        raise AttributeError(f"module 'areal_pipe' has no attribute {name!r}")
    return getattr(importlib.import_module(f"areal_pipe.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
