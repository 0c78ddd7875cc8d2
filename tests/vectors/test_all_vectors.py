"""No vector lies in `data` without a test that runs on it.

`load` makes one test of every vector of a file, so it is enough that each file is loaded.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.vectors.vector_data import DATA


def loaded_areas(module: Path) -> Iterator[str]:
    """The first argument of each `load(...)` in a `parametrize("vector", ...)` decorator."""
    for node in ast.walk(ast.parse(module.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not node.name.startswith("test_"):
            continue
        for call in (n for mark in node.decorator_list for n in ast.walk(mark)):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "load":
                yield ast.literal_eval(call.args[0])


def test_every_file_of_vectors_is_run_by_a_test() -> None:
    modules = Path(__file__).parent.glob("test_*.py")
    loaded = {area for module in modules for area in loaded_areas(module)}
    assert loaded == {path.stem for path in DATA.glob("*.json")}
