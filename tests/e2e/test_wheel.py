"""What a trainer installs: the library alone, reading stores without torch or Prefect."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.campaigns import roll_out
from tests.conftest import ROOT, Build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        check=True,
        capture_output=True,
        timeout=200,
    )
    [path] = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_library_only(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"areal_pipe"}


def test_an_empty_environment_reads_a_store_with_it(
    wheel: Path, tmp_path: Path, campaign_config: Build
) -> None:
    config = campaign_config([{"number": 1}])
    roll_out(config)
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True, timeout=100)
    python = environment / "bin/python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel],
        check=True,
        timeout=200,
    )
    script = (
        "import sys, importlib.util, areal_pipe\n"
        "from areal_pipe.storage.trial import open_trial\n"
        "missing = [m for m in ('torch', 'prefect') if importlib.util.find_spec(m) is None]\n"
        f"[version] = open_trial({config.trial_url!r}).versions\n"
        "print(missing, sum(1 for _ in version.rows()))\n"
    )
    read = subprocess.run(
        [python, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False,
        timeout=60,
    )  # fmt: skip
    assert read.stdout == "['torch', 'prefect'] 2\n", read.stderr
    for arguments in (["--help"], ["check", config.trial_url]):
        command = subprocess.run(
            [environment / "bin/areal-pipe", *arguments],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert command.returncode == 0, command.stderr
