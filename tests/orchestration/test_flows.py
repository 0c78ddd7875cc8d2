"""Campaigns through Prefect: what is shown, and that what is stored does not depend on it."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.states import Failed, exception_to_failed_state

from areal_pipe.campaign.config import CampaignConfig
from areal_pipe.storage.check import check_trial
from areal_pipe.storage.trial import open_trial
from flows.campaign import raise_outage
from tests.campaigns import roll_out
from tests.conftest import ROOT, Build
from tests.orchestration.conftest import Api, Run
from tests.services import SECRET_KEY, S3Server

pytestmark = pytest.mark.prefect

MEASURED = ("duration_seconds", "finished_at")
"""Columns that differ between two runs of one recipe."""


def unique_trial() -> str:
    return f"t-{uuid.uuid4().hex[:8]}"


def rows_of(config: CampaignConfig) -> list[dict[str, Any]]:
    """Stored rows without what was measured, in order."""
    [version] = open_trial(config.trial_url).versions
    rows = sorted(version.rows(), key=lambda r: (r["task_id"], r["sample_idx"]))
    return [
        {k: getattr(v, "tolist", lambda v=v: v)() for k, v in row.items() if k not in MEASURED}
        for row in rows
    ]


def assert_same_data(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Equal in everything; logprobs up to what the shape of a batch can move."""
    for row, other in zip(rows, others, strict=True):
        assert row.pop("logprobs") == pytest.approx(other.pop("logprobs"), abs=1e-5)
        assert row == other


def settled(api: Api, trial: str, expected: int) -> list[dict[str, Any]]:
    """Our task runs of a trial, once the recorder has them all, without those of child flows."""
    deadline = time.monotonic() + 60
    while True:
        runs = [r for r in api.task_runs(trial) if not r["name"].startswith("rollout-")]
        if len(runs) >= expected or time.monotonic() > deadline:
            return runs
        time.sleep(0.5)


