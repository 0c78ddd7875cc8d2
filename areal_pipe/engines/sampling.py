"""Sampling a batch whose rows have nothing in common: temperature, truncation, seed, limits.

Each row draws by inverting the cumulative distribution at its own uniform numbers, made from its
own seed. What is drawn depends on the row's logits and seed alone, whatever else is in the batch
(up to the last bits of the logits, which the batch's shape can move).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from areal_pipe.contract.engine import GenerationHyperparameters
from areal_pipe.contract.errors import RequestError


@dataclass(slots=True, kw_only=True, eq=False)
class RowState:
    """One request while it is being generated."""

    gconfig: GenerationHyperparameters
    stop_ids: frozenset[int]
    """Tokens that end it; they are kept in the output."""
    decode: Callable[[list[int]], str]
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    stop_reason: str | None = None
    """Set when it has ended."""
    uniforms: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator()
        if self.gconfig.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.gconfig.seed)
        self.uniforms = torch.rand(
            self.gconfig.max_new_tokens, generator=generator, dtype=torch.float64
        )

    def append(self, token: int, logprob: float) -> None:
        """Take one sampled token and decide whether the row ends with it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids or self._stop_string_completed():
            self.stop_reason = "stop"
        elif len(self.tokens) >= self.gconfig.max_new_tokens:
            self.stop_reason = "length"

    def _stop_string_completed(self) -> bool:
        if not self.gconfig.stop or len(self.tokens) < self.gconfig.min_new_tokens:
            return False
        # A token is at least one byte: this many suffice to hold the longest stop string.
        tail = self.tokens[-(max(len(s.encode()) for s in self.gconfig.stop) + 4) :]
        text = self.decode(tail)
        return any(s in text for s in self.gconfig.stop)


def check_supported(g: GenerationHyperparameters) -> None:
    """Refuse what this sampler cannot do, or nobody can.

    Raises:
        RequestError: naming the parameter.
    """
    if g.temperature < 0 or not 0 < g.top_p <= 1 or g.top_k < 1:
        raise RequestError(
            "temperature must be >= 0, top_p in (0, 1] and top_k >= 1, "
            f"got {g.temperature}, {g.top_p} and {g.top_k}"
        )
    if g.stop and not all(g.stop):
        raise RequestError(f"stop strings must not be empty, got stop={g.stop}")
    if g.frequency_penalty or g.use_beam_search:
        raise RequestError(
            "the transformers engine has no frequency_penalty and no beam search, got "
            f"frequency_penalty={g.frequency_penalty}, use_beam_search={g.use_beam_search}"
        )


def sample(logits: Tensor, rows: Sequence[RowState]) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: [B, V], of any float dtype.

    Returns:
        tokens [B] int64, and their log-probabilities [B] float64 under the distribution they were
        drawn from: after temperature and truncation. For greedy rows: under the plain softmax.
    """
    scores = logits.to(torch.float64)
    _mask_early_stops(scores, rows)
    greedy = torch.tensor([r.gconfig.greedy or r.gconfig.temperature == 0 for r in rows])
    temperature = torch.tensor(
        [1.0 if g else r.gconfig.temperature for r, g in zip(rows, greedy.tolist(), strict=True)],
        dtype=torch.float64,
    )
    logprobs = torch.log_softmax(scores / temperature[:, None], dim=-1)
    logprobs = _truncated(logprobs, rows, greedy)
    uniforms = torch.stack([r.uniforms[len(r.tokens)] for r in rows])
    cumulative = logprobs.exp().cumsum(dim=-1)
    # The last cumulative value is 1 up to rounding: scale, so that every draw falls inside.
    drawn = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)
    tokens = torch.where(greedy, scores.argmax(dim=-1), drawn[:, 0].clamp_max(scores.shape[1] - 1))
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _mask_early_stops(scores: Tensor, rows: Sequence[RowState]) -> None:
    """No end of sequence before min_new_tokens."""
    for i, row in enumerate(rows):
        if len(row.tokens) < row.gconfig.min_new_tokens:
            held_back = [token for token in row.stop_ids if 0 <= token < scores.shape[1]]
            scores[i, held_back] = -torch.inf


def _truncated(logprobs: Tensor, rows: Sequence[RowState], greedy: Tensor) -> Tensor:
    """Apply top_k, then top_p, and renormalise; rows without truncation pass unchanged."""
    vocabulary = logprobs.shape[1]
    top_k = torch.tensor([min(r.gconfig.top_k, vocabulary) for r in rows])
    top_p = torch.tensor([r.gconfig.top_p for r in rows], dtype=torch.float64)
    needed = ((top_k < vocabulary) | (top_p < 1)) & ~greedy
    if not bool(needed.any()):
        return logprobs
    ordered, order = logprobs.sort(dim=-1, descending=True)
    rank = torch.arange(vocabulary)[None, :]
    kept_by_k = rank < top_k[:, None]
    probabilities = torch.where(kept_by_k, ordered, -torch.inf).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    kept = kept_by_k & (before < top_p[:, None])
    kept[:, 0] = True
    mask = torch.zeros_like(kept).scatter(1, order, kept) | ~needed[:, None]
    cut = torch.where(mask, logprobs, -torch.inf)
    return torch.where(needed[:, None], torch.log_softmax(cut, dim=-1), logprobs)
