"""Generation across interruptions: output is kept, the budget shrinks, segments are stitched.

An engine that updates its weights aborts what it is generating. The request is then sent again as
prompt plus partial output, and every token keeps the weight version at which it was requested.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from areal_pipe.contract.engine import STOP_REASONS, ModelRequest, ModelResponse
from areal_pipe.contract.errors import EngineError, EngineUnavailable, RequestError
from areal_pipe.episodes.seeding import derive_seed

MAX_EMPTY_SEGMENTS = 600
EMPTY_SEGMENT_SECONDS = 0.1
"""Pause after an abort that brought nothing: weights are being loaded."""

GenerateSegment = Callable[[ModelRequest], Awaitable[ModelResponse]]
"""One request to the server or model; may end with stop_reason `abort`."""


async def generate_until_done(
    req: ModelRequest, generate: GenerateSegment, get_version: Callable[[], int]
) -> ModelResponse:
    """Generate until the model stops or the token budget is used up.

    Args:
        req: the request; `gconfig.n_samples` must be 1.
        generate: sends one segment.
        get_version: the engine's weight version, read before each segment is requested.

    Raises:
        RequestError: nothing may be generated, or several samples were asked for.
        EngineError: the engine gave more tokens than allowed, columns of different lengths, or an
            unknown stop reason.
    """
    started = time.perf_counter()
    budget = token_budget(req)
    segment = req.copy()
    out = ModelResponse(
        input_tokens=list(req.input_ids), tokenizer=req.tokenizer, stop_reason="abort"
    )
    empty = 0
    while out.stop_reason == "abort" and out.output_len < budget:
        if out.output_len and req.gconfig.seed is not None:
            # Its own draws: the first segment's must not come again.
            segment.gconfig.seed = derive_seed(req.gconfig.seed, 0, 0, out.output_len)
        segment.gconfig.max_new_tokens = budget - out.output_len
        segment.gconfig.min_new_tokens = max(0, req.gconfig.min_new_tokens - out.output_len)
        segment.input_ids = [*req.input_ids, *out.output_tokens]
        version = get_version()
        part = await generate(segment)
        _append(out, part, version, budget)
        empty = 0 if part.output_len else empty + 1
        if empty > MAX_EMPTY_SEGMENTS:
            raise EngineUnavailable(
                f"the engine aborted {empty} times in a row without generating a token"
            )
        if empty:
            await asyncio.sleep(EMPTY_SEGMENT_SECONDS)
    if out.stop_reason == "abort":
        out.stop_reason = "length"
    out.latency = time.perf_counter() - started
    return out


def token_budget(req: ModelRequest) -> int:
    """How many tokens may be generated: min(max_tokens - prompt length, max_new_tokens)."""
    g = req.gconfig
    if g.n_samples != 1:
        raise RequestError(
            f"agenerate takes one sample per request, got n_samples={g.n_samples}; "
            "use group_size for several samples of a prompt"
        )
    budget = min(g.max_tokens - len(req.input_ids), g.max_new_tokens)
    if budget <= 0:
        raise RequestError(
            f"max_new_tokens ({budget}) is non-positive! max_tokens={g.max_tokens}, "
            f"prompt_len={len(req.input_ids)}, max_new_tokens={g.max_new_tokens}."
        )
    return budget


def _append(out: ModelResponse, part: ModelResponse, version: int, budget: int) -> None:
    n = part.output_len
    if part.stop_reason not in STOP_REASONS:
        raise EngineError(
            f"stop_reason must be one of {', '.join(STOP_REASONS)}, got {part.stop_reason!r}"
        )
    if len(part.output_logprobs) != n or len(part.output_versions) not in (0, n):
        raise EngineError(
            f"an engine returns one logprob and one version per token, got {n} tokens, "
            f"{len(part.output_logprobs)} logprobs and {len(part.output_versions)} versions"
        )
    if out.output_len + n > budget:
        raise EngineError(
            f"the engine generated {out.output_len + n} tokens where {budget} were allowed"
        )
    out.output_tokens += part.output_tokens
    out.output_logprobs += part.output_logprobs
    out.output_versions += part.output_versions or [version] * n
    out.ttft = part.ttft if out.ttft == float("inf") else out.ttft
    out.stop_reason = part.stop_reason
