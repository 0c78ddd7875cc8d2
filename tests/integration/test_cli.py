"""The command line, as a user types it (without Prefect)."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_pipe.campaign.config import CampaignConfig
from tests.conftest import ROOT, Build
from tests.services import SECRET_KEY, S3Server

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "areal_pipe.cli", *map(str, arguments)]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs `areal-pipe` in the checkout and returns what it printed."""

    def run(*arguments: object, **env: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command(*arguments),
            cwd=ROOT,
            env=os.environ | {"COLUMNS": "200", "HOME": str(tmp_path)} | env,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    return run


def write(config: CampaignConfig, tmp_path: Path) -> Path:
    path = tmp_path / "campaign.yaml"
    path.write_text(yaml.safe_dump(config.storable()))
    return path


def test_a_campaign_from_run_to_stats(cli: Cli, campaign_config: Build, tmp_path: Path) -> None:
    config = campaign_config([{"number": n} for n in range(12)])
    path = write(config, tmp_path)
    first = cli("run", path, "--no-prefect")
    assert first.returncode == 0, first.stderr
    for expected in ("24 accepted", "12 accepted (12 mixed)", "mean reward", "pass@1", "pass@2",
                     "tokens per second", "areal-pipe show"):  # fmt: skip
        assert expected in first.stdout
    again = cli("run", path, "--no-prefect")
    assert again.returncode == 0
    assert "Everything is committed" in again.stdout
    checked = cli("check", config.trial_url)
    assert (checked.returncode, "sound" in checked.stdout) == (0, True)
    stats = cli("stats", config.trial_url)
    for expected in ("pass@2", "generated tokens", "stop reasons", "versions: 0: 24", "reward"):
        assert expected in stats.stdout
    shown = cli("show", config.trial_url, "--task-id", 3, "--sample", 1)
    for expected in ("episode 3/1", "accepted", "1.0", "0 for 2 tokens"):
        assert expected in shown.stdout


def test_failed_episodes_are_listed_and_exit_1(
    cli: Cli, campaign_config: Build, tmp_path: Path
) -> None:
    config = campaign_config([{"number": 1}, {"number": 2, "fail_samples": [0]}])
    failed = cli("run", write(config, tmp_path), "--no-prefect")
    assert failed.returncode == 1
    for expected in ("1 episodes failed", "1/0", "LookupError", "no luck with 1/0", "run again"):
        assert expected in failed.stdout


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["rollout.grup_size=3"], 2, "did you mean 'group_size'?"),
        (["dataset.path=none.jsonl"], 2, "does not exist"),
        (["workflow.path=tests.scenarios.Nope"], 2, "has no attribute 'Nope'"),
        (["workflow.path=tests.scenarios.is_mended"], 2, "workflow"),
        (["workflow.kwargs={x: 1}"], 2, "takes no arguments"),
        (["engine.script=tests.nowhere.script"], 2, "engine.script"),
        (["cluster.fileroot=/proc/x"], 3, "/proc/x"),
    ],
)
def test_bad_input_is_a_message_and_an_exit_code(
    cli: Cli, campaign_config: Build, tmp_path: Path, overrides: list[str], code: int, message: str
) -> None:
    path = write(campaign_config([{"number": 1}]), tmp_path)
    done = cli("run", path, *overrides, "--no-prefect")
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_finds_what_is_wrong_and_writes_nothing(
    cli: Cli, campaign_config: Build, tmp_path: Path
) -> None:
    config = campaign_config([{"number": 1}])
    path = write(config, tmp_path)
    healthy = cli("doctor", path)
    assert healthy.returncode == 0, healthy.stdout
    assert not list(Path(config.trial_url).glob("*"))
    sick = cli("doctor", path, "workflow.path=tests.scenarios.Nope", "dataset.limit=1")
    assert sick.returncode == 2
    assert "✗ workflow" in sick.stdout


def test_check_of_a_damaged_store_exits_1_with_a_list(
    cli: Cli, campaign_config: Build, tmp_path: Path
) -> None:
    config = campaign_config([{"number": 1}])
    cli("run", write(config, tmp_path), "--no-prefect")
    (Path(config.trial_url) / "rollout/0/part-00000.parquet").unlink()
    done = cli("check", config.trial_url)
    assert done.returncode == 1
    assert "does not exist" in done.stdout


