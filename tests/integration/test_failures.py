"""What failed is told, kept and run again; an outage is never a success."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from areal_pipe import EngineUnavailable, ModelRequest
from areal_pipe.campaign.summary import summarize
from areal_pipe.cli.tables import print_summary
from areal_pipe.storage.check import check_trial
from areal_pipe.storage.ledger import read_ledger
from tests.campaigns import roll_out, trial_of, version_of
from tests.conftest import ROOT, Build
from tests.scenarios import count_up, is_mended

MODEL = str(ROOT / "configs/models/tiny-arith")


@pytest.fixture
def mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Touch this path, and what fails on demand stops failing."""
    monkeypatch.setenv("AREAL_PIPE_TEST_MENDED", str(tmp_path / "mended"))
    return tmp_path / "mended"


@pytest.fixture
def requests_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the scripted engine logs every request."""
    monkeypatch.setenv("AREAL_PIPE_TEST_REQUESTS", str(tmp_path / "requests"))
    return tmp_path / "requests"


def down_until_mended(req: ModelRequest) -> list[int]:
    """A script: the server is away."""
    if not is_mended():
        raise EngineUnavailable("connection refused")
    return count_up(req)


def printing_reward(*args: Any, **data: Any) -> float:
    """A reward that says much and fails with markup in its message."""
    print("looked at", data["number"])
    raise ValueError("no closing [/x] tag")


def rlvr(reward: str) -> dict[str, Any]:
    return {
        "path": "areal_pipe.workflows.rlvr.RLVRWorkflow",
        "kwargs": {"reward_fn": reward},
    }


@pytest.mark.parametrize("policy", ["keep", "drop_group"])
def test_an_outage_is_never_given_up(campaign_config: Build, mend: Path, policy: str) -> None:
    config = campaign_config(
        [{"number": 1}, {"number": 2}],
        engine={"script": "tests.integration.test_failures.down_until_mended"},
        rollout={"on_failed_member": policy, "infrastructure_retries": 0},
    )
    roll_out(config)
    summary = summarize(version_of(config))
    assert summary.open_groups == 2
    assert not summary.is_whole
    assert all(f.infrastructure for f in summary.failures)
    mend.touch()
    roll_out(config)
    assert summarize(version_of(config)).episodes == {"accepted": 4}


def test_groups_given_up_are_named(campaign_config: Build) -> None:
    rows = [{"number": 1}, {"number": 2, "fail_samples": [0]}]
    config = campaign_config(rows, rollout={"on_failed_member": "drop_group"})
    roll_out(config)
    summary = summarize(version_of(config))
    assert summary.given_up == (1,)
    assert "1 groups with failed members (on_failed_member): 1" in printed(config)


def printed(config: Any, *, verbose: bool = False) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    print_summary(console, config.trial_url, summarize(version_of(config)), verbose=verbose)
    return console.export_text()


@pytest.mark.parametrize("timeout", [False, True])
def test_a_failed_reward_never_resamples(
    campaign_config: Build, mend: Path, requests_log: Path, timeout: bool
) -> None:
    rows = [{"number": n, "kind": "mul1", "prompt": "What is 1+2?"} for n in range(3)]
    reward = "hanging_until_mended" if timeout else "failing_reward"
    config = campaign_config(
        rows,
        workflow=rlvr(f"tests.scenarios.{reward}"),
        gconfig={"seed": 1},
        rollout={"tokenizer_path": MODEL, "reward_timeout": 0.5},
    )
    campaign = roll_out(config)
    assert summarize(version_of(config)).open_groups == 3
    drafts = {
        (r["task_id"], r["sample_idx"]): r
        for _, found in read_ledger(campaign.store, campaign.keys, 0)
        for r in found
    }
    assert len(drafts) == 6
    assert all(r["status"] == "failed" and r["completion"] for r in drafts.values())
    requests = requests_log.read_text()

    mend.touch()
    roll_out(config)
    assert requests_log.read_text() == requests, "nothing was generated again"
    assert summarize(version_of(config)).episodes == {"accepted": 6}
    for row in version_of(config).rows():
        draft = drafts[row["task_id"], row["sample_idx"]]
        assert row["input_ids"].tolist() == draft["input_ids"].tolist()
        assert row["seeds"] == draft["seeds"]
        assert row["reward"] == 1.0
        assert row["draft"] is None
    assert list(check_trial(trial_of(config))) == []


def test_a_failure_is_stored_with_all_that_is_known_of_it(campaign_config: Build) -> None:
    config = campaign_config(
        [{"number": 7, "prompt": "What is 1+2?"}],
        workflow=rlvr("tests.integration.test_failures.printing_reward"),
        rollout={"tokenizer_path": MODEL, "on_failed_member": "keep"},
    )
    roll_out(config)
    for row in version_of(config).rows():
        assert row["error_class"] == "ValueError"
        assert row["error_stage"] == "reward"
        assert row["error_message"] == "no closing [/x] tag"
        assert "in printing_reward" in row["error_traceback"]
        assert row["error_output"] == "looked at 7\n"
        assert row["attempts"] == 1
        assert row["duration_seconds"] > 0
        assert "1+2" in row["prompt"]
        assert row["completion"]


def test_rewards_can_have_a_process_each(campaign_config: Build) -> None:
    config = campaign_config(
        [{"number": n, "prompt": "What is 1+2?"} for n in range(3)],
        workflow=rlvr("tests.scenarios.own_pid_reward"),
        rollout={"tokenizer_path": MODEL, "reward_isolation": "call"},
    )
    roll_out(config)
    assert len({row["reward"] for row in version_of(config).rows()}) == 6


def test_the_text_of_a_failure_reaches_the_terminal_as_it_is(campaign_config: Build) -> None:
    config = campaign_config(
        [{"number": 7, "prompt": "What is 1+2?"}],
        workflow=rlvr("tests.integration.test_failures.printing_reward"),
        rollout={"tokenizer_path": MODEL},
    )
    roll_out(config)
    assert "no closing [/x] tag" in printed(config)
    assert "looked at 7" not in printed(config)
    assert "looked at 7" in printed(config, verbose=True)
    assert "in printing_reward" in printed(config, verbose=True)
