"""Running one episode: stages with retries and limits, and one boundary where errors end.

`EpisodeRun.settle` is the only place that turns an exception into an outcome. Everything above it
(groups, the executor, the flows) sees `Episode` records and never an exception of user code.
"""

import asyncio
import copy
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from areal_pipe.contract import workflow_context
from areal_pipe.contract.engine import InferenceEngine
from areal_pipe.contract.errors import (
    EngineUnavailable,
    StageTimeout,
    WorkflowError,
    is_infrastructure,
)
from areal_pipe.contract.trajectory import Episode, Failure, Status, Trajectory
from areal_pipe.contract.workflow import Draft, RolloutWorkflow, StagedWorkflow
from areal_pipe.contract.workflow_context import WorkflowContext
from areal_pipe.episodes import packing
from areal_pipe.episodes.tracebacks import user_traceback
from areal_pipe.episodes.watched import WatchedEngine

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePolicy:
    """Limits and retry budgets of one episode. Two classes of failure, two budgets."""

    infrastructure_retries: int = 5
    """Further attempts after an outage, with exponential backoff and jitter."""
    data_retries: int = 0
    """Further attempts after any other exception: bad data and bad code fail at once."""
    backoff_seconds: float = 0.5
    """First pause after an outage; it doubles, with jitter, up to `max_backoff_seconds`."""
    max_backoff_seconds: float = 30.0
    request_timeout_seconds: float | None = None
    """Limit on one generation stage; exceeding it counts as an outage."""
    episode_timeout_seconds: float | None = None
    """Limit on the whole episode, waiting and retries included."""

    def backoff(self, attempts: int) -> float:
        """Seconds to wait after so many attempts: exponential, with full jitter."""
        longest = self.backoff_seconds * 2 ** min(attempts - 1, 30)
        return random.uniform(0, min(longest, self.max_backoff_seconds))


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """What a workflow returned, validated."""

    result: Any
    """As it came; None: rejected."""
    stop_reason: str | None = None
    seeds: tuple[int, ...] = ()
    trajectories: tuple[Trajectory, ...] = field(init=False)

    def __post_init__(self) -> None:
        # Validation is never off: what breaks the contract is a failed episode.
        rows = () if self.result is None else packing.trajectories_of(self.result)
        object.__setattr__(self, "trajectories", tuple(rows))


