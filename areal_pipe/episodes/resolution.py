"""From what users write (an object, a class, an import string) to what runs."""

import inspect
import logging
from collections.abc import Mapping
from typing import Any, cast

from areal_pipe.contract.engine import InferenceEngine, ShouldAcceptFn
from areal_pipe.contract.workflow import RolloutWorkflow
from areal_pipe.episodes.grouping import GroupedRolloutWorkflow
from areal_pipe.episodes.import_string import import_from_string

logger = logging.getLogger(__name__)


class AgentWorkflow(RolloutWorkflow):
    """An agent object with `async def run(...)`, recorded through an OpenAI-compatible proxy."""

    def __init__(self, agent: Any, *, proxy_addr: str) -> None:
        if not callable(getattr(agent, "run", None)):
            raise TypeError(
                "Agent must have a callable 'run' method. Got agent of type "
                f"{type(agent).__name__} without a callable 'run' attribute."
            )
        if not inspect.iscoroutinefunction(agent.run):
            raise TypeError(
                "Agent's 'run' method must be an async function. "
                f"Got {type(agent).__name__}.run which is not a coroutine function."
            )
        self.agent = agent
        self.proxy_addr = proxy_addr

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        raise NotImplementedError(
            f"running an agent ({type(self.agent).__name__}) needs the recording proxy, which this "
            "release does not have; write it as a RolloutWorkflow with arun_episode"
        )


def resolve_workflow(
    workflow: Any,
    workflow_kwargs: Mapping[str, Any] | None = None,
    group_size: int = 1,
    proxy_addr: str | None = None,
) -> RolloutWorkflow:
    """The workflow to run.

    Args:
        workflow: a RolloutWorkflow (instance, class, or import string of either), or an agent with
            `async def run` (the same three ways).
        workflow_kwargs: constructor arguments; required for RolloutWorkflow classes.
        group_size: above 1, the workflow is wrapped in a GroupedRolloutWorkflow.
        proxy_addr: where agents find their OpenAI-compatible endpoint.

    Raises:
        ValueError: group_size < 1, an import string that does not resolve, missing kwargs or proxy.
        TypeError: neither a workflow nor an agent.
    """
    if group_size < 1:
        raise ValueError(f"group_size must be >= 1, got {group_size}")
    target = _import_workflow(workflow) if isinstance(workflow, str) else workflow
    if _is_rollout_workflow(target):
        resolved = _rollout_workflow(target, workflow, workflow_kwargs)
    else:
        resolved = _agent_workflow(target, workflow, workflow_kwargs, proxy_addr)
    return GroupedRolloutWorkflow(resolved, group_size) if group_size > 1 else resolved


def _import_workflow(path: str) -> Any:
    try:
        return import_from_string(path)
    except (ValueError, ImportError, AttributeError) as error:
        raise ValueError(f"Failed to import workflow from string {path!r}: {error}") from error


def _is_rollout_workflow(target: Any) -> bool:
    if isinstance(target, type):
        return issubclass(target, RolloutWorkflow)
    return isinstance(target, RolloutWorkflow)


def _rollout_workflow(
    target: Any, given: Any, workflow_kwargs: Mapping[str, Any] | None
) -> RolloutWorkflow:
    if not isinstance(target, type):
        _warn_ignored(given, workflow_kwargs)
        return target
    if workflow_kwargs is None:
        kind = "a class or string" if isinstance(given, str) else "a class"
        raise ValueError(
            f"workflow_kwargs is required when workflow is {kind}. "
            f"Got workflow={given}, but workflow_kwargs=None."
        )
    return cast(type[RolloutWorkflow], target)(**workflow_kwargs)


def _agent_workflow(
    target: Any, given: Any, workflow_kwargs: Mapping[str, Any] | None, proxy_addr: str | None
) -> AgentWorkflow:
    if proxy_addr is None:
        named = f" Got workflow={given!r}" if isinstance(given, str) else ""
        raise ValueError(
            "proxy_addr is required for agent workflows (non-RolloutWorkflow): the address of the "
            f"proxy that records their model calls.{named}"
        )
    if isinstance(target, type):
        return AgentWorkflow(target(**(workflow_kwargs or {})), proxy_addr=proxy_addr)
    _warn_ignored(given, workflow_kwargs)
    return AgentWorkflow(target, proxy_addr=proxy_addr)


def _warn_ignored(given: Any, workflow_kwargs: Mapping[str, Any] | None) -> None:
    if workflow_kwargs:
        how = "resolves to an instance" if isinstance(given, str) else "is already an instance"
        logger.warning("workflow_kwargs is ignored when workflow %s", how)


def resolve_should_accept_fn(fn: Any) -> ShouldAcceptFn | None:
    """A filter on results: a callable, the import string of one, or None.

    Raises:
        TypeError: anything else.
    """
    if fn is None or callable(fn):
        return cast(ShouldAcceptFn | None, fn)
    if not isinstance(fn, str):
        raise TypeError(
            f"Invalid should_accept_fn type: {type(fn)}. Expected callable or string module path."
        )
    imported = import_from_string(fn)
    if not callable(imported):
        raise TypeError(f"Imported object {imported!r} from {fn!r} is not callable")
    return cast(ShouldAcceptFn, imported)
