"""Engines that end with their test."""

from collections.abc import Iterator
from typing import Any

import pytest

from areal_pipe import ExecutorConfig, ScriptedEngine
from tests.vectors.vector_data import StartEngine


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    """Starts scripted engines: `start_engine(script, **executor_config)`."""
    started: list[ScriptedEngine] = []

    def start(script: Any, **config: Any) -> ScriptedEngine:
        started.append(ScriptedEngine(script, executor_config=ExecutorConfig(**config)))
        return started[-1]

    yield start
    for engine in started:
        engine.destroy()
