"""`check` finds what is wrong with a store."""

import io
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from areal_pipe.campaign.config import CampaignConfig
from areal_pipe.storage.check import check_trial
from areal_pipe.storage.manifest import Manifest
from areal_pipe.storage.trial import open_trial
from tests.campaigns import roll_out
from tests.conftest import Build


@pytest.fixture
def stored(campaign_config: Build) -> CampaignConfig:
    config = campaign_config([{"number": n} for n in range(4)])
    roll_out(config)
    return config


def problems_of(config: CampaignConfig) -> str:
    return "\n".join(f.problem for f in check_trial(open_trial(config.trial_url)))


def part_of(config: CampaignConfig) -> Path:
    return Path(config.trial_url) / "rollout/0/part-00000.parquet"


def edit_manifest(config: CampaignConfig, **changes: object) -> None:
    path = Path(config.trial_url) / "rollout/0/_manifest/00000.json"
    manifest = Manifest.from_bytes(path.read_bytes(), where=str(path))
    path.write_bytes(manifest.model_copy(update=changes).to_bytes())


def test_a_fresh_store_is_sound(stored: CampaignConfig) -> None:
    assert problems_of(stored) == ""


def test_a_missing_part_is_found(stored: CampaignConfig) -> None:
    part_of(stored).unlink()
    assert "does not exist" in problems_of(stored)


def test_a_flipped_byte_is_found(stored: CampaignConfig) -> None:
    data = bytearray(part_of(stored).read_bytes())
    data[len(data) // 2] ^= 1
    part_of(stored).write_bytes(data)
    assert "SHA-256 differs" in problems_of(stored)


def test_a_truncated_manifest_is_found(stored: CampaignConfig) -> None:
    path = Path(stored.trial_url) / "rollout/0/_manifest/00000.json"
    path.write_bytes(path.read_bytes()[:-20])
    assert "is damaged" in problems_of(stored)


def test_counts_that_do_not_add_up_are_found(stored: CampaignConfig) -> None:
    edit_manifest(stored, accepted=[0, 1, 2, 3, 99])
    assert "group 99 is closed with 0 of 2 episodes" in problems_of(stored)


def test_a_group_listed_twice_is_found(stored: CampaignConfig) -> None:
    edit_manifest(stored, rejected=[2])
    assert "group 2 is listed 2 times" in problems_of(stored)


def test_a_wrong_column_is_found(stored: CampaignConfig) -> None:
    table = pq.read_table(part_of(stored))
    at = table.schema.get_field_index("seqlen")
    longer = pc.add(table.column("seqlen"), 1).cast("int32")
    rewrite(stored, table.set_column(at, table.schema.field(at), longer))
    assert "seqlen 4, but 3 tokens" in problems_of(stored)


def test_an_episode_stored_twice_is_found(stored: CampaignConfig) -> None:
    import pyarrow as pa

    table = pq.read_table(part_of(stored))
    rewrite(stored, pa.concat_tables([table, table.slice(0, 1)]))
    assert "is stored 2 times" in problems_of(stored)


def test_a_newer_major_schema_is_refused(stored: CampaignConfig) -> None:
    table = pq.read_table(part_of(stored))
    newer = table.replace_schema_metadata({"areal_pipe.schema_version": "2.0"})
    rewrite(stored, newer)
    assert "schema version 2.0" in problems_of(stored)
    assert "upgrade areal-pipe" in problems_of(stored)


def rewrite(config: CampaignConfig, table: object) -> None:
    """Put other content into the part, and make the manifest name it correctly."""
    import hashlib

    sink = io.BytesIO()
    pq.write_table(table, sink)
    data = sink.getvalue()
    part_of(config).write_bytes(data)
    path = Path(config.trial_url) / "rollout/0/_manifest/00000.json"
    manifest = Manifest.from_bytes(path.read_bytes(), where=str(path))
    [part] = manifest.parts
    named = part.model_copy(update={"sha256": hashlib.sha256(data).hexdigest()})
    edit_manifest(config, parts=[named])