class EpisodeRun:
    """One episode under way: who it is, what it runs on, and its stages in order.

    The state stays in here and the stages take no arguments, so that an orchestrator can wrap each
    in a task without moving tokens around.
    """

    def __init__(
        self,
        workflow: RolloutWorkflow,
        engine: InferenceEngine,
        data: Mapping[str, Any],
        *,
        context: WorkflowContext,
        policy: EpisodePolicy,
        prompt: Draft | None = None,
    ) -> None:
        """
        Args:
            prompt: the tokenized prompt, where the workflow is staged and the group shares it.
        """
        self.workflow = workflow
        self.engine = cast(InferenceEngine, WatchedEngine(engine, self._in_time))
        self.context = context
        self._data = data
        self._draft = prompt
        self._packed: Packed | None = None
        self._policy = policy
        self._stage = "episode"
        self._attempts = 1

    @property
    def label(self) -> str:
        """`task_id/sample_idx`, as people name it."""
        return f"{self.context.task_id}/{self.context.sample_idx}"

    @property
    def draft(self) -> Draft:
        """Tokens so far. Only staged episodes have one, from their prompt on."""
        assert self._draft is not None
        return self._draft

    @property
    def is_staged(self) -> bool:
        """Whether it can be run stage by stage."""
        return self._draft is not None

    async def generate(self) -> None:
        """Append one turn."""
        self._draft = await self._retrying(
            "generate", lambda: self._staged.generate(self.engine, self.draft)
        )

    async def reward(self) -> None:
        """Score the last turn."""
        self._draft = await self._retrying("reward", lambda: self._staged.reward(self.draft))

    async def pack(self) -> None:
        """Turn the finished draft into the episode's result."""
        result = await self._retrying("pack", lambda: self._staged.pack(self.draft))
        self._packed = Packed(result, self.draft.stop_reason, self.draft.seeds)

    async def whole(self) -> None:
        """Run `arun_episode` as one stage; every attempt gets its own copy of the data."""

        def attempt() -> Awaitable[Any]:
            return self.workflow.arun_episode(self.engine, _own_copy(self._data))

        self._packed = Packed(await self._retrying("episode", attempt))

    async def stages(self) -> None:
        """All stages in order; as a whole where the workflow has none."""
        if not self.is_staged:
            await self.whole()
            return
        while not self.draft.finished:
            await self.generate()
            await self.reward()
        await self.pack()

    async def run(self) -> Episode:
        """The outcome."""
        return await self.settle(self.stages())

    async def settle(self, body: Awaitable[None]) -> Episode:
        """Await the stages, however they are orchestrated, and turn what happens into an outcome.

        Only a cancellation of this very task passes through: a cancelled episode has no outcome
        and stays missing.
        """
        started = time.perf_counter()
        with workflow_context.within(self.context):
            try:
                if self._draft is not None:  # the group shares the prompt, not the data
                    self._draft = replace(self._draft, data=_own_copy(self._data))
                await self._limited(body)
            # The boundary: user code may raise anything, and its siblings must not notice.
            except (Exception, SystemExit, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                    raise
                outcome = self._failed(_as_exception(error))
            else:
                outcome = self._finished()
        return replace(outcome, duration_seconds=time.perf_counter() - started)

    async def _in_time(self, generate: Callable[[], Awaitable[None]]) -> None:
        """Await one model call, whoever makes it, within its limit."""
        limit = self._policy.request_timeout_seconds
        scope = asyncio.timeout(limit)
        try:
            async with scope:
                await generate()
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise EngineUnavailable(
                f"a generation must end within {limit:g} s (rollout.request_timeout), it did not"
            ) from error

    @property
    def _staged(self) -> StagedWorkflow:
        return cast(StagedWorkflow, self.workflow)

    async def _limited(self, body: Awaitable[None]) -> None:
        limit = self._policy.episode_timeout_seconds
        scope = asyncio.timeout(limit)
        try:
            async with scope:
                await body
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise StageTimeout(
                f"an episode must end within {limit:g} s (rollout.episode_timeout); it was in "
                f"stage {self._stage}"
            ) from error

    async def _retrying(self, stage: str, call: Callable[[], Awaitable[T]]) -> T:
        """Await one stage, again after failures as the two budgets allow."""
        self._stage, self._attempts = stage, 0
        outages, mistakes = self._policy.infrastructure_retries, self._policy.data_retries
        while True:
            self._attempts += 1
            try:
                return await call()
            except Exception as error:
                is_outage = is_infrastructure(error)
                if (outages if is_outage else mistakes) == 0:
                    raise
            if is_outage:
                outages -= 1
                await asyncio.sleep(self._policy.backoff(self._attempts))
            else:
                mistakes -= 1

    def _finished(self) -> Episode:
        packed = self._packed
        assert packed is not None
        rejected = packed.result is None
        return Episode(
            task_id=self.context.task_id or 0,
            sample_idx=self.context.sample_idx or 0,
            status=Status.REJECTED if rejected else Status.ACCEPTED,
            reason="the workflow returned None" if rejected else "",
            trajectories=packed.trajectories,
            result=packed.result,
            stop_reason=packed.stop_reason,
            seeds=packed.seeds,
        )

    def _failed(self, error: Exception) -> Episode:
        failure = _failure_of(error, stage=self._stage, attempts=self._attempts)
        return Episode(
            task_id=self.context.task_id or 0,
            sample_idx=self.context.sample_idx or 0,
            status=Status.FAILED,
            failure=failure,
            exception=error,
        )


class GroupRun:
    """The episodes of one prompt that are to be run now."""

    def __init__(
        self,
        workflow: RolloutWorkflow,
        engine: InferenceEngine,
        data: Mapping[str, Any],
        *,
        task_id: int,
        samples: Sequence[int],
        is_eval: bool = False,
        policy: EpisodePolicy | None = None,
    ) -> None:
        """
        Args:
            samples: sample indices to run: all of a new group, the missing ones of an open one.
        """
        self.workflow = workflow
        self.engine = engine
        self.data = data
        self.task_id = task_id
        self.samples = tuple(samples)
        self._is_eval = is_eval
        self._policy = policy or EpisodePolicy()
        self._prompt: Draft | None = None

    @property
    def is_staged(self) -> bool:
        """Whether the workflow can be run stage by stage."""
        return isinstance(self.workflow, StagedWorkflow)

    async def tokenize(self) -> None:
        """Tokenize the prompt that the members share, where the workflow has stages."""
        if isinstance(self.workflow, StagedWorkflow):
            with workflow_context.within(self._context(self.samples[0])):
                self._prompt = await self.workflow.tokenize(_own_copy(self.data))

    async def tokenized(self, tokenize: Awaitable[None]) -> list[Episode]:
        """Await `tokenize`, however it is orchestrated; what it raises fails every member."""
        try:
            await tokenize
        # Same boundary as EpisodeRun.settle, for the one stage that members share.
        except Exception as error:  # noqa: BLE001
            return [self._failed(sample, error) for sample in self.samples]
        return []

    def members(self) -> list[EpisodeRun]:
        """The runs of the members, each with data and context of its own."""
        return [
            EpisodeRun(
                self.workflow,
                self.engine,
                self.data,
                context=self._context(sample),
                policy=self._policy,
                prompt=self._prompt,
            )
            for sample in self.samples
        ]

    async def run(self) -> list[Episode]:
        """All members concurrently; outcome i belongs to `samples[i]`. Raises only cancellation."""
        if failed := await self.tokenized(self.tokenize()):
            return failed
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(member.run()) for member in self.members()]
        return [task.result() for task in tasks]

    def _context(self, sample_idx: int) -> WorkflowContext:
        return WorkflowContext(is_eval=self._is_eval, task_id=self.task_id, sample_idx=sample_idx)

    def _failed(self, sample_idx: int, error: Exception) -> Episode:
        return Episode(
            task_id=self.task_id,
            sample_idx=sample_idx,
            status=Status.FAILED,
            failure=_failure_of(error, stage="tokenize"),
            exception=error,
        )


def _own_copy(data: Mapping[str, Any]) -> dict[str, Any]:
    """Members of a group never see each other's changes to the data."""
    return copy.deepcopy(dict(data))


def _is_cancelled() -> bool:
    """Whether this task was told to end, as opposed to user code letting something escape."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def failed_to_store(episode: Episode, error: Exception) -> Episode:
    """An episode whose result cannot be stored has failed, whatever it was."""
    return Episode(
        task_id=episode.task_id,
        sample_idx=episode.sample_idx,
        status=Status.FAILED,
        failure=_failure_of(error, stage="store"),
        exception=error,
        duration_seconds=episode.duration_seconds,
    )


def _as_exception(error: BaseException) -> Exception:
    """What would end the caller's task or process, raised by user code, is an error like others."""
    if isinstance(error, Exception):
        return error
    wrapped = WorkflowError(f"a workflow must not let {type(error).__name__} escape: {error}")
    wrapped.__cause__ = error
    return wrapped


def _failure_of(error: Exception, *, stage: str, attempts: int = 1) -> Failure:
    return Failure(
        stage=stage,
        error_class=type(error).__name__,
        message=str(error),
        attempts=attempts,
        infrastructure=is_infrastructure(error),
        traceback=user_traceback(error),
    )
