"""The campaign file: what is wrong is said with the way out."""

from pathlib import Path

import pytest

from areal_pipe.campaign.config import CampaignConfig, load_config
from areal_pipe.contract.errors import ConfigError

GOOD = """
experiment_name: e
trial_name: t
cluster: {fileroot: runs}
dataset: {path: p.jsonl}
engine: {kind: scripted, script: tests.scenarios.count_up}
"""


def load(tmp_path: Path, *overrides: str, text: str = GOOD) -> CampaignConfig:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return load_config(path, list(overrides))


def test_overrides_replace_values_of_any_section(tmp_path: Path) -> None:
    config = load(tmp_path, "rollout.group_size=8", "gconfig.stop=['x', y]", "trial_name=b")
    assert config.rollout.group_size == 8
    assert config.gconfig.stop == ["x", "y"]
    assert config.trial_name == "b"


def test_areals_place_for_the_fileroot_works(tmp_path: Path) -> None:
    text = GOOD.replace("cluster: {fileroot: runs}", "rollout: {fileroot: elsewhere}")
    assert load(tmp_path, text=text).cluster.fileroot == "elsewhere"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.grup_size=2", "unknown key 'grup_size'; did you mean 'group_size'?"),
        ("rolout.group_size=2", "unknown key 'rolout'; did you mean 'rollout'?"),
        ("rollout.group_size=many", "rollout.group_size"),
        ("rollout.group_size=0", "greater than or equal to 1"),
        ("rollout.group_size=1.5", "rollout.group_size"),
        ("rollout.min_group_size=3", "min_group_size must be in 1..group_size=1"),
        ("rollout.reward_timeout=-1", "greater than 0"),
        ("rollout.episode_timeout=0", "greater than 0"),
        ("gconfig.temperature=-0.1", "gconfig.temperature"),
        ("engine.kind=vlm", "engine.kind"),
        ("engine.script=", "engine.script is required"),
        ("experiment_name=a/b", "without '/'"),
        ("experiment_name=", "experiment_name"),
        ("orchestration.granularity=token", "'stage', 'episode' or 'group'"),
        ("rollout", "section.key=value"),
        ("trial_name.x=1", "'trial_name' is no section"),
        ("gconfig.stop=[", "no valid YAML"),
    ],
)
def test_a_bad_value_is_named(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, override)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "must hold a YAML mapping, got list"),
        ("a: [", "no valid YAML"),
        ("experiment_name: e", "trial_name: Field required"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"c\.yaml") as caught:
        load(tmp_path, text=text)
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")


def test_secrets_are_neither_shown_nor_stored(tmp_path: Path) -> None:
    config = load(tmp_path, "cluster.s3.secret_access_key=sk-canary")
    assert "sk-canary" not in repr(config)
    assert "sk-canary" not in str(config.storable())
    assert "sk-canary" not in config.without_secrets().model_dump_json()
    assert config.without_secrets().cluster.s3.secret_access_key is None
    assert config.cluster.s3.storage_options() == {"secret": "sk-canary"}
