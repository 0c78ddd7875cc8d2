"""Fixtures that several folders of tests share."""

import json
import uuid
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from areal_pipe.campaign.config import CampaignConfig
from areal_pipe.storage.objects import ObjectStore, open_store
from tests.services import BUCKET, S3Server, s3_server

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Generator[S3Server]:
    """A real S3-protocol server."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """(fileroot, `cluster.s3` section): a local folder, then an S3 prefix."""
    if request.param == "file":
        return str(tmp_path / "store"), {}
    server: S3Server = request.getfixturevalue("s3")
    section = {
        "endpoint_url": server.endpoint_url,
        "region": "us-east-1",
        "access_key_id": server.options["key"],
        "secret_access_key": server.options["secret"],
    }
    return f"s3://{BUCKET}/{uuid.uuid4().hex}", section


@pytest.fixture
def store(place: tuple[str, dict[str, Any]], request: pytest.FixtureRequest) -> ObjectStore:
    """An empty store on a folder, then on S3."""
    url, section = place
    return open_store(url, request.getfixturevalue("s3").options if section else None)


Build = Callable[..., CampaignConfig]


@pytest.fixture
def campaign_config(tmp_path: Path) -> Build:
    """Builds the configuration of a small scripted campaign; `rows` is its dataset."""

    def build(
        rows: list[dict[str, Any]],
        *,
        fileroot: str | None = None,
        s3: dict[str, Any] | None = None,
        **sections: Any,
    ) -> CampaignConfig:
        data = tmp_path / f"prompts-{uuid.uuid4().hex[:8]}.jsonl"
        data.write_text("".join(json.dumps({"prompt": "x"} | row) + "\n" for row in rows))
        base: dict[str, Any] = {
            "experiment_name": "exp",
            "trial_name": "t0",
            "cluster": {"fileroot": fileroot or str(tmp_path / "store"), "s3": s3 or {}},
            "dataset": {"path": str(data)},
            "engine": {"kind": "scripted", "script": "tests.scenarios.count_up"},
            "workflow": {"path": "tests.scenarios.CountingWorkflow"},
            "rollout": {"group_size": 2, "shard_episodes": 8, "backoff_seconds": 0.01},
        }
        for name, section in sections.items():
            merged = base.get(name)
            base[name] = merged | section if isinstance(merged, dict) else section
        return CampaignConfig.model_validate(base)

    return build
