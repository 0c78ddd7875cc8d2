"""Calling a user's reward function: sync or async, with a time limit and retries."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, Literal

from areal_pipe.contract import workflow_context
from areal_pipe.contract.errors import RewardTimeout
from areal_pipe.episodes import foreign
from areal_pipe.episodes.import_string import import_from_string
from areal_pipe.episodes.seeding import derive_seed
from areal_pipe.rewards.pool import RewardPool, UnpicklableReward, default_pool, pickled_call
from areal_pipe.rewards.value import as_reward

Isolation = Literal["worker", "call"]


class AsyncRewardWrapper:
    """An awaitable reward function that cannot hang its caller.

    A plain function runs in a killable process of the pool; an `async def` function runs in the
    caller's event loop (it should await, not compute).
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        timeout_seconds: float = 15.0,
        max_workers: int | None = None,
        max_retries: int = 3,
        *,
        pool: RewardPool | None = None,
        isolation: Isolation = "worker",
    ) -> None:
        """
        Args:
            reward_fn: a function, a callable object, or the import string of one.
            timeout_seconds: limit for each attempt.
            max_workers: give this function a pool of its own, of that size; else the shared one.
            max_retries: further attempts after an exception, a crash or a timeout.
            pool: the pool to use.
            isolation: `worker`: processes stay warm, and what a call changes in them is put back;
                `call`: every call gets a process of its own, for rewards that are not trusted.
        """
        if isinstance(reward_fn, str):
            reward_fn = import_from_string(reward_fn)
        if not callable(reward_fn):
            raise TypeError(f"a reward function must be callable, got {reward_fn!r}")
        if timeout_seconds <= 0 or max_retries < 0:
            raise ValueError(
                "timeout_seconds must be > 0 and max_retries >= 0, "
                f"got {timeout_seconds} and {max_retries}"
            )
        if isolation not in ("worker", "call"):
            raise ValueError(f"isolation must be 'worker' or 'call', got {isolation!r}")
        self._fn: Callable[..., Any] = reward_fn
        self._own_process = isolation == "call"
        self._timeout_seconds = timeout_seconds
        self._attempts = max_retries + 1
        self._pool = pool or (RewardPool(max_workers) if max_workers else None)

    def check(self) -> None:
        """That the function can be sent to the pool's processes.

        Raises:
            UnpicklableReward: it cannot.
        """
        if not _is_async(self._fn):
            pickled_call(self._fn, (), {})

    async def __call__(self, /, *args: Any, **kwargs: Any) -> float:
        """The reward.

        Raises:
            RewardError: a timeout, a crash, something that is no number, or what the function
                raised in its process, after the last attempt.
            Exception: what an `async def` function raised.
        """
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._attempt(args, kwargs)
            except UnpicklableReward:
                raise
            except Exception:
                if attempt == self._attempts:
                    raise
        raise AssertionError("there is at least one attempt")

    async def _attempt(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        if _is_async(self._fn):
            return await self._await(args, kwargs)
        pool = self._pool or default_pool()
        return await pool.compute(
            pickled_call(self._fn, args, kwargs, seed=_episode_seed()),
            timeout_seconds=self._timeout_seconds,
            own_process=self._own_process,
        )

    async def _await(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        scope = asyncio.timeout(self._timeout_seconds)
        try:
            async with scope:
                return as_reward(await foreign.awaited(lambda: self._fn(*args, **kwargs)))
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise RewardTimeout(
                f"the reward function must return within {self._timeout_seconds:g} s; it did not, "
                "and was cancelled; raise rollout.reward_timeout if it needs longer"
            ) from error


def _episode_seed() -> int:
    """One for each episode, so that scoring it again gives the same."""
    context = workflow_context.get()
    return derive_seed(0, context.task_id or 0, context.sample_idx or 0, 0)


def _is_async(fn: Callable[..., Any]) -> bool:
    """An `async def` function, or an object whose call is one."""
    called: Any = getattr(fn, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(called)
