"""An engine whose generations someone watches, such as an orchestrator that shows each of them."""

from collections.abc import Awaitable, Callable
from typing import Any

from areal_pipe.contract.engine import InferenceEngine, ModelRequest, ModelResponse

Around = Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]
"""Awaits the given call, once, with something around it."""


class WatchedEngine:
    """Passes everything on to `engine`, and every `agenerate` through `around`."""

    def __init__(self, engine: InferenceEngine, around: Around) -> None:
        self._engine = engine
        self._around = around

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        answers: list[ModelResponse] = []

        async def call() -> None:
            answers.append(await self._engine.agenerate(req))

        await self._around(call)
        return answers[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


InferenceEngine.register(WatchedEngine)