def test_reading_a_place_without_a_campaign_says_what_to_give(cli: Cli, tmp_path: Path) -> None:
    done = cli("stats", tmp_path)
    assert done.returncode == 3
    assert "{fileroot}/{experiment}/{trial}" in done.stderr


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_is_finished_and_says_how_to_go_on(
    campaign_config: Build, tmp_path: Path, cli: Cli, sign: signal.Signals
) -> None:
    episodes = tmp_path / "episodes.log"
    config = campaign_config(
        [{"number": n} for n in range(60)],
        engine={"latency_seconds": 0.2},
        rollout={"max_concurrent_rollouts": 2},
    )
    path = write(config, tmp_path)
    running = subprocess.Popen(
        command("run", path, "--no-prefect"),
        cwd=ROOT,
        env=os.environ | {"AREAL_PIPE_TEST_EPISODES": str(episodes)},
        stdout=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (episodes.exists() and len(episodes.read_text().split()) > 20):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(sign)
    told = time.monotonic()
    output, _ = running.communicate(timeout=30)
    assert time.monotonic() - told < 5
    assert running.returncode == 130
    assert "the same command goes on from here" in output

    started_before = len(episodes.read_text().split())
    finished = cli("run", path, "engine.latency_seconds=0", "--no-prefect",
                   AREAL_PIPE_TEST_EPISODES=str(episodes))  # fmt: skip
    assert finished.returncode == 0
    repeated = len(episodes.read_text().split()) - 120
    assert 0 <= repeated <= 2 * 2, "at most what was in flight ran again"
    assert started_before < 120
    assert "sound" in cli("check", config.trial_url).stdout


@pytest.mark.s3
def test_the_secret_of_s3_is_written_nowhere(
    cli: Cli, campaign_config: Build, tmp_path: Path, s3: S3Server
) -> None:
    config = campaign_config([{"number": 1}], fileroot="s3://traj/cli-secret")
    path = write(config, tmp_path)
    done = cli("run", path, "--no-prefect", **s3.env)
    assert done.returncode == 0, done.stderr
    everything = [done.stdout, done.stderr]
    for arguments in (("check",), ("stats",), ("show",)):
        read = cli(*arguments, config.trial_url, **s3.env)
        assert read.returncode == 0, read.stderr
        everything += [read.stdout, read.stderr]
    refused = cli("stats", config.trial_url, **(s3.env | {"AWS_SECRET_ACCESS_KEY": "sk-wrong"}))
    assert refused.returncode == 3
    assert "refused" in refused.stderr
    everything += [refused.stdout, refused.stderr]
    import s3fs

    fs = s3fs.S3FileSystem(**s3.options)
    everything += [str(fs.cat_file(key)) for key in fs.find("traj/cli-secret")]
    assert not any(SECRET_KEY in text or "sk-wrong" in text for text in everything)


def test_a_trajectory_traced_from_dataset_to_both_files(
    cli: Cli, campaign_config: Build, tmp_path: Path
) -> None:
    config = campaign_config([{"number": 41}], rollout={"version": 3})
    cli("run", write(config, tmp_path), "--no-prefect")
    folder = Path(config.trial_url) / "rollout/3"
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (folder / "0.jsonl").read_text().splitlines()
    ]
    assert [line["sample_idx"] for line in lines] == [0, 1]
    line = lines[1]
    assert line["input_ids"] == [41, 42, 2]
    assert line["loss_mask"] == [0, 1, 1]
    assert line["logprobs"] == [0.0, -0.5, -0.5]
    assert line["version_rle"] == [[3, 2]]
    assert (line["head_version"], line["tail_version"]) == (3, 3)
    assert (line["seqlen"], line["prompt_len"], line["reward"]) == (3, 1, 1.0)


def test_an_unfinished_commit_is_finished_without_an_engine_or_a_server(
    cli: Cli, campaign_config: Build, tmp_path: Path
) -> None:
    config = campaign_config([{"number": 1}])
    path = write(config, tmp_path)
    cli("run", path, "--no-prefect")
    manifest = Path(config.trial_url) / "rollout/0/_manifest/00000.json"
    manifest.write_text(manifest.read_text().replace('"undumped": []', '"undumped": [0]'))
    (manifest.parents[1] / "0.jsonl").unlink()
    done = cli("run", path)
    assert done.returncode == 0, done.stderr
    assert "finishing the commit" in done.stdout
    assert "Prefect" not in done.stdout
    assert (manifest.parents[1] / "0.jsonl").is_file()
