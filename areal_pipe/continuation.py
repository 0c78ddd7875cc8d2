"""Generation across interruptions: output is kept, the budget shrinks, segments are stitched.

An engine that updates its weights aborts what it is generating. The request is then sent again as
prompt plus partial output, and every token keeps the weight version at which it was requested.
"""

import time
from collections.abc import Awaitable, Callable

from areal_pipe.engine import STOP_REASONS, ModelRequest, ModelResponse
from areal_pipe.errors import EngineError, RequestError

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
    while out.stop_reason == "abort" and out.output_len < budget:
        segment.gconfig.max_new_tokens = budget - out.output_len
        segment.gconfig.min_new_tokens = max(0, req.gconfig.min_new_tokens - out.output_len)
        segment.input_ids = [*req.input_ids, *out.output_tokens]
        version = get_version()
        _append(out, await generate(segment), version, budget)
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
    if len(part.output_logprobs) != n:
        raise EngineError(
            f"an engine returns one logprob per token, got {n} tokens and "
            f"{len(part.output_logprobs)} logprobs"
        )
    if out.output_len + n > budget:
        raise EngineError(
            f"the engine generated {out.output_len + n} tokens where {budget} were allowed"
        )
    out.output_tokens += part.output_tokens
    out.output_logprobs += part.output_logprobs
    out.output_versions += part.output_versions or [version] * n
    out.ttft = min(out.ttft, part.ttft)
    out.stop_reason = part.stop_reason
