"""The base of all engines: everything of `InferenceEngine` but the generation itself."""

import threading
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from areal_pipe.contract.engine import InferenceEngine, ModelRequest, ModelResponse, ShouldAcceptFn
from areal_pipe.episodes.continuation import generate_until_done
from areal_pipe.rollout.executor import WorkflowExecutor
from areal_pipe.rollout.executor_config import ExecutorConfig

WorkflowKwargs = Mapping[str, Any] | None
Accept = ShouldAcceptFn | str | None


class RolloutEngine(InferenceEngine):
    """Runs workflows through a `WorkflowExecutor`; subclasses implement `generate_segment`."""

    logprobs_mode: str = "processed"
    """`processed`: log-probabilities of the distribution that was sampled from, after temperature
    and truncation; `raw`: those of the model's logits."""

    def __init__(self, executor_config: ExecutorConfig | None = None) -> None:
        self._executor_config = executor_config
        self._executor: WorkflowExecutor | None = None
        self._version = 0
        self._lock = threading.RLock()

    @abstractmethod
    async def generate_segment(self, req: ModelRequest) -> ModelResponse:
        """Continue `req.input_ids` by at most `req.gconfig.max_new_tokens` tokens.

        May end early with stop_reason `abort`; the rest is then asked for again. `output_versions`
        may be left empty: the version at the time of the request is filled in.
        """

    def context_length(self) -> int | None:
        """Tokens that prompt and completion may have together; None if it is not known.

        May be asked before `initialize`, and loads nothing.
        """
        return None

    def describe(self) -> dict[str, Any]:
        """What a dataset should remember of the engine that made it."""
        return {"engine": type(self).__name__, "logprobs_mode": self.logprobs_mode}

    @property
    def executor(self) -> WorkflowExecutor:
        """The background executor, started on first use."""
        with self._lock:
            if self._executor is None:
                self._executor = WorkflowExecutor(self, self._executor_config)
            return self._executor

    def initialize(self) -> None:
        """Nothing to load unless a subclass says so."""

    def destroy(self) -> None:
        if self._executor is not None:
            self._executor.destroy()
            self._executor = None

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        return await generate_until_done(req, self.generate_segment, self.get_version)

    def submit(
        self,
        data: Mapping[str, Any],
        workflow: Any,
        workflow_kwargs: WorkflowKwargs = None,
        should_accept_fn: Accept = None,
        group_size: int = 1,
        task_id: int | None = None,
        is_eval: bool = False,
    ) -> int:
        return self.executor.submit(
            data, workflow, workflow_kwargs, should_accept_fn, group_size, task_id, is_eval
        )

    def wait(
        self, count: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> list[dict[str, Any] | None]:
        return [o.result for o in self.executor.wait(count, timeout, raise_timeout)]

    def wait_for_task(
        self, task_id: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> dict[str, Any] | None:
        outcome = self.executor.wait_for_task(task_id, timeout, raise_timeout)
        return outcome.result if outcome else None

    def rollout_batch(
        self,
        data: Sequence[Mapping[str, Any]],
        workflow: Any,
        workflow_kwargs: WorkflowKwargs = None,
        should_accept_fn: Accept = None,
        group_size: int = 1,
    ) -> list[dict[str, Any] | None]:
        def submit(row: Mapping[str, Any]) -> int:
            return self.executor.submit(
                row, workflow, workflow_kwargs, should_accept_fn, group_size, is_bounded=False
            )

        return [o.result for o in self.executor.rollout_batch(data, submit)]

    def prepare_batch(
        self,
        dataloader: Iterable[Any],
        workflow: Any,
        workflow_kwargs: WorkflowKwargs = None,
        should_accept_fn: Accept = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
    ) -> list[dict[str, Any]]:
        def submit(row: Mapping[str, Any]) -> int:
            return self.submit(row, workflow, workflow_kwargs, should_accept_fn, group_size)

        outcomes = self.executor.prepare_batch(dataloader, submit, dynamic_bs=dynamic_bs)
        return [o.result for o in outcomes if o.result is not None]

    def pause(self) -> None:
        self.executor.pause()

    def resume(self) -> None:
        self.executor.resume()

    def set_version(self, version: int) -> None:
        with self._lock:
            self._version = version
        if self._executor is not None:
            self._executor.wake()

    def get_version(self) -> int:
        with self._lock:
            return self._version

    def export_stats(self) -> dict[str, float]:
        """`rollout/{status}` counts, and the mean `rollout/reward` with `rollout/reward__count`."""
        return self.executor.statistics.take()
