"""What may be imported without what."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "prefect", "datasets", "math_verify")


def modules_after(code: str) -> set[str]:
    """Heavy modules that a fresh interpreter has loaded after running `code`."""
    script = f"{code}\nimport sys; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.splitlines()[-1].split())


def test_importing_the_library_loads_nothing_heavy() -> None:
    assert modules_after("import areal_pipe") == set()


@pytest.mark.parametrize("command", ["--help", "run --help", "show --help", "doctor --help"])
def test_help_loads_nothing_heavy(command: str) -> None:
    code = (
        "import sys, contextlib, io\n"
        f"sys.argv = ['areal-pipe', *{command.split()!r}]\n"
        "from areal_pipe.cli import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): main()"
    )
    assert modules_after(code) == set()


def test_reading_a_store_loads_neither_torch_nor_prefect() -> None:
    assert modules_after("import areal_pipe.cli.reading") == set()


@pytest.mark.parametrize(
    "name",
    [
        "RolloutWorkflow", "InferenceEngine", "ModelRequest", "ModelResponse",
        "GenerationHyperparameters", "GroupedRolloutWorkflow", "concat_padded_tensors",
        "check_trajectory_format", "resolve_workflow", "workflow_context", "StalenessManager",
        "RLVRWorkflow", "MultiTurnWorkflow", "ScriptedEngine", "InteractionWithTokenLogpReward",
    ],
)  # fmt: skip
def test_a_public_name_is_importable_from_the_package(name: str) -> None:
    import areal_pipe

    assert getattr(areal_pipe, name) is not None
    assert name in dir(areal_pipe)


def test_an_unknown_name_is_an_attribute_error() -> None:
    import areal_pipe

    with pytest.raises(AttributeError, match="RolloutWorkflou"):
        _ = areal_pipe.RolloutWorkflou
