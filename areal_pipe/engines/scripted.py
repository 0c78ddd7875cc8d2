"""A fake engine that says what it is told to: for our tests and for yours."""

import asyncio
import inspect
import itertools
import threading
from collections.abc import Awaitable, Callable, Sequence

from areal_pipe.contract.engine import ModelRequest, ModelResponse
from areal_pipe.contract.errors import EngineError
from areal_pipe.rollout.executor_config import ExecutorConfig
from areal_pipe.rollout.rollout_engine import RolloutEngine

Scripted = Sequence[int] | ModelResponse | BaseException
"""Tokens (logprob -0.5 each, stop_reason `stop`), a whole response, or an exception to raise."""
Script = Sequence[Scripted] | Callable[[ModelRequest], Scripted | Awaitable[Scripted]]


class ScriptedEngine(RolloutEngine):
    """Answers from a list, in the order of requests, or from a function of the request.

    A function makes it deterministic under concurrency. `requests` records what was asked, in
    order.
    """

    def __init__(
        self,
        script: Script,
        *,
        latency_seconds: float = 0.0,
        keep_requests: bool = True,
        executor_config: ExecutorConfig | None = None,
    ) -> None:
        """
        Args:
            script: answers.
            latency_seconds: how long each answer takes.
            keep_requests: False: do not grow `requests`, for long campaigns.
        """
        super().__init__(executor_config)
        self._script = script
        self._latency_seconds = latency_seconds
        self._keep_requests = keep_requests
        self._count = itertools.count()
        self._lock = threading.Lock()
        self.requests: list[ModelRequest] = []

    async def generate_segment(self, req: ModelRequest) -> ModelResponse:
        with self._lock:
            position = next(self._count)
            if self._keep_requests:
                self.requests.append(req.copy())
        if self._latency_seconds:
            await asyncio.sleep(self._latency_seconds)
        return _response(await self._answer(req, position), req)

    async def _answer(self, req: ModelRequest, position: int) -> Scripted:
        if callable(self._script):
            answer = self._script(req)
            return await answer if inspect.isawaitable(answer) else answer
        if position >= len(self._script):
            raise EngineError(
                f"the script holds {len(self._script)} answers, request {position + 1} came"
            )
        return self._script[position]


def _response(answer: Scripted, req: ModelRequest) -> ModelResponse:
    if isinstance(answer, BaseException):
        raise answer
    if isinstance(answer, ModelResponse):
        return answer
    tokens = list(answer)
    return ModelResponse(
        input_tokens=list(req.input_ids),
        output_tokens=tokens,
        output_logprobs=[-0.5] * len(tokens),
        stop_reason="stop",
        tokenizer=req.tokenizer,
    )
