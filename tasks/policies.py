"""How our tasks behave in Prefect, decided once.

No cache and no persisted results: the ledger is the memory, and Prefect's cache has given results
to the wrong episode. No Prefect retries either: the library retries each stage on its two budgets,
so that a run with and without Prefect behaves the same. Names are for people: `generate 17/3`.
"""

import functools
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE

P = ParamSpec("P")
R = TypeVar("R")
AsyncFunction = Callable[P, Coroutine[Any, Any, R]]

_started = Counter[str]()


def pipeline_task(task_run_name: str) -> Callable[[AsyncFunction[P, R]], AsyncFunction[P, R]]:
    """Make an async function a Prefect task that is awaited directly.

    Args:
        task_run_name: a format string over the function's arguments.
    """

    def decorate(fn: AsyncFunction[P, R]) -> AsyncFunction[P, R]:
        wrapped = task(
            task_run_name=task_run_name,
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=0,
            log_prints=False,
        )(fn)

        @functools.wraps(fn)
        async def call(*args: P.args, **kwargs: P.kwargs) -> R:
            _started["task runs"] += 1
            return await wrapped(*args, **kwargs)

        return call

    return decorate


def task_runs_started() -> int:
    """Task runs that this process has started: what the server should come to know of."""
    return _started["task runs"]
