"""Calling reward functions in killable processes: retries, time limits, crashes."""

import inspect
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_pipe import AsyncRewardWrapper
from areal_pipe.rewards.pool import RewardPool
from tests.vectors import reward_functions
from tests.vectors.vector_data import Vector, load, outcome

OURS = {
    # AReaL gives 0 and leaves the hung worker in the pool, so that the retry never runs.
    "async_reward_wrapper/slow_retries1_1worker": {
        "ok": False,
        "error_type": "RewardTimeout",
        "error_message": "0.3 s, killed",
        "invocations": 2,
    },
    "async_reward_wrapper/crash": {
        "ok": False,
        "error_type": "RewardCrashed",
        "error_message": "process died",
        "invocations": 2,
    },
    # Sent by value.
    "async_reward_wrapper/unpicklable": {"ok": True, "result": 1.0, "invocations": 0},
    # What a function raises comes as text, in one error of ours.
    "async_reward_wrapper/raises_retries0": {
        "ok": False,
        "error_type": "RewardError",
        "error_message": "raised ValueError: bad",
        "invocations": 1,
    },
    # By default everything is tried max_retries + 1 times, then the error is raised.
    "async_reward_wrapper/defaults": {
        "ok": False,
        "error_type": "RewardError",
        "error_message": "raised ValueError: bad",
        "invocations": 4,
        "defaults": {"timeout_seconds": 15, "max_retries": 3},
    },
}
FUNCTIONS: dict[str, Callable[[str], float]] = {
    "async_reward_wrapper/raises_then_ok": reward_functions.raise_twice_then_give_one,
    "async_reward_wrapper/raises_retries0": reward_functions.raise_always,
    "async_reward_wrapper/slow_retries1_1worker": reward_functions.sleep_too_long,
    "async_reward_wrapper/crash": reward_functions.crash,
    "async_reward_wrapper/crash_then_ok": reward_functions.crash_once_then_give_one,
    "async_reward_wrapper/unpicklable": lambda calls: 1.0,
    "async_reward_wrapper/defaults": reward_functions.raise_always,
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    """One worker, as in every vector; shared, because what one call does must not harm the next."""
    pool = RewardPool(max_workers=1)
    yield pool
    pool.close()


@pytest.mark.parametrize("vector", load("async_reward_wrapper", OURS))
async def test_a_reward_function_is_called_as_the_vector_says(
    vector: Vector, pool: RewardPool, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    limits = {k: v for k, v in vector.input.items() if k in ("timeout_seconds", "max_retries")}
    wrapper = AsyncRewardWrapper(FUNCTIONS[vector.id], pool=pool, **limits)
    with outcome(vector.expected):
        assert await wrapper(str(calls)) == vector.expected["result"]
    assert reward_functions.count_calls(calls) == vector.expected["invocations"]
    assert defaults_of(AsyncRewardWrapper) >= vector.expected.get("defaults", {}).items()


@pytest.mark.parametrize("name", ["slow_retries1_1worker", "crash"])
async def test_a_function_that_hangs_or_dies_does_not_keep_its_only_worker(
    name: str, pool: RewardPool, tmp_path: Path
) -> None:
    bad = FUNCTIONS[f"async_reward_wrapper/{name}"]
    with pytest.raises(Exception, match="process"):
        await AsyncRewardWrapper(bad, 0.3, max_retries=0, pool=pool)(str(tmp_path / "bad"))
    started = time.perf_counter()
    good = AsyncRewardWrapper(reward_functions.give_one, max_retries=0, pool=pool)
    assert await good(str(tmp_path / "good")) == 1.0
    assert time.perf_counter() - started < 0.9  # the hung one would still sleep


def defaults_of(fn: Callable[..., Any]) -> Any:
    return {name: p.default for name, p in inspect.signature(fn).parameters.items()}.items()
