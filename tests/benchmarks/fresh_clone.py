"""How long the demo takes a newcomer: fresh clone, empty home directory, nothing installed.

    python3 tests/benchmarks/fresh_clone.py

Clones the committed state of this checkout into a temporary folder and times `make demo` twice.
Needs only the standard library.
"""

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def timed(command: list[str], folder: Path, home: Path) -> tuple[float, str]:
    """(seconds, output); exits with the output if the command fails."""
    started = time.perf_counter()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "VIRTUAL_ENV"))}
    done = subprocess.run(
        command,
        cwd=folder,
        env=env | {"HOME": str(home), "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}")
    return time.perf_counter() - started, done.stdout


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="areal-pipe-fresh-") as temporary:
        home, clone = Path(temporary, "home"), Path(temporary, "clone")
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        installing, _ = timed(["make", "--silent", ".venv/.run"], clone, home)
        first, output = timed(["make", "--silent", "demo"], clone, home)
        again, _ = timed(["make", "--silent", "demo"], clone, home)
    print(output)
    campaign = re.search(r"this run +(\d.*)", output)
    print(
        f"machine: {os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}"
    )
    print(f"installation            {installing:6.1f} s")
    print(f"first make demo         {first:6.1f} s  ({campaign[1].strip() if campaign else '?'})")
    print(f"make demo again         {again:6.1f} s")


if __name__ == "__main__":
    main()
