"""Which episode the running code belongs to, carried by a context variable.

A context variable is copied into every asyncio task and every `asyncio.to_thread` call, and starts
empty in a new thread: concurrent members of a group never see each other's context.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowContext:
    """Identity of the running episode."""

    is_eval: bool = False
    task_id: int | None = None
    sample_idx: int | None = None


_current: ContextVar[WorkflowContext] = ContextVar("areal_pipe_workflow_context")


def get() -> WorkflowContext:
    """The context of the running episode; an empty one outside of episodes."""
    return _current.get(WorkflowContext())


def set(context: WorkflowContext) -> None:  # noqa: A001 - AReaL's name
    """Make `context` current for this asyncio task (or thread) and what it starts from here on."""
    _current.set(context)


def stat_scope() -> str:
    """Prefix for statistics and storage: `rollout`, or `eval-rollout` for evaluation episodes."""
    return "eval-rollout" if get().is_eval else "rollout"


@contextmanager
def within(context: WorkflowContext) -> Generator[None]:
    """Make `context` current inside a `with` block."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
