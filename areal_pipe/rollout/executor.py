"""Rollouts in the background: a thread with an asyncio loop, bounded by concurrency and staleness.

`submit` queues a prompt, the loop starts it when the staleness rule allows, `wait` hands out
results in the order of submission. A failed prompt is `failed`, with its exceptions in its outcome;
it never stops the loop, and a new weight version wakes it.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from areal_pipe.contract.engine import InferenceEngine, ShouldAcceptFn
from areal_pipe.contract.errors import WorkflowError
from areal_pipe.contract.trajectory import Episode, Status
from areal_pipe.contract.workflow import RolloutWorkflow
from areal_pipe.episodes import packing
from areal_pipe.episodes.episode import GroupRun
from areal_pipe.episodes.grouping import GroupedRolloutWorkflow
from areal_pipe.episodes.resolution import resolve_should_accept_fn, resolve_workflow
from areal_pipe.rollout.executor_config import ExecutorConfig
from areal_pipe.rollout.row_stream import RowStream
from areal_pipe.rollout.staleness import RolloutStat, StalenessManager
from areal_pipe.rollout.task_outcome import RolloutStatistics, TaskOutcome, refused
from areal_pipe.storage.task_dump import TaskDump

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class _Task:
    task_id: int
    order: int
    data: Mapping[str, Any]
    workflow: RolloutWorkflow
    should_accept: ShouldAcceptFn | None
    is_eval: bool
    is_bounded: bool
    """Whether the staleness rule applies: not where the caller waits for this very result."""


class WorkflowExecutor:
    """Runs workflows on an engine. All public methods may be called from any thread."""

    def __init__(self, engine: InferenceEngine, config: ExecutorConfig | None = None) -> None:
        self.config = config or ExecutorConfig()
        self._engine = engine
        self.staleness = StalenessManager(
            engine.get_version,
            max_concurrent_rollouts=self.config.max_concurrent_rollouts,
            consumer_batch_size=self.config.consumer_batch_size,
            max_staleness=self.config.max_head_offpolicyness,
        )
        self._dump = TaskDump(self.config.dump) if self.config.dump else None
        self._changed = threading.Condition()
        self._queued: deque[_Task] = deque()
        self._known: dict[int, int] = {}
        """Order of submission of every task that was not handed out yet."""
        self._finished: dict[int, TaskOutcome] = {}
        self.statistics = RolloutStatistics()
        self._running: set[asyncio.Task[None]] = set()
        self._expected_keys: dict[type, set[str]] = {}
        self._stream: RowStream | None = None
        """Where prepare_batch stopped in its dataloader."""
        self._closed = False
        self._ids, self._orders = count(), count()
        self._paused = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def submit(
        self,
        data: Mapping[str, Any],
        workflow: Any,
        workflow_kwargs: Mapping[str, Any] | None = None,
        should_accept_fn: ShouldAcceptFn | str | None = None,
        group_size: int = 1,
        task_id: int | None = None,
        is_eval: bool = False,
        *,
        is_bounded: bool = True,
    ) -> int:
        """See `InferenceEngine.submit`.

        Args:
            is_bounded: False: start as soon as concurrency allows, staleness or not.
        """
        resolved = resolve_workflow(workflow, workflow_kwargs, group_size)
        accept = resolve_should_accept_fn(should_accept_fn)
        with self._changed:
            self._check_open()
            task_id = self._free_id() if task_id is None else task_id
            if task_id in self._known:
                raise ValueError(
                    f"Duplicate task_id: {task_id}. Task with this ID is already submitted or "
                    "running; leave task_id out, or wait for the first one"
                )
            task = _Task(
                task_id=task_id,
                order=next(self._orders),
                data=data,
                workflow=resolved,
                should_accept=accept,
                is_eval=is_eval,
                is_bounded=is_bounded,
            )
            self._known[task_id] = task.order
            self._queued.append(task)
            if task.is_bounded:
                self.staleness.on_rollout_enqueued()
        self.wake()
        return task_id

    def _free_id(self) -> int:
        return next(i for i in self._ids if i not in self._known)

    def wake(self) -> None:
        """Look again at what may start: after a submission, a version bump, or resume."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._start_what_may_run)

    @property
    def thread_ident(self) -> int:
        """The thread of the loop, as `threading` and `sys` know it."""
        return self._thread.ident or 0

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the executor's loop, beside the rollouts."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def pause(self) -> None:
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        with self._changed:
            self._paused = False
        self.wake()

    def _start_what_may_run(self) -> None:
        while (task := self._next_task()) is not None:
            running = self._loop.create_task(self._run(task))
            self._running.add(running)
            running.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not self._loop.is_closed():
            self._start_what_may_run()

    def _next_task(self) -> _Task | None:
        """The first queued task that may start now."""
        with self._changed:
            if self._paused or len(self._running) >= self.config.max_concurrent_rollouts:
                return None
            may_start = self.staleness.get_capacity() > 0
            task = next((t for t in self._queued if may_start or not t.is_bounded), None)
            if task is not None:
                self._queued.remove(task)
                if task.is_bounded:
                    self.staleness.on_rollout_submitted()
            return task

    async def _run(self, task: _Task) -> None:
        try:
            outcome = await self._outcome_of(task)
            if self._dump is not None:
                await asyncio.to_thread(
                    self._dump.write,
                    outcome.episodes,
                    data=task.data,
                    is_eval=task.is_eval,
                    engine_version=self._engine.get_version(),
                )
        # The last boundary: without an outcome, whoever waits for the task waits for ever.
        except Exception as error:  # noqa: BLE001
            outcome = _failed(task, error, episodes=())
        self._finish(task, outcome)

    def _finish(self, task: _Task, outcome: TaskOutcome) -> None:
        with self._changed:
            if not task.is_bounded:
                pass  # the staleness rule never counted it
            elif outcome.status is Status.ACCEPTED:
                self.staleness.on_rollout_accepted()
            elif outcome.status is Status.FAILED:
                self.staleness.on_rollout_failed()
            else:
                self.staleness.on_rollout_rejected()
            self._finished[task.task_id] = outcome
            self.statistics.add(outcome)
            self._changed.notify_all()

    async def _outcome_of(self, task: _Task) -> TaskOutcome:
        episodes = await self._episodes_of(task)
        try:
            result, status, reason = self._judge(task, episodes)
        # The boundary for filters and merging: user code again.
        except Exception as error:  # noqa: BLE001
            return _failed(task, error, episodes=episodes)
        return TaskOutcome(
            task_id=task.task_id,
            data=task.data,
            status=status,
            result=result if status is Status.ACCEPTED else None,
            reason=reason,
            episodes=episodes if status is Status.ACCEPTED else refused(episodes, reason),
        )

    async def _episodes_of(self, task: _Task) -> list[Episode]:
        workflow, policy = task.workflow, self.config.policy
        if isinstance(workflow, GroupedRolloutWorkflow):
            return await workflow.run_members(
                self._engine, task.data, task_id=task.task_id, is_eval=task.is_eval, policy=policy
            )
        alone = GroupRun(
            workflow,
            self._engine,
            task.data,
            task_id=task.task_id,
            samples=(0,),
            is_eval=task.is_eval,
            policy=policy,
        )
        return await alone.run()

    def _judge(self, task: _Task, episodes: list[Episode]) -> tuple[Any, Status, str]:
        """(result, status, reason); raises what made the task fail."""
        if isinstance(task.workflow, GroupedRolloutWorkflow):
            result = task.workflow.merge(episodes)
        else:
            [episode] = episodes
            if episode.exception is not None:
                raise episode.exception
            result = episode.result
        if result is None:
            return None, Status.REJECTED, "rejected by the workflow or with its group"
        self._check_keys(task.workflow, result)
        if task.should_accept is not None and not task.should_accept(result):
            return None, Status.FILTERED, "should_accept_fn returned False"
        return result, Status.ACCEPTED, ""

    def _check_keys(self, workflow: RolloutWorkflow, result: dict[str, Any]) -> None:
        """Trajectories of one workflow keep the keys of its first one, or batching them fails."""
        inner = workflow.workflow if isinstance(workflow, GroupedRolloutWorkflow) else workflow
        if packing.is_interactions(result):
            return
        expected = self._expected_keys.setdefault(type(inner), set(result))
        packing.check_expected_keys(result, expected)

    def wait(
        self, count: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> list[TaskOutcome]:
        """The next `count` outcomes in order of submission.

        On timeout with `raise_timeout=False`, those that are finished. A timeout cancels nothing.

        Raises:
            ValueError: count < 1.
            TimeoutError: fewer finished in time; they stay collectable.
        """
        if count <= 0:
            raise ValueError(f"count must be positive, got {count}")
        with self._changed:
            enough = self._changed.wait_for(
                lambda: len(self._finished) >= count or self._closed, timeout
            )
            self._check_open()
            if not enough and raise_timeout:
                raise TimeoutError(
                    f"Timed out waiting for {count} results, only received {len(self._finished)}"
                )
            first = sorted(self._finished, key=self._known.__getitem__)[:count]
            return [self._hand_out(task_id) for task_id in first]

    def wait_for_task(
        self, task_id: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> TaskOutcome | None:
        """The outcome of one task; None on timeout with `raise_timeout=False`.

        Raises:
            ValueError: no such task, or it was handed out before.
            TimeoutError: it did not finish in time.
        """
        with self._changed:
            ended = True
            if task_id in self._known:
                ended = self._changed.wait_for(
                    lambda: task_id in self._finished or task_id not in self._known or self._closed,
                    timeout,
                )
            self._check_open()
            if task_id not in self._known:  # never was, or another thread was handed it
                raise ValueError(f"Task {task_id} is never submitted.")
            if ended:
                return self._hand_out(task_id)
        if raise_timeout:
            raise TimeoutError(f"Timed out waiting for task {task_id}")
        return None

    def _hand_out(self, task_id: int) -> TaskOutcome:
        del self._known[task_id]
        self._changed.notify_all()
        return self._finished.pop(task_id)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the executor was destroyed; its engine must be initialized anew")

    def rollout_batch(
        self, batch: Sequence[Mapping[str, Any]], submit: Callable[[Mapping[str, Any]], int]
    ) -> list[TaskOutcome]:
        """Run all prompts; outcome i belongs to `batch[i]`."""
        tasks = [submit(data) for data in batch]
        outcomes = [self.wait_for_task(task_id) for task_id in tasks]
        return [outcome for outcome in outcomes if outcome is not None]

    def prepare_batch(
        self,
        dataloader: Iterable[Any],
        submit: Callable[[Mapping[str, Any]], int],
        *,
        dynamic_bs: bool = False,
    ) -> list[TaskOutcome]:
        """One batch of accepted outcomes, drawing prompts as long as needed.

        Args:
            dataloader: yields rows or lists of rows, is iterated again at its end, and goes on
                where the last call stopped. Its `batch_size` is the number of results.
            submit: submits one row.
            dynamic_bs: stop after `batch_size` outcomes of any kind.

        Raises:
            WorkflowError: a whole pass over the data brought no accepted result.
        """
        if self._stream is None or self._stream.dataloader is not dataloader:
            self._stream = RowStream(dataloader)
        stream = self._stream
        size = stream.batch_size or self.config.consumer_batch_size
        accepted: list[TaskOutcome] = []
        seen = 0
        while len(accepted) < size and not (dynamic_bs and seen >= size):
            while self._outstanding() < self._wanted(size):
                submit(stream.next_row())
            [outcome] = self.wait(1)
            seen += 1
            if outcome.result is not None:
                accepted.append(outcome)
            elif not accepted and seen >= stream.rows_per_pass:
                raise WorkflowError(
                    f"{seen} prompts in a row brought no accepted result (the last one: "
                    f"{outcome.status}, {outcome.reason or outcome.error!r}); look at the workflow "
                    "and its filter before spending more"
                )
        return accepted

    def _outstanding(self) -> int:
        with self._changed:
            return len(self._known)

    def _wanted(self, batch_size: int) -> int:
        ahead = batch_size + self.config.max_concurrent_rollouts
        return max(batch_size, min(self.staleness.get_pending_limit(), ahead))

    def stats(self) -> RolloutStat:
        return self.staleness.get_stats()

    def destroy(self) -> None:
        """Cancel what runs, wake who waits (RuntimeError), and end the thread."""

        async def stop() -> None:
            for task in (running := list(self._running)):
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._queued.clear()
            self._changed.notify_all()
        self.run(stop()).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()


def _failed(task: _Task, error: BaseException, *, episodes: Sequence[Episode]) -> TaskOutcome:
    logger.warning("task %d failed: %s: %s", task.task_id, type(error).__name__, error)
    return TaskOutcome(
        task_id=task.task_id,
        data=task.data,
        status=Status.FAILED,
        error=error,
        episodes=refused(episodes, "its group failed"),
    )
