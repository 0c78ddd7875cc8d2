"""The demo as a newcomer runs it: its own Prefect server, a real model, real rewards."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_pipe.storage.check import check_trial
from areal_pipe.storage.rows import trajectory_of
from areal_pipe.storage.trial import open_trial
from tests.conftest import ROOT

pytestmark = [pytest.mark.prefect, pytest.mark.slow, pytest.mark.timeout(300)]

Start = Callable[..., "subprocess.Popen[str]"]
MODEL = str(ROOT / "configs/models/tiny-arith")


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts the demo with an empty home directory and a store of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    env |= {"HOME": str(tmp_path / "home"), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}

    def launch(*overrides: str) -> "subprocess.Popen[str]":
        fileroot = f"cluster.fileroot={tmp_path / 'runs'}"
        return subprocess.Popen(
            [sys.executable, "-m", "areal_pipe.cli", "run", "configs/demo.yaml", fileroot,
             *overrides],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    return launch


def trial_url(tmp_path: Path) -> str:
    return str(tmp_path / "runs/demo/arithmetic")


def output_of(process: "subprocess.Popen[str]", timeout: float = 240) -> str:
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, output
    return output


def processes_of(home: Path) -> list[int]:
    """Processes that still run with a home directory of ours."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"HOME={home}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def test_the_demo_and_then_once_more(start: Start, tmp_path: Path) -> None:
    output = output_of(start())
    for expected in ("512 accepted", "64 accepted", "mixed", "mean reward", "pass@8",
                     "tokens per second", "areal-pipe show"):  # fmt: skip
        assert expected in output
    assert re.search(r"Prefect recorded \d+ task runs\.", output), "none was lost"
    assert list(check_trial(open_trial(trial_url(tmp_path)))) == []
    assert "Everything is committed" in output_of(start(), timeout=30)
    assert processes_of(tmp_path / "home") == [], "no server, no worker is left"


def test_a_stored_trajectory_is_what_the_model_says(start: Start, tmp_path: Path) -> None:
    """One trajectory by hand: dataset, template, tokens, logprobs, version, reward, both files."""
    output_of(start("dataset.limit=9", "rollout.version=6"))
    [version] = open_trial(trial_url(tmp_path)).versions
    row = next(r for r in version.rows() if (r["task_id"], r["sample_idx"]) == (8, 5))
    t = trajectory_of(row)
    assert t is not None
    assert t.loss_mask is not None
    assert t.logprobs is not None
    assert t.versions is not None

    source = json.loads((ROOT / "configs/data/arithmetic.jsonl").read_text().splitlines()[8])
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompt = tokenizer.apply_chat_template(
        source["messages"], add_generation_prompt=True, return_dict=False
    )
    n = len(prompt)
    assert t.input_ids[:n].tolist() == prompt
    assert t.loss_mask.tolist() == [0] * n + [1] * (len(t) - n)
    assert t.versions.tolist() == [-1] * n + [6] * (len(t) - n)

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor(t.input_ids[None].tolist())).logits[0, n - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(
        1, torch.tensor(t.input_ids[n:].tolist())[:, None]
    )[:, 0]
    assert (torch.tensor(t.logprobs[n:].tolist()) - expected).abs().max() < 1e-4
    assert t.logprobs[:n].tolist() == [0.0] * n

    completion = tokenizer.decode(t.input_ids[n:].tolist())
    said = re.search(r"The answer is (-?\d+)\.", completion)
    right = said is not None and said[1] == source["answer"]
    assert t.reward == float(right)

    lines = (Path(trial_url(tmp_path)) / "rollout/6/8.jsonl").read_text().splitlines()
    line = json.loads(lines[5])
    assert line["input_ids"] == t.input_ids.tolist()
    assert line["loss_mask"] == t.loss_mask.tolist()
    assert line["logprobs"] == pytest.approx(t.logprobs.tolist(), rel=1e-6)
    assert line["version_rle"] == [[6, len(t) - n]]
    assert (line["reward"], line["completion"]) == (t.reward, completion)


def test_a_demo_that_was_killed_goes_on_and_repeats_nothing(start: Start, tmp_path: Path) -> None:
    killed = start()
    ledger = Path(trial_url(tmp_path)) / "rollout/0/_ledger"
    deadline = time.monotonic() + 120
    while len(list(ledger.rglob("*.arrow"))) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    deadline = time.monotonic() + 20
    while processes_of(tmp_path / "home") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(tmp_path / "home") == [], "its server and workers die with it"

    output = output_of(start())
    resumed = re.search(r"(\d+) of 512 episodes to run, (\d+) are stored already", output)
    assert resumed is not None, output
    missing, kept = int(resumed[1]), int(resumed[2])
    assert missing + kept == 512
    assert kept > 0
    assert f"{missing} episodes in" in output, "what was stored did not run again"
    assert list(check_trial(open_trial(trial_url(tmp_path)))) == []


def test_ctrl_c_ends_it_within_seconds_and_the_ui_is_there_while_it_runs(
    start: Start, tmp_path: Path
) -> None:
    running = start()
    assert running.stdout is not None
    url = ""
    for line in running.stdout:
        if found := re.search(r"Prefect: (http://\S+)", line):
            url = found[1]
            break
    with urllib.request.urlopen(url, timeout=10) as page:
        assert b"<html" in page.read()
    with urllib.request.urlopen(f"{url}/ui-settings", timeout=10) as settings:
        assert json.load(settings)["api_url"] == f"{url}/api"
    ledger = Path(trial_url(tmp_path)) / "rollout/0/_ledger"
    deadline = time.monotonic() + 60
    while not list(ledger.rglob("*.arrow")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    told = time.monotonic()
    output, _ = running.communicate(timeout=30)
    assert time.monotonic() - told < 5, output
    assert running.returncode == 130, output
    assert "the same command goes on from here" in output
    assert processes_of(tmp_path / "home") == []
