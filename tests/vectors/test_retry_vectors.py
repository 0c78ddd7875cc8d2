"""Requests that fail, and requests that belong together.

Observed on AReaL's HTTP client. Here an episode's budget does the retrying, whatever the engine,
and `infrastructure_retries=n` means n further attempts: 3 attempts of theirs are 2 retries of ours.
"""

import re
from typing import Any

import pytest

from areal_pipe import GenerationHyperparameters, ModelRequest, ModelResponse, ScriptedEngine
from areal_pipe.contract.errors import EngineUnavailable, RequestError
from areal_pipe.contract.trajectory import Episode, Status
from areal_pipe.contract.workflow import RolloutWorkflow
from areal_pipe.contract.workflow_context import WorkflowContext
from areal_pipe.episodes.episode import EpisodePolicy, EpisodeRun
from tests.vectors.vector_data import Vector, load


class Asking(RolloutWorkflow):
    """Asks the engine once, then rejects."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
        await engine.agenerate(ModelRequest(input_ids=[1]))


def policy_of(vector: Vector) -> EpisodePolicy:
    """As many attempts as the vector's client makes, with pauses fit for a test."""
    return EpisodePolicy(
        infrastructure_retries=vector.input["request_retries"] - 1, backoff_seconds=0.001
    )


async def episode_on(engine: ScriptedEngine, policy: EpisodePolicy) -> Episode:
    context = WorkflowContext(task_id=0, sample_idx=0)
    return await EpisodeRun(Asking(), engine, {}, context=context, policy=policy).run()


@pytest.mark.parametrize("vector", load("http_retry"))
async def test_an_outage_is_tried_as_often_as_the_vector_says(vector: Vector) -> None:
    retries = vector.input["request_retries"]
    assert vector.expected.startswith(f"{retries} attempts total")
    outages = [EngineUnavailable(f"503, attempt {i + 1}") for i in range(retries)]

    over_in_time = ScriptedEngine([*outages[1:], [2]])
    assert (await episode_on(over_in_time, policy_of(vector))).status is Status.REJECTED

    lasting = ScriptedEngine(outages)
    episode = await episode_on(lasting, policy_of(vector))
    assert len(lasting.requests) == retries
    assert isinstance(episode.exception, RuntimeError)
    assert episode.failure is not None
    assert (episode.failure.attempts, episode.failure.infrastructure) == (retries, True)
    assert episode.failure.message == f"503, attempt {retries}"


@pytest.mark.parametrize("vector", load("http_retry"))
async def test_a_request_that_is_wrong_is_not_sent_again_as_the_vectors_client_would(
    vector: Vector,
) -> None:
    assert "incl. 4xx" in vector.expected
    engine = ScriptedEngine([RequestError("400: prompt too long"), [2]])
    episode = await episode_on(engine, policy_of(vector))
    assert len(engine.requests) == 1
    assert episode.failure is not None
    assert (episode.failure.error_class, episode.failure.attempts) == ("RequestError", 1)


@pytest.mark.parametrize("vector", load("http_retry"))
def test_pauses_grow_where_the_vectors_are_constant(vector: Vector) -> None:
    policy = EpisodePolicy(backoff_seconds=vector.input["delay_s"], max_backoff_seconds=4.0)
    for attempts, longest in ((1, 1.0), (2, 2.0), (3, 4.0), (50, 4.0)):
        pauses = [policy.backoff(attempts) for _ in range(200)]
        assert 0 <= min(pauses) < max(pauses) <= longest * vector.input["delay_s"]
        assert max(pauses) > longest * vector.input["delay_s"] / 2


@pytest.mark.parametrize("vector", load("rid_affinity"))
async def test_segments_of_one_generation_carry_one_request_id_to_keep_their_server(
    vector: Vector,
) -> None:
    assert vector.expected.startswith("same rid => same server")
    [cached] = map(int, re.findall(r"cache of (\d+)", vector.input))

    def one_token(req: ModelRequest) -> ModelResponse:
        return ModelResponse(output_tokens=[5], output_logprobs=[-0.5], stop_reason="abort")

    engine = ScriptedEngine(one_token)
    gconfig = GenerationHyperparameters(max_new_tokens=cached + 1)
    asked = [ModelRequest(input_ids=[1], gconfig=gconfig) for _ in range(2)]
    for request in asked:
        await engine.agenerate(request)
    sent = [request.rid for request in engine.requests]
    assert sent == [request.rid for request in asked for _ in range(cached + 1)]
    assert asked[0].rid != asked[1].rid
