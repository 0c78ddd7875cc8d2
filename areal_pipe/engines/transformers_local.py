"""A transformers model in this process: the engine for laptops, CI and small models.

Requests that arrive while a batch is being generated form the next one (dynamic batching). Each is
answered as soon as its own row ends; ended rows cost nothing but the padding of the batch.
Tokens come from `sampling`, so that every request has its own temperature, limits and seed.
"""

import asyncio
import json
import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils.logging import disable_progress_bar

from areal_pipe.contract.engine import ModelRequest, ModelResponse
from areal_pipe.contract.errors import ConfigError, EngineError, EngineUnavailable, RequestError
from areal_pipe.engines.sampling import RowState, check_supported, sample
from areal_pipe.rollout.executor_config import ExecutorConfig
from areal_pipe.rollout.rollout_engine import RolloutEngine

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_CONFIG_FILE = "config.json"


class TransformersEngine(RolloutEngine):
    """Generates with `transformers`; logprobs are those of the distribution sampled from."""

    logprobs_mode = "processed"

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        max_batch_size: int = 64,
        gather_seconds: float = 0.002,
        num_threads: int | None = None,
        executor_config: ExecutorConfig | None = None,
    ) -> None:
        """
        Args:
            model_path: folder of a causal language model with its tokenizer, or a hub name.
            dtype: weights and activations; `float32` makes logprobs exact to about 1e-6.
            device: a torch device.
            max_batch_size: requests generated together.
            gather_seconds: how long a new batch waits for further requests.
            num_threads: torch threads of this process; one is fastest for tiny models.
        """
        super().__init__(executor_config)
        if dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        _check_device(device)
        self._model_path = model_path
        self._dtype, self._device = dtype, device
        self._max_batch_size = max_batch_size
        self._gather_seconds = gather_seconds
        self._num_threads = num_threads
        self._requests: queue.Queue[_Pending | None] = queue.Queue()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._model: Any = None
        self._eos_ids: tuple[int, ...] = ()
        self._context: int | None = None
        """Of the model's configuration, once it was read; 0: it does not say."""
        self.tokenizer: Any = None

    def initialize(self) -> None:
        """Load the model and start the generating thread.

        Raises:
            ConfigError: there is no such model.
        """
        if self._model is not None:
            return
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        self.tokenizer = load_tokenizer(self._model_path)
        self._model = _load_model(self._model_path, DTYPES[self._dtype]).to(self._device).eval()
        self._eos_ids = _eos_ids_of(self._model, self.tokenizer)
        # The model's own defaults (end of sequence, repetition penalty) would be mixed into ours.
        self._model.generation_config = GenerationConfig()
        self._thread = threading.Thread(target=self._generate_forever, name="generate", daemon=True)
        self._thread.start()

    def destroy(self) -> None:
        super().destroy()
        if self._thread is not None:
            self._stopping.set()
            self._requests.put(None)
            self._thread.join(timeout=60)
            self._thread = self._model = None
            self._stopping.clear()

    def context_length(self) -> int | None:
        if self._context is None:
            self._context = _context_of(self._model_path)
        return self._context or None

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"dtype": self._dtype, "model": self._model_path}

    async def generate_segment(self, req: ModelRequest) -> ModelResponse:
        if self._model is None or self._stopping.is_set():
            raise EngineError("the engine is not initialized; call initialize() first")
        self._check(req)
        pending = _Pending(req)
        self._requests.put(pending)
        try:
            return await asyncio.wrap_future(pending.answer)
        finally:
            pending.abandoned = True  # nobody waits any more: cancelled, or answered

    def _check(self, req: ModelRequest) -> None:
        check_supported(req.gconfig)
        vocabulary = int(self._model.config.vocab_size)
        if not req.input_ids or min(req.input_ids) < 0 or max(req.input_ids) >= vocabulary:
            raise RequestError(
                f"a prompt must hold token ids in 0..{vocabulary - 1}, got "
                f"{len(req.input_ids)} ids: {req.input_ids[:8]}"
            )
        context = self.context_length()
        needed = len(req.input_ids) + req.gconfig.max_new_tokens
        if context is not None and needed > context:
            raise RequestError(
                f"prompt and max_new_tokens must fit into the context of {context} tokens, got "
                f"{len(req.input_ids)} + {req.gconfig.max_new_tokens}; shorten the prompt or lower "
                "max_new_tokens or max_tokens"
            )

    # -- the generating thread --

    def _generate_forever(self) -> None:
        while not self._stopping.is_set():
            batch = self._next_batch()
            if batch:
                self._answer(batch)
        while not self._requests.empty():
            pending = self._requests.get()
            if pending is not None and pending.answer.set_running_or_notify_cancel():
                pending.answer.set_exception(_destroyed())

    def _next_batch(self) -> list["_Pending"]:
        """Requests that wait now or arrive within `gather_seconds`; empty when told to stop."""
        batch = [self._requests.get()]
        deadline = time.monotonic() + self._gather_seconds
        while len(batch) < self._max_batch_size and batch[-1] is not None:
            try:
                batch.append(self._requests.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                break
        # A request whose episode was cancelled while it queued is not worth generating.
        return [p for p in batch if p is not None and p.answer.set_running_or_notify_cancel()]

    def _answer(self, batch: Sequence["_Pending"]) -> None:
        try:
            self._generate(batch)
            for pending in batch:
                if not pending.answer.done():
                    pending.answer.set_exception(_destroyed())
        # The boundary of the thread: whatever breaks a batch is the answer to its requests.
        except Exception as error:
            logger.exception("generation of a batch of %d failed", len(batch))
            for pending in batch:
                if not pending.answer.done():
                    pending.answer.set_exception(
                        EngineError(f"generation failed: {type(error).__name__}: {error}")
                    )

    def _generate(self, batch: Sequence["_Pending"]) -> None:
        prompts = [pending.req.input_ids for pending in batch]
        longest = max(len(ids) for ids in prompts)
        pad = self.tokenizer.pad_token_id or 0
        padded = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        running = _Batch([self._row(p.req) for p in batch], batch, self._stopping)
        with torch.inference_mode():
            self._model.generate(
                input_ids=padded.to(self._device),
                attention_mask=mask.to(self._device),
                generation_config=GenerationConfig(
                    do_sample=False,
                    max_new_tokens=max(p.req.gconfig.max_new_tokens for p in batch),
                    pad_token_id=pad,
                    eos_token_id=None,
                    use_cache=True,
                ),
                logits_processor=LogitsProcessorList([_Sampler(running)]),
                stopping_criteria=StoppingCriteriaList([_RowsEnded(running)]),
            )

    def _row(self, req: ModelRequest) -> RowState:
        g = req.gconfig
        eos = () if g.ignore_eos else self._eos_ids
        return RowState(
            gconfig=g,
            stop_ids=frozenset((*eos, *g.stop_token_ids)),
            decode=lambda tokens: cast(str, self.tokenizer.decode(tokens)),
        )


class _Pending:
    """A request and who waits for its answer."""

    def __init__(self, req: ModelRequest) -> None:
        self.req = req
        self.answer: Future[ModelResponse] = Future()
        self.abandoned = False


def _destroyed() -> EngineError:
    return EngineUnavailable("the engine was destroyed while this request was under way")


class _Batch:
    """Rows being generated together, answered one by one as they end."""

    def __init__(
        self, rows: Sequence[RowState], pending: Sequence[_Pending], stopping: threading.Event
    ) -> None:
        self._rows, self._pending, self._stopping = rows, pending, stopping
        self._started = time.perf_counter()

    def step(self, logits: Tensor) -> Tensor:
        """Sample for the rows that go on; returns the next token of every row."""
        alive = [i for i, ended in enumerate(self._ended_rows()) if not ended]
        chosen = torch.zeros(len(self._rows), dtype=torch.int64)
        if not alive:
            return chosen
        tokens, logprobs = sample(logits[alive].cpu(), [self._rows[i] for i in alive])
        chosen[alive] = tokens
        for i, token, logprob in zip(alive, tokens.tolist(), logprobs.tolist(), strict=True):
            self._rows[i].append(token, logprob)
            if self._rows[i].stop_reason is not None:
                self._finish(i)
        return chosen

    def ended(self) -> Tensor:
        return torch.tensor(self._ended_rows())

    def _ended_rows(self) -> list[bool]:
        """Rows that stopped, that nobody waits for, or all when the engine is being destroyed."""
        stopping = self._stopping.is_set()
        return [
            stopping or row.stop_reason is not None or pending.abandoned
            for row, pending in zip(self._rows, self._pending, strict=True)
        ]

    def _finish(self, i: int) -> None:
        row, pending = self._rows[i], self._pending[i]
        pending.answer.set_result(
            ModelResponse(
                input_tokens=list(pending.req.input_ids),
                output_tokens=row.tokens,
                output_logprobs=row.logprobs,
                stop_reason=row.stop_reason or "stop",
                tokenizer=pending.req.tokenizer,
                latency=time.perf_counter() - self._started,
            )
        )


class _Sampler(LogitsProcessor):
    """Samples, then leaves `generate` no choice: its argmax is our token."""

    def __init__(self, batch: _Batch) -> None:
        self._batch = batch

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        chosen = self._batch.step(scores).to(scores.device)
        forced = torch.full_like(scores, -torch.inf)
        return forced.scatter_(1, chosen[:, None], 0.0)


class _RowsEnded(StoppingCriteria):
    def __init__(self, batch: _Batch) -> None:
        self._batch = batch

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return self._batch.ended().to(input_ids.device)


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model, with padding and truncation switched off.

    Raises:
        ConfigError: there is none.
    """
    _check_folder(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer at {path!r}: {_first_line(error)}") from error
    # A saved padding strategy would silently pad every prompt.
    if hasattr(tokenizer, "backend_tokenizer"):
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.backend_tokenizer.no_truncation()
    return tokenizer


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ConfigError(f"engine.device must be a torch device: {_first_line(error)}") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"engine.device is {device!r}, but torch {torch.__version__} sees no GPU here; use "
            "engine.device=cpu, or install torch with CUDA on a machine that has one"
        )


def _context_of(path: str) -> int:
    _check_folder(path)
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no model at {path!r}: {_first_line(error)}") from error
    return int(getattr(config, "max_position_embeddings", 0) or 0)


def _load_model(path: str, dtype: torch.dtype) -> Any:
    disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no model at {path!r}: {_first_line(error)}") from error


def _eos_ids_of(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a sequence: those the model declares, and the tokenizer's."""
    declared = model.generation_config.eos_token_id
    ids = cast(list[int], declared) if isinstance(declared, list) else [declared]
    return tuple({i for i in (*ids, tokenizer.eos_token_id) if i is not None})


def _check_folder(path: str) -> None:
    """A path that looks like a folder must be one: a hub lookup would only blur the error."""
    folder = Path(path)
    if not folder.is_dir() and (
        folder.is_absolute() or path.startswith(".") or path.count("/") > 1
    ):
        raise ConfigError(f"the model folder {path!r} does not exist")
    if folder.is_dir() and not (folder / _CONFIG_FILE).is_file():
        raise ConfigError(f"the model folder {path!r} holds no {_CONFIG_FILE}")
    if folder.is_dir():
        _check_json(folder / _CONFIG_FILE)


def _check_json(path: Path) -> None:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no valid JSON: {error}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