@pytest.mark.parametrize(
    ("granularity", "names"),
    [
        ("stage", {"tokenize": 6, "generate": 12, "reward": 12, "pack": 12, "commit": 2}),
        ("episode", {"episode": 12, "commit": 2}),
        ("group", {"group": 6, "commit": 2}),
    ],
)
def test_granularity_changes_what_is_shown_and_not_what_is_stored(
    campaign_config: Build, tmp_path: Path, api: Api, run: Run, granularity: str,
    names: dict[str, int],
) -> None:  # fmt: skip
    sections: dict[str, Any] = {
        "engine": {"kind": "transformers", "script": None, "num_threads": 1,
                   "model": str(ROOT / "configs/models/tiny-arith")},
        "workflow": {"path": "areal_pipe.workflows.rlvr.RLVRWorkflow",
                     "kwargs": {"reward_fn": "tests.scenarios.failing_reward"}},
        "gconfig": {"max_new_tokens": 24, "seed": 5},
    }  # fmt: skip
    rows = [{"prompt": f"What is {n}+{n}?"} for n in range(10, 16)]
    plain = campaign_config(rows, fileroot=str(tmp_path / "plain"), **sections)
    roll_out(plain)
    trial = unique_trial()
    config = plain.model_copy(
        update={
            "trial_name": trial,
            "orchestration": plain.orchestration.model_copy(update={"granularity": granularity}),
        }
    )
    done = run(config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_data(rows_of(config), rows_of(plain))
    runs = settled(api, trial, sum(names.values()))
    assert Counter(r["name"].split()[0] for r in runs) == names
    assert {r["state_type"] for r in runs} == {"COMPLETED"}
    if granularity == "stage":
        assert "generate 3/1" in {r["name"] for r in runs}


def test_failed_episodes_fail_the_run_with_a_table_and_a_second_run_does_only_them(
    campaign_config: Build, tmp_path: Path, api: Api, run: Run
) -> None:
    trial, episodes, mended = unique_trial(), tmp_path / "episodes.log", tmp_path / "mended"
    rows = [{"number": n, "fail_samples": [1] if n in (2, 5) else []} for n in range(8)]
    config = campaign_config(rows, trial_name=trial)
    env = {"AREAL_PIPE_TEST_EPISODES": str(episodes), "AREAL_PIPE_TEST_MENDED": str(mended)}

    failed = run(config, **env)
    assert failed.returncode == 1
    states = {r["name"]: r["state"] for r in api.flow_runs("rollout", trial)}
    assert {s["type"] for s in states.values()} == {"FAILED"}
    assert states["shard 0"]["message"] == (
        "1 of 8 episodes failed: 1 LookupError; running again runs only these"
    )
    [campaign_run] = api.flow_runs("campaign", trial)
    assert campaign_run["state_type"] == "FAILED"
    assert "2 of 2 shards are not whole" in campaign_run["state"]["message"]
    [artifact] = api.artifacts(f"failed-exp-{trial}-rollout-0-0")
    [entry] = json.loads(artifact["data"])
    assert (entry["task_id"], entry["sample_idx"]) == (2, 1)
    assert (entry["error_class"], entry["message"]) == ("LookupError", "no luck with 2/1")
    before = Counter(episodes.read_text().split())
    assert before.total() == 16

    mended.touch()
    again = run(config, **env)
    assert again.returncode == 0, again.stdout + again.stderr
    assert Counter(episodes.read_text().split()) - before == Counter({"2/1": 1, "5/1": 1})
    assert list(check_trial(open_trial(config.trial_url))) == []
    assert len(rows_of(config)) == 16
    assert api.flow_runs("campaign", trial)[-1]["state_type"] == "COMPLETED"


@pytest.mark.parametrize(
    ("granularity", "shown"), [("episode", "episode 0/1"), ("group", "group 0")]
)
def test_what_failed_is_failed_in_the_ui(
    campaign_config: Build, api: Api, run: Run, granularity: str, shown: str
) -> None:
    trial = unique_trial()
    config = campaign_config(
        [{"number": 1, "fail_samples": [1]}, {"number": 2}],
        trial_name=trial,
        orchestration={"granularity": granularity},
    )
    assert run(config).returncode == 1
    runs = settled(api, trial, 6 if granularity == "episode" else 4)
    assert [r["name"] for r in runs if r["state_type"] == "FAILED"] == [shown]


async def test_whatever_a_flow_raised_is_the_campaigns_error() -> None:
    raised = await exception_to_failed_state(KeyError("nobody expected this"))
    with pytest.raises(KeyError, match="nobody expected this"):
        await raise_outage(raised)
    await raise_outage(Failed(message="2 episodes failed"))


def test_an_episode_without_stages_shows_its_model_calls_beneath_it(
    campaign_config: Build, api: Api, run: Run
) -> None:
    trial = unique_trial()
    config = campaign_config([{"number": 1}, {"number": 2}], trial_name=trial)
    assert run(config).returncode == 0
    runs = settled(api, trial, 9)
    names = Counter(r["name"] for r in runs)
    assert names == Counter(
        [f"{kind} {place}" for kind in ("episode", "generate")
         for place in ("0/0", "0/1", "1/0", "1/1")] + ["commit shard 0"]
    )  # fmt: skip


@pytest.mark.s3
def test_the_server_never_sees_the_secret(
    campaign_config: Build, api: Api, run: Run, s3: S3Server
) -> None:
    trial = unique_trial()
    config = campaign_config(
        [{"number": 1, "fail_samples": [0]}], trial_name=trial, fileroot="s3://traj/orchestrated"
    )
    done = run(
        config,
        f"cluster.s3.access_key_id={s3.options['key']}",
        f"cluster.s3.secret_access_key={SECRET_KEY}",
        f"cluster.s3.endpoint_url={s3.endpoint_url}",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    known = [
        api.flow_runs("campaign", trial),
        api.flow_runs("rollout", trial),
        api.task_runs(trial),
        api.post("artifacts/filter", {}),
        api.post("logs/filter", {"limit": 200}),
    ]
    assert "s3://traj/orchestrated" in str(known), "the parameters are there"
    assert SECRET_KEY not in str(known)
    assert SECRET_KEY not in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["campaign", "rollout"])
def test_flows_load_the_way_deployments_load_them(name: str, tmp_path: Path) -> None:
    script = (
        "from prefect.flows import load_flow_from_entrypoint\n"
        f"flow = load_flow_from_entrypoint('flows/{name}.py:{name}', use_placeholder_flow=False)\n"
        "print(flow.name, sorted(flow.parameters.properties))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    expected = ["config"] if name == "campaign" else ["config", "shard"]
    assert done.stdout == f"{name} {expected}\n", done.stderr


def test_a_store_that_breaks_is_the_runs_error_and_not_a_silent_end(
    campaign_config: Build, tmp_path: Path, run: Run
) -> None:
    config = campaign_config([{"number": 1}], trial_name=unique_trial())
    blocked = Path(config.trial_url) / "rollout/0"
    blocked.mkdir(parents=True)
    (blocked / "_ledger").write_text("a file where a folder must be")
    done = run(config)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "StorageError" in done.stderr
    assert "_ledger" in done.stderr


def test_a_server_that_is_not_there_is_named_with_the_ways_out(
    campaign_config: Build, run: Run
) -> None:
    done = run(campaign_config([{"number": 1}]), PREFECT_API_URL="http://127.0.0.1:9/api")
    assert done.returncode == 3
    assert "no Prefect server answers at http://127.0.0.1:9/api" in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_ends_a_run_like_ctrl_c(campaign_config: Build, tmp_path: Path, api: Api) -> None:
    episodes = tmp_path / "episodes.log"
    config = campaign_config(
        [{"number": n} for n in range(40)],
        trial_name=unique_trial(),
        engine={"latency_seconds": 0.3},
        rollout={"max_concurrent_rollouts": 2},
    )
    path = tmp_path / "campaign.yaml"
    path.write_text(yaml.safe_dump(config.storable()))
    running = subprocess.Popen(
        [sys.executable, "-m", "areal_pipe.cli", "run", str(path)],
        cwd=ROOT,
        env=os.environ
        | {"PREFECT_API_URL": api.server.api_url, "AREAL_PIPE_TEST_EPISODES": str(episodes)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (episodes.exists() and len(episodes.read_text().split()) > 8):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    told = time.monotonic()
    output, _ = running.communicate(timeout=30)
    assert time.monotonic() - told < 5
    assert running.returncode == 130, output
    assert "the same command goes on from here" in output
    assert "Traceback" not in output
