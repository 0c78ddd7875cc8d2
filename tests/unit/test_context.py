"""The workflow context belongs to one episode."""

import asyncio
import threading
from typing import Any

from areal_pipe.contract import workflow_context
from areal_pipe.contract.workflow import RolloutWorkflow
from areal_pipe.contract.workflow_context import WorkflowContext
from areal_pipe.engines.scripted import ScriptedEngine
from areal_pipe.episodes.grouping import GroupedRolloutWorkflow


class Reporting(RolloutWorkflow):
    """Reports the context it sees before and after the others had their turn, and in a thread."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
        before = workflow_context.get()
        await asyncio.sleep(0.01)
        in_thread = await asyncio.to_thread(workflow_context.get)
        self.seen.append((before, workflow_context.get(), in_thread, workflow_context.stat_scope()))


async def test_members_of_a_group_see_their_own_context() -> None:
    workflow = Reporting()
    grouped = GroupedRolloutWorkflow(workflow, 3)
    await grouped.run_members(ScriptedEngine([]), {}, task_id=7, is_eval=True)
    assert sorted(seen[0].sample_idx for seen in workflow.seen) == [0, 1, 2]
    for before, after, in_thread, scope in workflow.seen:
        assert before == after == in_thread
        assert (before.task_id, before.is_eval, scope) == (7, True, "eval-rollout")


def test_it_is_empty_outside_of_episodes_and_in_new_threads() -> None:
    seen: list[WorkflowContext] = []
    with workflow_context.within(WorkflowContext(task_id=1)):
        thread = threading.Thread(target=lambda: seen.append(workflow_context.get()))
        thread.start()
        thread.join()
    assert seen == [WorkflowContext()]
    assert workflow_context.get() == WorkflowContext()


def test_set_makes_a_context_current() -> None:
    async def run() -> int | None:
        workflow_context.set(WorkflowContext(task_id=5))
        return workflow_context.get().task_id

    assert asyncio.run(run()) == 5
    assert workflow_context.get().task_id is None
