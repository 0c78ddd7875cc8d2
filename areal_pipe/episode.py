"""Running one episode: stages with retries and limits, and one boundary where errors end.

`EpisodeRun.settle` is the only place that turns an exception into an outcome. Everything above it
(groups, the executor, the flows) sees `Episode` records and never an exception of user code.
"""

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt
from tenacity.wait import wait_random_exponential

from areal_pipe import packing, workflow_context
from areal_pipe.engine import InferenceEngine
from areal_pipe.errors import EngineUnavailable, StageTimeout, is_infrastructure
from areal_pipe.trajectory import Episode, Failure, Status, Trajectory
from areal_pipe.workflow import Draft, RolloutWorkflow, StagedWorkflow
from areal_pipe.workflow_context import WorkflowContext

T = TypeVar("T")
RunMember = Callable[["EpisodeRun", Draft | None], Coroutine[Any, Any, Episode]]


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
        packing.check_trajectory_format(self.result)
        rows = () if self.result is None else packing.trajectories_of(self.result)
        object.__setattr__(self, "trajectories", tuple(rows))


class EpisodeRun:
    """One episode under way: who it is, what it runs on, and its stages.

    A plain object on purpose: Prefect walks into dataclasses that are passed to tasks.
    """

    def __init__(
        self,
        workflow: RolloutWorkflow,
        engine: InferenceEngine,
        data: Mapping[str, Any],
        *,
        context: WorkflowContext,
        policy: EpisodePolicy | None = None,
    ) -> None:
        self.workflow = workflow
        self.engine = engine
        self.context = context
        self._data = copy.deepcopy(dict(data))
        self._policy = policy or EpisodePolicy()
        self._stage = "episode"
        self._attempts = 1

    @property
    def label(self) -> str:
        """`task_id/sample_idx`, as people name it."""
        return f"{self.context.task_id}/{self.context.sample_idx}"

    async def tokenize(self) -> Draft:
        """The draft of this episode's prompt (staged workflows only)."""
        return await self._retrying("tokenize", lambda: self._staged.tokenize(self._data))

    async def generate(self, draft: Draft) -> Draft:
        return await self._retrying("generate", lambda: self._generate_in_time(draft))

    async def reward(self, draft: Draft) -> Draft:
        return await self._retrying("reward", lambda: self._staged.reward(draft))

    async def pack(self, draft: Draft) -> Packed:
        self._stage = "pack"
        result = await self._staged.pack(draft)
        return Packed(result, draft.stop_reason, draft.seeds)

    async def whole(self) -> Packed:
        """Run `arun_episode` as one stage."""
        data = lambda: copy.deepcopy(self._data)  # noqa: E731 - each attempt starts fresh
        result = await self._retrying(
            "episode", lambda: self.workflow.arun_episode(self.engine, data())
        )
        return Packed(result)

    async def in_stages(self, prompt: Draft | None = None) -> Packed:
        """Stage by stage, from a draft of the prompt that the group may share."""
        draft = self.own(prompt) if prompt else await self.tokenize()
        while not draft.finished:
            draft = await self.generate(draft)
            draft = await self.reward(draft)
        return await self.pack(draft)

    def own(self, prompt: Draft) -> Draft:
        """The shared draft with this member's own copy of the data."""
        return replace(prompt, data=self._data)

    async def run(self, prompt: Draft | None = None) -> Episode:
        """The outcome: in stages where the workflow has them, else as a whole."""
        staged = isinstance(self.workflow, StagedWorkflow)
        return await self.settle(self.in_stages(prompt) if staged else self.whole())

    async def settle(self, body: Awaitable[Packed]) -> Episode:
        """Await the episode's body and turn whatever happens into an outcome.

        Only cancellation passes through: a cancelled episode has no outcome and stays missing.
        """
        started = time.perf_counter()
        with workflow_context.within(self.context):
            try:
                packed = await self._limited(body)
            # The boundary: user code may raise anything, and its siblings must not notice.
            except Exception as error:  # noqa: BLE001
                outcome = self._failed(error)
            else:
                outcome = self._finished(packed)
        return replace(outcome, duration_seconds=time.perf_counter() - started)

    async def _generate_in_time(self, draft: Draft) -> Draft:
        limit = self._policy.request_timeout_seconds
        scope = asyncio.timeout(limit)
        try:
            async with scope:
                return await self._staged.generate(self.engine, draft)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise EngineUnavailable(
                f"a generation must end within {limit:g} s (rollout.request_timeout), it did not"
            ) from error

    @property
    def _staged(self) -> StagedWorkflow:
        return cast(StagedWorkflow, self.workflow)

    async def _limited(self, body: Awaitable[Packed]) -> Packed:
        limit = self._policy.episode_timeout_seconds
        scope = asyncio.timeout(limit)
        try:
            async with scope:
                return await body
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise StageTimeout(
                f"an episode must end within {limit:g} s; it was in stage {self._stage}"
            ) from error

    async def _retrying(self, stage: str, call: Callable[[], Awaitable[T]]) -> T:
        """Await one stage, again after failures as the budgets allow."""
        self._stage, self._attempts = stage, 0
        policy = self._policy

        async def attempt() -> T:
            self._attempts += 1
            return await call()

        outages = AsyncRetrying(
            retry=retry_if_exception(is_infrastructure),
            stop=stop_after_attempt(policy.infrastructure_retries + 1),
            wait=wait_random_exponential(policy.backoff_seconds, policy.max_backoff_seconds),
            reraise=True,
        )
        mistakes = AsyncRetrying(
            retry=retry_if_exception(lambda e: isinstance(e, Exception) and not is_infrastructure(e)),
            stop=stop_after_attempt(policy.data_retries + 1),
            reraise=True,
        )
        return await mistakes(outages, attempt)

    def _finished(self, packed: Packed) -> Episode:
        rejected = packed.result is None
        return Episode(
            **self._identity(),
            status=Status.REJECTED if rejected else Status.ACCEPTED,
            reason="the workflow returned None" if rejected else "",
            trajectories=packed.trajectories,
            result=packed.result,
            stop_reason=packed.stop_reason,
            seeds=packed.seeds,
        )

    def _failed(self, error: Exception) -> Episode:
        failure = Failure(
            stage=self._stage,
            error_class=type(error).__name__,
            message=str(error),
            attempts=self._attempts,
            infrastructure=is_infrastructure(error),
        )
        return Episode(**self._identity(), status=Status.FAILED, failure=failure, exception=error)

    def _identity(self) -> dict[str, int]:
        return {"task_id": self.context.task_id or 0, "sample_idx": self.context.sample_idx or 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRun:
    """The episodes of one prompt that are to be run now."""

    workflow: RolloutWorkflow
    engine: InferenceEngine
    data: Mapping[str, Any]
    task_id: int
    samples: tuple[int, ...]
    """Sample indices to run: all of a new group, the missing ones of an open one."""
    is_eval: bool = False
    policy: EpisodePolicy = field(default_factory=EpisodePolicy)

    def episode(self, sample_idx: int) -> EpisodeRun:
        """The run of one member, with data and context of its own."""
        context = WorkflowContext(
            is_eval=self.is_eval, task_id=self.task_id, sample_idx=sample_idx
        )
        return EpisodeRun(
            self.workflow, self.engine, self.data, context=context, policy=self.policy
        )

    async def tokenize(self) -> Draft | None:
        """The draft its members share, where the workflow has stages; None where it has not."""
        if not isinstance(self.workflow, StagedWorkflow):
            return None
        run = self.episode(self.samples[0])
        with workflow_context.within(run.context):
            return await run.tokenize()

    def failed(self, error: Exception, *, stage: str) -> list[Episode]:
        """Every member as failed: what broke concerns the whole group."""
        failure = Failure(
            stage=stage,
            error_class=type(error).__name__,
            message=str(error),
            infrastructure=is_infrastructure(error),
        )
        return [
            Episode(
                task_id=self.task_id,
                sample_idx=sample,
                status=Status.FAILED,
                failure=failure,
                exception=error,
            )
            for sample in self.samples
        ]

    async def run(self, run_member: RunMember | None = None) -> list[Episode]:
        """All members concurrently; outcome i belongs to `samples[i]`.

        Args:
            run_member: runs one member; `EpisodeRun.run` if None. What it raises ends the group.
        """
        try:
            prompt = await self.tokenize()
        # Same boundary as EpisodeRun.settle, for the one stage that members share.
        except Exception as error:  # noqa: BLE001
            return self.failed(error, stage="tokenize")
        run = run_member or EpisodeRun.run
        async with asyncio.TaskGroup() as members:
            running = [
                members.create_task(run(self.episode(sample), prompt)) for sample in self.samples
            ]
        return [task.result() for task in running]
