"""Closing groups is a pure function of outcomes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_pipe.contract.trajectory import Status
from areal_pipe.contract.workflow import RolloutWorkflow
from areal_pipe.engines.scripted import ScriptedEngine
from areal_pipe.episodes.grouping import (
    GroupedRolloutWorkflow,
    GroupPolicy,
    GroupState,
    close_group,
)

A, R, F = Status.ACCEPTED, Status.REJECTED, Status.FAILED


@pytest.mark.parametrize(
    ("statuses", "policy", "state"),
    [
        ([A, A], {}, GroupState.ACCEPTED),
        ([A, R], {}, GroupState.ACCEPTED),
        ([R, R], {}, GroupState.REJECTED),
        ([A, F], {}, GroupState.OPEN),
        ([A, F], {"on_failed_member": "keep"}, GroupState.ACCEPTED),
        ([A, F], {"on_failed_member": "drop_group"}, GroupState.REJECTED),
        ([F, F], {"on_failed_member": "keep"}, GroupState.REJECTED),
        ([A, R], {"min_group_size": 2}, GroupState.REJECTED),
        ([A], {}, GroupState.OPEN),
    ],
)
def test_a_group_is_closed_by_its_members_outcomes(
    statuses: list[Status], policy: dict[str, Any], state: GroupState
) -> None:
    verdict = close_group(dict(enumerate(statuses)), GroupPolicy(group_size=2, **policy))
    assert verdict.state is state
    assert bool(verdict.reason) == (state is not GroupState.ACCEPTED)


@given(
    st.permutations(list(enumerate([A, R, F, A, R]))),
    st.sampled_from(["retry", "keep", "drop_group"]),
)
def test_the_order_of_finishing_does_not_matter(
    members: list[tuple[int, Status]], on_failed: Any
) -> None:
    policy = GroupPolicy(group_size=5, on_failed_member=on_failed)
    in_order = close_group(dict(sorted(members)), policy)
    assert close_group(dict(members), policy) == in_order


@pytest.mark.parametrize("sizes", [{"group_size": 0}, {"group_size": 2, "min_group_size": 3}])
def test_sizes_that_make_no_sense_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="group_size"):
        GroupPolicy(**sizes)


class Mutating(RolloutWorkflow):
    """Changes the data it is given."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        data["seen"].append(1)
        return None if len(data["seen"]) == 1 else {}


async def test_members_get_copies_of_the_data_of_their_own() -> None:
    data: dict[str, Any] = {"seen": []}
    workflow = GroupedRolloutWorkflow(Mutating(), 4)
    assert await workflow.arun_episode(ScriptedEngine([]), data) is None
    assert data == {"seen": []}
