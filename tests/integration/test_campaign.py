"""A campaign with the library alone, on a folder and on a real S3 server."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from areal_pipe.campaign.runtime import Campaign
from areal_pipe.campaign.shard import ShardRun
from areal_pipe.campaign.summary import summarize
from areal_pipe.contract.errors import ConcurrentWrite, RecipeMismatch, StorageError
from areal_pipe.storage.check import check_trial
from areal_pipe.storage.manifest import Manifest
from areal_pipe.storage.rows import trajectory_of
from areal_pipe.storage.trial import open_trial
from tests.campaigns import roll_out, trial_of, version_of
from tests.conftest import Build

Place = tuple[str, dict[str, Any]]


def count_lines(path: Path) -> Counter[str]:
    return Counter(path.read_text().split()) if path.exists() else Counter()


@pytest.fixture
def episodes_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the test workflow logs every episode it starts."""
    log = tmp_path / "episodes.log"
    monkeypatch.setenv("AREAL_PIPE_TEST_EPISODES", str(log))
    return log


@pytest.fixture
def mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Touch this path, and what fails on demand stops failing."""
    monkeypatch.setenv("AREAL_PIPE_TEST_MENDED", str(tmp_path / "mended"))
    return tmp_path / "mended"


def test_every_episode_is_stored_once_and_the_store_is_sound(
    place: Place, campaign_config: Build
) -> None:
    fileroot, s3 = place
    config = campaign_config([{"number": n} for n in range(10, 19)], fileroot=fileroot, s3=s3)
    roll_out(config)
    rows = list(version_of(config).rows())
    assert Counter((r["task_id"], r["sample_idx"]) for r in rows) == Counter(
        (t, s) for t in range(9) for s in range(2)
    )
    assert list(check_trial(trial_of(config))) == []
    summary = summarize(version_of(config))
    assert summary.is_whole
    assert summary.episodes == {"accepted": 18}
    assert summary.mixed_groups == 9
    assert summary.pass_at == {1: 0.5, 2: 1.0}


def test_the_stored_columns_are_the_workflows(place: Place, campaign_config: Build) -> None:
    fileroot, s3 = place
    config = campaign_config([{"number": 41}], fileroot=fileroot, s3=s3, rollout={"version": 7})
    roll_out(config)
    [_, row] = sorted(version_of(config).rows(), key=lambda r: r["sample_idx"])
    t = trajectory_of(row)
    assert t is not None
    assert t.input_ids.tolist() == [41, 42, 2]
    assert t.loss_mask is not None
    assert t.loss_mask.tolist() == [0, 1, 1]
    assert t.logprobs is not None
    assert t.logprobs.tolist() == [0.0, -0.5, -0.5]
    assert t.versions is not None
    assert t.versions.tolist() == [-1, 7, 7]
    assert t.reward == 1.0
    assert version_of(config).record.version == 7


def test_a_second_run_starts_nothing(
    place: Place, campaign_config: Build, episodes_log: Path
) -> None:
    fileroot, s3 = place
    config = campaign_config([{"number": n} for n in range(5)], fileroot=fileroot, s3=s3)
    roll_out(config)
    before = count_lines(episodes_log)
    again = roll_out(config)
    assert count_lines(episodes_log) == before
    assert "engine" not in again.__dict__, "nothing is missing, so no engine is loaded"


def test_a_retry_runs_exactly_the_failed_episodes_and_closes_their_groups(
    place: Place, campaign_config: Build, episodes_log: Path, mend: Path
) -> None:
    fileroot, s3 = place
    rows = [{"number": n, "fail_samples": [1] if n == 3 else []} for n in range(8)]
    config = campaign_config(rows, fileroot=fileroot, s3=s3, rollout={"group_size": 3})
    roll_out(config)
    summary = summarize(version_of(config))
    assert summary.episodes == {"accepted": 21, "failed": 1, "missing": 2}
    [failure] = summary.failures
    assert (failure.task_id, failure.sample_idx, failure.error_class) == (3, 1, "LookupError")
    assert failure.message == "no luck with 3/1"
    assert list(check_trial(trial_of(config))) == []
    stored_before = {p.key: p.sha256 for m in version_of(config).manifests() for p in m.parts}

    mend.touch()
    roll_out(config)
    runs = count_lines(episodes_log)
    assert {place for place, n in runs.items() if n > 1} == {"3/1"}
    assert summarize(version_of(config)).episodes == {"accepted": 24}
    assert list(check_trial(trial_of(config))) == []
    stored_after = {p.key: p.sha256 for m in version_of(config).manifests() for p in m.parts}
    assert stored_before.items() < stored_after.items(), "parts are immutable, one was added"


def test_the_ledger_is_empty_once_everything_is_in_parts(
    place: Place, campaign_config: Build, mend: Path
) -> None:
    fileroot, s3 = place
    rows = [{"number": n, "fail_samples": [0] if n == 1 else []} for n in range(4)]
    config = campaign_config(rows, fileroot=fileroot, s3=s3)
    campaign = roll_out(config)
    ledger = campaign.keys.prefix + "/_ledger"
    assert len(campaign.store.list(ledger)) == 1, "the finished member of the open group"
    mend.touch()
    roll_out(config)
    assert campaign.store.list(ledger) == []


def test_finished_episodes_survive_a_crash_before_the_commit(
    place: Place, campaign_config: Build, episodes_log: Path
) -> None:
    fileroot, s3 = place
    config = campaign_config([{"number": n} for n in range(4)], fileroot=fileroot, s3=s3)

    async def crash_before_commit(campaign: Campaign) -> None:
        run = await ShardRun.open(campaign, 0)
        for group in run.groups()[:3]:
            await run.record_group(group)

    campaign = Campaign.open(config)
    campaign.engine.executor.run(crash_before_commit(campaign)).result(timeout=60)
    campaign.close()
    assert list(version_of(config).rows()) == [], "readers see committed groups only"

    roll_out(config)
    assert set(count_lines(episodes_log).values()) == {1}, "nothing ran twice"
    assert summarize(version_of(config)).episodes == {"accepted": 8}
    assert list(check_trial(trial_of(config))) == []


def test_two_runs_of_one_shard_cannot_both_commit(place: Place, campaign_config: Build) -> None:
    fileroot, s3 = place
    config = campaign_config([{"number": n} for n in range(4)], fileroot=fileroot, s3=s3)
    campaign, other = Campaign.open(config), Campaign.open(config)

    async def race() -> None:
        first = await ShardRun.open(campaign, 0)
        second = await ShardRun.open(other, 0)
        for run in (first, second):
            for group in run.groups():
                await run.record_group(group)
        await first.commit()
        with pytest.raises(ConcurrentWrite, match="two runs work on one shard"):
            await second.commit()

    campaign.engine.executor.run(race()).result(timeout=60)
    campaign.close()
    other.close()
    assert summarize(version_of(config)).episodes == {"accepted": 8}
    assert list(check_trial(trial_of(config))) == []


def test_another_recipe_is_refused_with_the_fields_and_the_way_out(campaign_config: Build) -> None:
    config = campaign_config([{"number": 1}])
    roll_out(config)
    other = config.model_copy(
        update={"gconfig": config.gconfig.model_copy(update={"temperature": 0.5})}
    )
    with pytest.raises(RecipeMismatch) as caught:
        Campaign.open(other)
    assert "gconfig.temperature: stored 1.0, now 0.5" in str(caught.value)
    assert "trial_name or rollout.version" in str(caught.value)


def test_a_plan_under_which_nothing_was_stored_can_be_corrected(campaign_config: Build) -> None:
    config = campaign_config([{"number": 1}])
    Campaign.open(config).close()
    corrected = config.model_copy(
        update={"gconfig": config.gconfig.model_copy(update={"temperature": 0.5})}
    )
    roll_out(corrected)
    assert summarize(version_of(corrected)).is_whole


def test_places_hosts_and_concurrency_do_not_enter_the_recipe(campaign_config: Build) -> None:
    config = campaign_config([{"number": 1}])
    roll_out(config)
    faster = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"max_concurrent_rollouts": 99})}
    )
    Campaign.open(faster).close()


def test_versions_of_a_trial_lie_side_by_side(campaign_config: Build) -> None:
    config = campaign_config([{"number": 1}])
    roll_out(config)
    later = config.model_copy(update={"rollout": config.rollout.model_copy(update={"version": 1})})
    roll_out(later)
    names = [v.name for v in trial_of(config).versions]
    assert names == ["rollout/0", "rollout/1"]
    [only] = open_trial(f"{config.trial_url}/rollout/1").versions
    assert only.record.version == 1


def test_rejected_members_are_rows_and_an_all_rejected_group_is_rejected(
    campaign_config: Build,
) -> None:
    rows = [{"number": 1, "reject_samples": [0]}, {"number": 2, "reject_samples": [0, 1]}]
    config = campaign_config(rows)
    roll_out(config)
    summary = summarize(version_of(config))
    assert summary.episodes == {"accepted": 1, "rejected": 3}
    assert (summary.accepted_groups, summary.rejected_groups) == (1, 1)
    stored = {(r["task_id"], r["sample_idx"]): r for r in version_of(config).rows()}
    assert stored[1, 1]["group_state"] == "rejected"
    assert stored[0, 0]["reason"] == "the workflow returned None"


def test_accepted_members_of_a_rejected_group_carry_no_training_weight(
    campaign_config: Build,
) -> None:
    rows = [{"number": 1, "reject_samples": [0]}]
    config = campaign_config(rows, rollout={"min_group_size": 2})
    roll_out(config)
    stored = {r["sample_idx"]: r for r in version_of(config).rows()}
    assert stored[1]["status"] == "filtered"
    assert "min_group_size is 2" in stored[1]["reason"]
    assert list(check_trial(trial_of(config))) == []


@pytest.mark.parametrize(("policy", "accepted_groups"), [("keep", 1), ("drop_group", 0)])
def test_failed_members_can_be_given_up(
    campaign_config: Build, policy: str, accepted_groups: int
) -> None:
    rows = [{"number": 1, "fail_samples": [0]}]
    config = campaign_config(rows, rollout={"on_failed_member": policy})
    roll_out(config)
    summary = summarize(version_of(config))
    assert summary.is_whole
    assert summary.accepted_groups == accepted_groups
    assert summary.episodes["failed"] == 1, "given up is not forgotten"
    assert list(check_trial(trial_of(config))) == []


def test_a_prompt_that_cannot_be_tokenized_fails_its_whole_group(campaign_config: Build) -> None:
    config = campaign_config(
        [{"number": 1}],
        workflow={
            "path": "areal_pipe.workflows.rlvr.RLVRWorkflow",
            "kwargs": {"reward_fn": "tests.scenarios.failing_reward", "tokenizer": None},
        },
    )
    roll_out(config)
    summary = summarize(version_of(config))
    assert summary.episodes == {"failed": 2}
    assert {f.stage for f in summary.failures} == {"tokenize"}


def test_an_unwritable_store_is_an_error_before_anything_runs(
    campaign_config: Build, episodes_log: Path
) -> None:
    config = campaign_config([{"number": 1}], fileroot="/proc/areal-pipe")
    with pytest.raises(StorageError, match="/proc/areal-pipe"):
        Campaign.open(config)
    assert count_lines(episodes_log) == Counter()


def test_the_dump_has_one_object_per_prompt_with_a_line_per_sample(campaign_config: Build) -> None:
    config = campaign_config([{"number": 5}, {"number": 6}])
    roll_out(config)
    folder = Path(config.trial_url) / "rollout" / "0"
    assert sorted(p.name for p in folder.glob("*.jsonl")) == ["0.jsonl", "1.jsonl"]
    assert len((folder / "1.jsonl").read_text().splitlines()) == 2


def test_a_result_that_cannot_be_stored_fails_its_own_episode_only(campaign_config: Build) -> None:
    rows = [{"number": n, "odd_samples": [1] if n == 2 else []} for n in range(4)]
    config = campaign_config(rows)
    roll_out(config)
    summary = summarize(version_of(config))
    [failure] = summary.failures
    assert (failure.task_id, failure.sample_idx, failure.stage) == (2, 1, "store")
    assert "'tree' must hold" in failure.message
    assert summary.accepted_groups == 3


def test_dumps_that_a_crash_left_out_are_written_by_the_next_run(campaign_config: Build) -> None:
    config = campaign_config([{"number": n} for n in range(4)])
    written = roll_out(config).store
    folder = Path(config.trial_url) / "rollout/0"
    before = {p.name: p.read_bytes() for p in folder.glob("*.jsonl")}
    key = "rollout/0/_manifest/00000.json"
    stored = written.get_tagged(key)
    assert stored is not None
    undone = Manifest.from_bytes(stored.data, where=key).model_copy(update={"undumped": [1, 3]})
    written.swap(key, undone.to_bytes(), tag=stored.tag)
    written.delete(["rollout/0/1.jsonl", "rollout/0/3.jsonl"])
    roll_out(config)
    assert {p.name: p.read_bytes() for p in folder.glob("*.jsonl")} == before


def test_the_loser_of_a_race_leaves_the_winners_dumps_alone(campaign_config: Build) -> None:
    config = campaign_config([{"number": 1}])
    winner, loser = Campaign.open(config), Campaign.open(config)

    async def race() -> None:
        first, second = await ShardRun.open(winner, 0), await ShardRun.open(loser, 0)
        for run in (first, second):
            for group in run.groups():
                await run.record_group(group)
        await first.commit()
        before = winner.store.get("rollout/0/0.jsonl")
        with pytest.raises(ConcurrentWrite):
            await second.commit()
        assert winner.store.get("rollout/0/0.jsonl") == before

    winner.engine.executor.run(race()).result(timeout=60)
    winner.close()
    loser.close()
    roll_out(config)
    assert winner.store.list("rollout/0/_ledger") == [], "what the loser left is swept"
