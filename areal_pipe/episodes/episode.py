"""Running one episode: stages with retries and limits, and one boundary where errors end.

`EpisodeRun.settle` is the only place that turns an exception into an outcome (and `foreign` the one
through which user code is called). Everything above it (groups, the executor, the flows) sees
`Episode` records and never an exception of user code.
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
from areal_pipe.contract.errors import EngineUnavailable, StageTimeout
from areal_pipe.contract.outages import is_infrastructure
from areal_pipe.contract.trajectory import Episode, Status, Trajectory
from areal_pipe.contract.workflow import Draft, RolloutWorkflow, StagedWorkflow
from areal_pipe.contract.workflow_context import WorkflowContext
from areal_pipe.episodes import foreign, packing, prints
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
        owes_reward: bool = False,
    ) -> None:
        """
        Args:
            prompt: the tokenized prompt, where the workflow is staged and the group shares it; or
                the draft of an earlier run whose reward failed.
            owes_reward: the draft's last turn is generated and has to be scored.
        """
        self.workflow = workflow
        self.engine = cast(InferenceEngine, WatchedEngine(engine, self._in_time))
        self.context = context
        self._data = data
        self._draft = prompt
        self._owes_reward = owes_reward
        self._packed: Packed | None = None
        self._policy = policy
        self._stage = "episode"
        self._attempts = 1
        self._is_outage = False
        """Whether what is being waited for is the engine, or the end of an outage."""

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

    @property
    def owes_reward(self) -> bool:
        """Whether the last turn is generated, but not scored."""
        return self._owes_reward

    async def generate(self) -> None:
        """Append one turn."""
        self._draft = await self._retrying(
            "generate", lambda: self._staged.generate(self.engine, self.draft)
        )
        self._owes_reward = True

    async def reward(self) -> None:
        """Score the last turn."""
        self._draft = await self._retrying("reward", lambda: self._staged.reward(self.draft))
        self._owes_reward = False

    async def pack(self) -> None:
        """Turn the finished draft into the episode's result."""
        result = await self._retrying("pack", lambda: self._staged.pack(self.draft))
        draft = self.draft
        self._packed = foreign.called(lambda: Packed(result, draft.stop_reason, draft.seeds))

    async def whole(self) -> None:
        """Run `arun_episode` as one stage; every attempt gets its own copy of the data."""

        def attempt() -> Awaitable[Any]:
            return self.workflow.arun_episode(self.engine, _own_copy(self._data))

        result = await self._retrying("episode", attempt)
        self._packed = foreign.called(lambda: Packed(result))

    async def stages(self) -> None:
        """All stages in order; as a whole where the workflow has none."""
        if not self.is_staged:
            await self.whole()
            return
        if self._owes_reward:
            await self.reward()
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
        with workflow_context.within(self.context), prints.kept() as printed:
            try:
                if self._draft is not None:  # the group shares the prompt, not the data
                    own = foreign.called(lambda: _own_copy(self._data))
                    self._draft = replace(self._draft, data=own)
                await self._limited(body)
            # The boundary: user code may raise anything, and its siblings must not notice.
            except Exception as error:  # noqa: BLE001
                outcome = self._failed(error, printed.text)
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
        except asyncio.CancelledError:
            self._is_outage = True  # whoever ran out of patience was waiting for the engine
            raise
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
            kind = EngineUnavailable if self._is_outage else StageTimeout
            raise kind(
                f"an episode must end within {limit:g} s (rollout.episode_timeout); it was in "
                f"stage {self._stage}{', waiting for the engine' if self._is_outage else ''}"
            ) from error

    async def _retrying(self, stage: str, call: Callable[[], Awaitable[T]]) -> T:
        """Await one stage, again after failures as the two budgets allow."""
        self._stage, self._attempts = stage, 0
        outages, mistakes = self._policy.infrastructure_retries, self._policy.data_retries
        while True:
            self._attempts += 1
            try:
                return await foreign.awaited(call)
            except Exception as error:
                is_outage = is_infrastructure(error)
                if (outages if is_outage else mistakes) == 0:
                    raise
            if is_outage:
                outages -= 1
                self._is_outage = True
                await asyncio.sleep(self._policy.backoff(self._attempts))
                self._is_outage = False
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

    def _failed(self, error: Exception, output: str) -> Episode:
        failure = foreign.failure_of(
            error, stage=self._stage, attempts=self._attempts, output=output
        )
        return Episode(
            task_id=self.context.task_id or 0,
            sample_idx=self.context.sample_idx or 0,
            status=Status.FAILED,
            failure=failure,
            exception=error,
            draft=self._draft if self._stage in ("reward", "pack") else None,
            stop_reason=self._draft.stop_reason if self._draft else None,
            seeds=self._draft.seeds if self._draft else (),
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
        drafts: Mapping[int, Draft] | None = None,
    ) -> None:
        """
        Args:
            samples: sample indices to run: all of a new group, the missing ones of an open one.
            drafts: by sample index: what an earlier run generated and could not score.
        """
        self.workflow = workflow
        self.engine = engine
        self.data = data
        self.task_id = task_id
        self.samples = tuple(samples)
        self._is_eval = is_eval
        self._policy = policy or EpisodePolicy()
        self._prompt: Draft | None = None
        self._drafts = drafts if drafts and self.is_staged else {}

    @property
    def is_staged(self) -> bool:
        """Whether the workflow can be run stage by stage."""
        return isinstance(self.workflow, StagedWorkflow)

    async def tokenize(self) -> None:
        """Tokenize the prompt that the members share, where the workflow has stages."""
        if all(sample in self._drafts for sample in self.samples):
            return  # nobody needs it
        if isinstance(self.workflow, StagedWorkflow):
            workflow = self.workflow
            with workflow_context.within(self._context(self.samples[0])):
                self._prompt = await foreign.awaited(
                    lambda: workflow.tokenize(_own_copy(self.data))
                )

    async def tokenized(self, tokenize: Awaitable[None]) -> list[Episode]:
        """Await `tokenize`, however it is orchestrated; what it raises fails every member."""
        with prints.kept() as printed:
            try:
                await tokenize
            # Same boundary as EpisodeRun.settle, for the one stage that members share.
            except Exception as error:  # noqa: BLE001
                return [self._failed(sample, error, printed.text) for sample in self.samples]
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
                prompt=self._drafts.get(sample, self._prompt),
                owes_reward=sample in self._drafts and not self._drafts[sample].finished,
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

    def _failed(self, sample_idx: int, error: Exception, output: str) -> Episode:
        return Episode(
            task_id=self.task_id,
            sample_idx=sample_idx,
            status=Status.FAILED,
            failure=foreign.failure_of(error, stage="tokenize", output=output),
            exception=error,
        )


def _own_copy(data: Mapping[str, Any]) -> dict[str, Any]:
    """Members of a group never see each other's changes to the data."""
    return copy.deepcopy(dict(data))


def failed_to_store(episode: Episode, error: Exception) -> Episode:
    """An episode whose result cannot be stored has failed, whatever it was."""
    return Episode(
        task_id=episode.task_id,
        sample_idx=episode.sample_idx,
        status=Status.FAILED,
        failure=foreign.failure_of(error, stage="store"),
        exception=error,
        duration_seconds=episode.duration_seconds,
    )
