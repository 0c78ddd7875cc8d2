"""The inference engine as a workflow sees it: token ids in, token ids with logprobs out.

Field names and defaults of the request, response and sampling parameters are AReaL's.
"""

import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

logger = logging.getLogger(__name__)

STOP_REASONS = ("stop", "length", "tool_calls", "abort")
"""Why a generation ended. `abort`: interrupted, to be continued (weights changed)."""

_OPENAI_MAX_TOKENS = {
    "completions": "max_completion_tokens",
    "responses": "max_output_tokens",
    "openai-agents": "max_tokens",
}
_OPENAI_COMMON = ("top_p", "temperature", "stop", "frequency_penalty")


@dataclass(kw_only=True)
class GenerationHyperparameters:
    """How to sample. Defaults are AReaL's; `seed` is ours."""

    n_samples: int = 1
    """Samples per prompt. Workflows ask for one; groups repeat the episode."""
    max_new_tokens: int = 16384
    min_new_tokens: int = 0
    """End-of-sequence is masked until this many tokens were generated."""
    max_tokens: int = 32768
    """Limit on prompt plus generated tokens."""
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = 100_000_000
    temperature: float = 1.0
    stop_token_ids: list[int] = field(default_factory=list[int])
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stop: list[str] | None = None
    """Stop strings: generation ends after the token that completes one."""
    frequency_penalty: float = 0.0
    lora_name: str = "default_lora"
    use_beam_search: bool = False
    seed: int | None = None
    """Base seed; every sample of every prompt derives its own from it. None: not reproducible."""

    def new(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> Self:
        """A copy that also stops at the tokenizer's padding and end-of-sequence tokens."""
        ids = list(self.stop_token_ids)
        for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
            if token_id is not None and token_id not in ids:
                ids.append(token_id)
        return self.new(stop_token_ids=ids)

    def to_openai_args_dict(self, api_format: str = "completions") -> dict[str, Any]:
        """Keyword arguments for an OpenAI client; a warning names settings the API has no word for.

        Args:
            api_format: `completions`, `responses` or `openai-agents`; they name the length
                limit differently.
        """
        if api_format not in _OPENAI_MAX_TOKENS:
            known = ", ".join(_OPENAI_MAX_TOKENS)
            raise ValueError(f"api_format must be one of {known}, got {api_format!r}")
        sent = {"n_samples", "max_new_tokens", *_OPENAI_COMMON}
        lost = [
            f.name
            for f in fields(self)
            if f.name not in sent and getattr(self, f.name) != getattr(type(self)(), f.name)
        ]
        if lost:
            logger.warning("The OpenAI API has no parameter for: %s", ", ".join(lost))
        args = {"n": self.n_samples, _OPENAI_MAX_TOKENS[api_format]: self.max_new_tokens}
        return args | {name: getattr(self, name) for name in _OPENAI_COMMON}


@dataclass(kw_only=True)
class ModelRequest:
    """One prompt to continue."""

    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Request id; requests with one id go to one server, to share its prefix cache."""
    input_ids: list[int] = field(default_factory=list[int])
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    tokenizer: Any | None = None
    image_data: list[Any] | None = field(default_factory=list[Any])
    processor: Any | None = None
    vision_msg_vllm: list[Any] | None = None

    def copy(self) -> "ModelRequest":
        """A request with its own token list and sampling parameters, and the same id."""
        return replace(self, input_ids=list(self.input_ids), gconfig=self.gconfig.new())


@dataclass(kw_only=True)
class ModelResponse:
    """What the engine generated; the four output columns have one length."""

    input_tokens: list[int] = field(default_factory=list[int])
    output_tokens: list[int] = field(default_factory=list[int])
    """Generated ids, including the end-of-sequence or stop token that ended them."""
    output_logprobs: list[float] = field(default_factory=list[float])
    """Log-probability of each output token under the policy that sampled it."""
    output_versions: list[int] = field(default_factory=list[int])
    """Weight version at which each output token was requested."""
    stop_reason: str = "stop"
    tokenizer: Any | None = None
    latency: float = float("inf")
    """Seconds from request to last token."""
    ttft: float = float("inf")
    """Seconds to the first token, where the engine knows."""

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)

    @property
    def end_with_stop(self) -> bool:
        """Whether the last token is the tokenizer's end-of-sequence or padding token."""
        return bool(self.output_tokens) and self.output_tokens[-1] in self._stop_ids()

    @property
    def output_tokens_without_stop(self) -> list[int]:
        """Output tokens without trailing end-of-sequence and padding tokens.

        Raises:
            ValueError: stop_reason is `stop` or `tool_calls` but the output does not end with such
                a token, or consists of nothing else.
        """
        if self.stop_reason not in ("stop", "tool_calls"):
            return self.output_tokens
        if not self.end_with_stop:
            last = self.output_tokens[-1] if self.output_tokens else None
            raise ValueError(
                f"output_tokens does not end with eos or pad token, it ends with {last}, "
                f"but stop_reason is {self.stop_reason}"
            )
        stop_ids = self._stop_ids()
        end = self.output_len
        while end and self.output_tokens[end - 1] in stop_ids:
            end -= 1
        if end == 0:
            raise ValueError(
                "All output_tokens are EOS or PAD tokens; "
                "cannot strip stop tokens without removing entire output."
            )
        return self.output_tokens[:end]

    def _stop_ids(self) -> tuple[int | None, int | None]:
        if self.tokenizer is None:
            raise ValueError(
                "a ModelResponse needs its tokenizer to know the stop tokens, got None"
            )
        return (self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)


ShouldAcceptFn = Callable[[dict[str, Any]], bool]


class InferenceEngine(ABC):
    """Generates, and runs rollout workflows over prompts in the background.

    `rollout_engine.RolloutEngine` implements everything but `agenerate`; engines derive from it.
    """

    @abstractmethod
    def initialize(self) -> None:
        """Load or connect. Called once before use."""

    @abstractmethod
    def destroy(self) -> None:
        """Stop the background work and free what `initialize` took."""

    @abstractmethod
    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Continue one prompt.

        Raises:
            RequestError: the request can never succeed.
            EngineUnavailable: an outage; the caller may try again.
        """

    @abstractmethod
    def submit(
        self,
        data: Mapping[str, Any],
        workflow: Any,
        workflow_kwargs: Mapping[str, Any] | None = None,
        should_accept_fn: ShouldAcceptFn | str | None = None,
        group_size: int = 1,
        task_id: int | None = None,
        is_eval: bool = False,
    ) -> int:
        """Queue one prompt; returns its task id.

        Raises:
            ValueError: the task id is already queued or running.
        """

    @abstractmethod
    def wait(
        self, count: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> list[dict[str, Any] | None]:
        """The next `count` finished prompts; None for one without an accepted trajectory."""

    @abstractmethod
    def wait_for_task(
        self, task_id: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> dict[str, Any] | None:
        """The result of one submitted prompt."""

    @abstractmethod
    def rollout_batch(
        self,
        data: Sequence[Mapping[str, Any]],
        workflow: Any,
        workflow_kwargs: Mapping[str, Any] | None = None,
        should_accept_fn: ShouldAcceptFn | str | None = None,
        group_size: int = 1,
    ) -> list[dict[str, Any] | None]:
        """Run all prompts; result i belongs to `data[i]`."""

    @abstractmethod
    def prepare_batch(
        self,
        dataloader: Iterable[Any],
        workflow: Any,
        workflow_kwargs: Mapping[str, Any] | None = None,
        should_accept_fn: ShouldAcceptFn | str | None = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
    ) -> list[dict[str, Any]]:
        """Keep the engine busy from `dataloader` and return one batch of accepted results."""

    @abstractmethod
    def pause(self) -> None:
        """Start no new episodes; finished ones can still be collected."""

    @abstractmethod
    def resume(self) -> None:
        """Start episodes again."""

    @abstractmethod
    def set_version(self, version: int) -> None:
        """Record that the weights are now `version`."""

    @abstractmethod
    def get_version(self) -> int:
        """The current weight version."""

    @abstractmethod
    def export_stats(self) -> dict[str, float]:
        """Counts and means since the last call."""
