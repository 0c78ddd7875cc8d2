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
from areal_pipe.episodes import foreign, packing
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
_LOOK_SECONDS = 1.0
"""How often a wait looks whether anything can still end it."""


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
        self._known: dict[int, _Task] = {}
        """Every task that was not handed out yet."""
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
        self._thread = threading.Thread(target=self._run_loop, name="rollouts", daemon=True)
        self._thread.start()

    def _run_loop(self) -> None:
        while True:
            try:
                self._loop.run_forever()
                return
            # A task that user code started may raise what asyncio lets end the loop, such as
            # SystemExit. Who awaits that task gets it; everybody else goes on.
            except BaseException as error:  # noqa: BLE001
                logger.error("a task of user code raised %s", type(error).__name__)

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
            self._known[task_id] = task
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
            if self._known.get(task.task_id) is task:  # else nobody waits for it any more
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
            is_eval=task.is_eval,
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
        accept = task.should_accept
        if accept is not None and not foreign.called(lambda: bool(accept(result))):
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
            return [self._hand_out(task_id) for task_id in self._in_order(self._finished)[:count]]

    def _in_order(self, task_ids: Iterable[int]) -> list[int]:
        """By submission."""
        return sorted(task_ids, key=lambda task_id: self._known[task_id].order)

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
        return self._take(task_id)[1]

    def _take(self, task_id: int) -> tuple[_Task, TaskOutcome]:
        self._changed.notify_all()
        return self._known.pop(task_id), self._finished.pop(task_id)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the executor was destroyed; its engine must be initialized anew")

    def rollout_batch(
        self, batch: Sequence[Mapping[str, Any]], submit: Callable[[Mapping[str, Any]], int]
    ) -> list[TaskOutcome]:
        """Run all prompts; outcome i belongs to `batch[i]`."""
        tasks: list[int] = []
        try:
            for data in batch:
                tasks.append(submit(data))  # noqa: PERF401 - what was submitted must be known
            outcomes = [self.wait_for_task(task_id) for task_id in tasks]
        except BaseException:
            self._abandon(tasks)
            raise
        return [outcome for outcome in outcomes if outcome is not None]

    def _abandon(self, task_ids: Iterable[int]) -> None:
        """Forget tasks whose caller is gone: their results must not reach the next one."""
        with self._changed:
            for task_id in task_ids:
                task = self._known.pop(task_id, None)
                self._finished.pop(task_id, None)
                if task in self._queued:
                    self._queued.remove(task)
                    if task.is_bounded:
                        self.staleness.on_rollout_dequeued()

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
            WorkflowError: a whole pass over the data brought no accepted result, the staleness
                bound allows fewer results than the batch has, or the data cannot be taken apart.
        """
        if self._stream is None or self._stream.dataloader is not dataloader:
            self._stream = RowStream(dataloader)
        accepted: list[tuple[_Task, TaskOutcome]] = []
        try:
            self._fill(accepted, self._stream, submit, dynamic_bs=dynamic_bs)
        except BaseException:
            self._stream = None  # a generator that has raised is over
            self._take_back(accepted)
            raise
        return [outcome for _, outcome in accepted]

    def _take_back(self, taken: Iterable[tuple[_Task, TaskOutcome]]) -> None:
        """Make outcomes collectable again: their batch was never handed out."""
        with self._changed:
            for task, outcome in taken:
                if task.task_id not in self._known:
                    self._known[task.task_id] = task
                    self._finished[task.task_id] = outcome

    def _fill(
        self,
        accepted: list[tuple[_Task, TaskOutcome]],
        stream: RowStream,
        submit: Callable[[Mapping[str, Any]], int],
        *,
        dynamic_bs: bool,
    ) -> None:
        size = stream.batch_size or self.config.consumer_batch_size
        seen = 0
        while len(accepted) < size and not (dynamic_bs and seen >= size):
            while self._outstanding() < self._wanted(size):
                submit(stream.next_row())
            task, outcome = self._next_for_training()
            seen += 1
            if outcome.result is not None:
                accepted.append((task, outcome))
            elif not accepted and seen >= stream.rows_per_pass:
                raise WorkflowError(
                    f"{seen} prompts in a row brought no accepted result (the last one: "
                    f"{outcome.status}, {outcome.reason or outcome.error!r}); look at the workflow "
                    "and its filter before spending more"
                )

    def _next_for_training(self) -> tuple[_Task, TaskOutcome]:
        """The next outcome that is not of an evaluation.

        Raises:
            WorkflowError: there can be none before the weights have a new version.
        """
        with self._changed:
            while True:
                self._check_open()
                if ready := [t for t, o in self._finished.items() if not o.is_eval]:
                    return self._take(self._in_order(ready)[0])
                self._check_that_something_may_come()
                self._changed.wait(_LOOK_SECONDS)

    def _check_that_something_may_come(self) -> None:
        under_way = any(not t.is_eval and t not in self._queued for t in self._known.values())
        if under_way or self._paused or self.staleness.get_capacity() > 0:
            return
        raise WorkflowError(
            "the batch can never be filled: max_head_offpolicyness="
            f"{self.config.max_head_offpolicyness} and consumer_batch_size="
            f"{self.config.consumer_batch_size} allow no further result at version "
            f"{self._engine.get_version()}, and prepare_batch is not done; set consumer_batch_size "
            "to the dataloader's batch_size, or call set_version after each batch"
        )

    def _outstanding(self) -> int:
        """Prompts for training that are queued, running or finished."""
        with self._changed:
            return sum(not task.is_eval for task in self._known.values())

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
    message = foreign.message_of(error)
    logger.warning("task %d failed: %s: %s", task.task_id, type(error).__name__, message)
    return TaskOutcome(
        task_id=task.task_id,
        data=task.data,
        status=Status.FAILED,
        is_eval=task.is_eval,
        error=error,
        episodes=refused(episodes, "its group failed"),
    )
