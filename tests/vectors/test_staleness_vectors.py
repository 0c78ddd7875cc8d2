"""How many prompts may run: capacities, sequences of events, and the bound of the paper."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from areal_pipe import StalenessManager
from tests.vectors.vector_data import Vector, load


class Run:
    """A staleness manager and the weight version it looks at."""

    def __init__(self, limits: dict[str, Any]) -> None:
        names = ("max_concurrent_rollouts", "consumer_batch_size", "max_staleness")
        self.version = limits.get("version", 0)
        self.manager = StalenessManager(
            lambda: self.version, **{name: limits[name] for name in names}
        )

    def start(self) -> None:
        self.manager.on_rollout_enqueued()
        self.manager.on_rollout_submitted()

    def accept(self) -> None:
        self.start()
        self.manager.on_rollout_accepted()

    def happen(self, event: str, number: int) -> None:
        if event in ("version", "recover"):
            self.version = number
        if event == "recover":
            self.manager.on_recover(number)
        callbacks: dict[str, Callable[[], None]] = {
            "enqueue": self.manager.on_rollout_enqueued,
            "submit": self.manager.on_rollout_submitted,
            "accept": self.manager.on_rollout_accepted,
            "reject": self.manager.on_rollout_rejected,
        }
        if event not in ("version", "recover"):
            repeat(callbacks[event], number)

    def observe(self) -> dict[str, int]:
        stats = self.manager.get_stats()
        return {
            "enqueued": stats.enqueued,
            "running": stats.running,
            "accepted": stats.accepted,
            "rejected": stats.rejected,
            "capacity": self.manager.get_capacity(),
        }


def repeat(call: Callable[[], None], times: int) -> None:
    for _ in range(times):
        call()


@pytest.mark.parametrize("vector", load("staleness_capacity"))
def test_the_capacity_is_what_the_vector_says(vector: Vector) -> None:
    run = Run(vector.input)
    repeat(run.accept, vector.input["accepted"])
    repeat(run.start, vector.input["running"])
    assert {
        "capacity": run.manager.get_capacity(),
        "pending_limit": run.manager.get_pending_limit(),
    } == vector.expected


@pytest.mark.parametrize("vector", load("staleness_events"))
def test_counts_and_capacity_follow_the_events_of_the_vector(vector: Vector) -> None:
    run = Run(vector.input)
    for (event, number), expected in zip(vector.input["events"], vector.expected, strict=True):
        run.happen(event, number)
        counts = {key: value for key, value in expected.items() if key != "after"}
        assert run.observe() == counts, expected["after"]


@pytest.mark.parametrize("vector", load("staleness_invariant"))
def test_another_prompt_may_start_exactly_while_the_bound_of_the_paper_holds(
    vector: Vector,
) -> None:
    assert vector.expected == "equivalent to accepted+running <= (version+eta+1)*B"
    for batch_size, eta, version, count in product((1, 2, 5), (0, 1, 3), (0, 2), range(1, 20)):
        limits = {"consumer_batch_size": batch_size, "max_staleness": eta, "version": version}
        run = Run(limits | {"max_concurrent_rollouts": 1000})
        repeat(run.accept, (count - 1) // 2)
        repeat(run.start, count - 1 - (count - 1) // 2)
        holds_after_one_more = math.floor((count - 1) / batch_size) <= version + eta
        assert (run.manager.get_capacity() >= 1) == holds_after_one_more
