"""A real Prefect server for the tests of this folder."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_pipe.campaign.config import CampaignConfig
from infra.prefect_server import PrefectServer, managed_server
from tests.conftest import ROOT

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True, slots=True)
class Api:
    """What the server knows, asked over HTTP."""

    server: PrefectServer

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self.server.api_url}/{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def task_runs(self, trial: str) -> list[dict[str, Any]]:
        """All task runs of a trial, by its tag."""
        found: list[dict[str, Any]] = []
        while True:
            body = {
                "task_runs": {"tags": {"all_": [trial]}},
                "offset": len(found),
                "limit": 200,
                "sort": "ID_DESC",
            }
            page = self.post("task_runs/filter", body)
            found += page
            if len(page) < 200:
                return found

    def flow_runs(self, flow: str, trial: str) -> list[dict[str, Any]]:
        """Runs of a flow for a trial, oldest first."""
        body = {
            "flows": {"name": {"any_": [flow]}},
            "flow_runs": {"tags": {"all_": [trial]}},
            "sort": "START_TIME_ASC",
        }
        return self.post("flow_runs/filter", body)

    def artifacts(self, key: str) -> list[dict[str, Any]]:
        return self.post("artifacts/filter", {"artifacts": {"key": {"any_": [key]}}})


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Generator[Api]:
    with managed_server(tmp_path_factory.mktemp("prefect")) as server:
        yield Api(server)


@pytest.fixture
def run(api: Api, tmp_path: Path) -> Run:
    """Runs a campaign by the command line against the server of the tests."""

    def launch(
        config: CampaignConfig, *overrides: str, **env: str
    ) -> "subprocess.CompletedProcess[str]":
        path = tmp_path / "campaign.yaml"
        path.write_text(yaml.safe_dump(config.storable()))
        return subprocess.run(
            [sys.executable, "-m", "areal_pipe.cli", "run", str(path), *overrides],
            cwd=ROOT,
            env=os.environ
            | {"PREFECT_API_URL": api.server.api_url, "HOME": str(tmp_path), "COLUMNS": "200"}
            | env,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )

    return launch
