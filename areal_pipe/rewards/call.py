"""Calling a user's reward function: sync or async, with a time limit and retries."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from areal_pipe.contract.errors import RewardTimeout
from areal_pipe.rewards.pool import RewardPool, UnpicklableReward, default_pool, pickled_call
from areal_pipe.rewards.value import as_reward


class AsyncRewardWrapper:
    """An awaitable reward function that cannot hang its caller.

    A plain function runs in a killable process of the pool; an `async def` function runs in the
    caller's event loop (it should await, not compute).
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any],
        timeout_seconds: float = 15.0,
        max_workers: int | None = None,
        max_retries: int = 3,
        *,
        pool: RewardPool | None = None,
    ) -> None:
        """
        Args:
            timeout_seconds: limit for each attempt.
            max_workers: give this function a pool of its own, of that size; else the shared one.
            max_retries: further attempts after an exception, a crash or a timeout.
            pool: the pool to use.
        """
        if not callable(reward_fn):
            raise TypeError(f"a reward function must be callable, got {reward_fn!r}")
        if timeout_seconds <= 0 or max_retries < 0:
            raise ValueError(
                "timeout_seconds must be > 0 and max_retries >= 0, "
                f"got {timeout_seconds} and {max_retries}"
            )
        self._fn = reward_fn
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

    async def __call__(self, *args: Any, **kwargs: Any) -> float:
        """The reward.

        Raises:
            RewardError: a timeout, a crash, or something that is no number.
            Exception: what the function itself raised, after the last attempt.
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
        return await pool.call(self._fn, *args, timeout_seconds=self._timeout_seconds, **kwargs)

    async def _await(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        scope = asyncio.timeout(self._timeout_seconds)
        try:
            async with scope:
                return as_reward(await self._fn(*args, **kwargs))
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise RewardTimeout(
                f"the reward function must return within {self._timeout_seconds:g} s; it did not, "
                "and was cancelled; raise rollout.reward_timeout if it needs longer"
            ) from error


def _is_async(fn: Callable[..., Any]) -> bool:
    """An `async def` function, or an object whose call is one."""
    called: Any = getattr(fn, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(called)
