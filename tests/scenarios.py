"""Workflows, scripts and rewards that campaigns in the tests name by import string."""

import asyncio
import os
from pathlib import Path
from typing import Any

import torch

from areal_pipe.contract import workflow_context
from areal_pipe.contract.engine import ModelRequest
from areal_pipe.contract.workflow import RolloutWorkflow

EOS = 2


def count_up(req: ModelRequest) -> list[int]:
    """A script: the last prompt token plus one, then end of sequence. Logs each request."""
    log_line("AREAL_PIPE_TEST_REQUESTS", str(req.input_ids))
    return [req.input_ids[-1] + 1, EOS]


def log_line(variable: str, line: str) -> None:
    """Append a line to the file an environment variable names: whole lines, across processes."""
    if path := os.environ.get(variable):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{line}\n".encode())
        os.close(descriptor)


class CountingWorkflow(RolloutWorkflow):
    """A plain workflow without stages: asks the engine once; fails or rejects on demand.

    Row columns: `number` (the prompt); `fail_samples`, `reject_samples` and `odd_samples` (sample
    indices; odd ones return something that cannot be stored).
    Failing stops once the file named by AREAL_PIPE_TEST_MENDED exists.
    """

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        context = workflow_context.get()
        place = f"{context.task_id}/{context.sample_idx}"
        log_line("AREAL_PIPE_TEST_EPISODES", place)
        await asyncio.sleep(0)
        if context.sample_idx in data.get("fail_samples", []) and not is_mended():
            raise LookupError(f"no luck with {place}")
        response = await engine.agenerate(ModelRequest(input_ids=[data["number"]]))
        if context.sample_idx in data.get("reject_samples", []):
            return None
        tensors: dict[str, Any] = tensors_of(response, reward=float(context.sample_idx or 0))
        if context.sample_idx in data.get("odd_samples", []):
            tensors["tree"] = [object()]
        return tensors


def is_mended() -> bool:
    path = os.environ.get("AREAL_PIPE_TEST_MENDED")
    return path is not None and Path(path).exists()


def tensors_of(response: Any, *, reward: float) -> dict[str, torch.Tensor]:
    """A one-turn response as a tensor dict."""
    prompt, output = response.input_tokens, response.output_tokens
    length = len(prompt) + len(output)
    return {
        "input_ids": torch.tensor([[*prompt, *output]], dtype=torch.int32),
        "loss_mask": torch.tensor([[0] * len(prompt) + [1] * len(output)], dtype=torch.int32),
        "logprobs": torch.tensor(
            [[0.0] * len(prompt) + response.output_logprobs], dtype=torch.float32
        ),
        "versions": torch.tensor(
            [[-1] * len(prompt) + response.output_versions], dtype=torch.int32
        ),
        "attention_mask": torch.ones((1, length), dtype=torch.bool),
        "rewards": torch.tensor([reward], dtype=torch.float32),
    }


def failing_reward(
    prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any
) -> float:
    """A reward function that breaks on some rows, until mended."""
    if data.get("kind") == "mul1" and not is_mended():
        raise ZeroDivisionError("the reward code is broken for mul1")
    return 1.0


def own_pid_reward(*args: Any, **data: Any) -> float:
    """The process it was computed in."""
    return float(os.getpid())


def hanging_reward(*args: Any, **data: Any) -> float:
    """A reward that never returns."""
    while True:
        pass


def hanging_until_mended(*args: Any, **data: Any) -> float:
    """A reward that never returns, until mended."""
    while not is_mended():
        pass
    return 1.0
