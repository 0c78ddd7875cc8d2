"""Train the demo policy, a Llama of about 0.9 million parameters that answers arithmetic.

It learns from problems drawn as it goes; nothing is downloaded. The folder that it writes is in
Hugging Face form: bf16 weights, a byte-level BPE tokenizer with a ChatML template, and
`train_report.json`. Training stops when two-digit addition, sampled at temperature 1, reaches the
target. The default leaves a model that is often right and often wrong, as a group-relative RL demo
needs, and takes three to four minutes on one CPU core; a target above 1 runs the whole schedule.
Needs torch 2.9 or newer, for Muon.

    python -m infra.demo_model.train --out configs/models/tiny-arith
"""

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from infra.demo_model.arithmetic import KIND_WEIGHTS, Kind, Problem, draw_problem

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PAD_ID, TURN_END_ID = 0, 2
"""Ids of `PAD` and `TURN_END`: special tokens take the first ids, in the order above."""
CHAT_TEMPLATE: Final = (
    r"{% for m in messages %}"
    r"{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    r"{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MAX_LENGTH: Final = 512
BATCH_SIZE: Final = 96
PEAK_LEARNING_RATE: Final = 3e-3
WARMUP_STEPS: Final = 100
EVALUATE_EVERY_STEPS: Final = 50
GROUP_SIZE: Final = 8
"""Replies sampled to each problem in an evaluation."""
IGNORED_LABEL: Final = -100  # What cross_entropy leaves out unless told otherwise.


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast

    def encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

    def encode_prompts(self, problems: Sequence[Problem]) -> list[list[int]]:
        chats = [[{"role": "user", "content": problem.question}] for problem in problems]
        render = self.tokenizer.apply_chat_template
        return self.encode(render(chats, add_generation_prompt=True, tokenize=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    input_ids: torch.Tensor
    """int64 [batch, length], padded on the right, where causal attention needs no mask."""
    labels: torch.Tensor
    """int64 [batch, length], `IGNORED_LABEL` on prompts and padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    accuracy: float
    """Share of replies that are right."""
    mixed_groups: float
    """Share of groups with right and wrong replies; only those move a group-relative loss."""


def learn_bpe(rng: Random) -> Tokenizer:
    """A byte-level BPE learned from drawn conversations; each digit is a token of its own."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=byte_level.alphabet(),
        max_token_length=12,
        show_progress=False,
    )
    conversation = "system\nYou are a helpful assistant.\nuser\n{}\nassistant\n{}"
    problems = [draw_problem(rng) for _ in range(20_000)]
    bpe.train_from_iterator(
        [conversation.format(p.question, p.solution) for p in problems], trainer
    )
    return bpe


def build_tokenizer(rng: Random) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=learn_bpe(rng),
        eos_token=TURN_END,
        pad_token=PAD,
        unk_token=PAD,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(vocabulary_size: int) -> LlamaForCausalLM:
    """Untied embeddings: code that syncs or shards weights then meets an `lm_head` of its own."""
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=TURN_END_ID,
        pad_token_id=PAD_ID,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        max_new_tokens=64,
        eos_token_id=TURN_END_ID,
        pad_token_id=PAD_ID,
    )
    return model


def build_micro_batch(policy: Policy, problems: Sequence[Problem]) -> MicroBatch:
    prompts = policy.encode_prompts(problems)
    replies = policy.encode([problem.solution + TURN_END for problem in problems])
    pairs = list(zip(prompts, replies, strict=True))
    rows = [torch.tensor(prompt + reply) for prompt, reply in pairs]
    labels = [torch.tensor([IGNORED_LABEL] * len(prompt) + reply) for prompt, reply in pairs]
    return MicroBatch(
        input_ids=pad_sequence(rows, batch_first=True, padding_value=PAD_ID),
        labels=pad_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL),
    )


def draw_batch(policy: Policy, rng: Random) -> list[MicroBatch]:
    """Two micro-batches, the short problems and the long ones, which saves padding."""
    problems = [draw_problem(rng) for _ in range(BATCH_SIZE)]
    problems.sort(key=lambda problem: len(problem.question) + len(problem.solution))
    half = BATCH_SIZE // 2
    return [build_micro_batch(policy, problems[:half]), build_micro_batch(policy, problems[half:])]


def accumulate_gradients(model: LlamaForCausalLM, batch: Sequence[MicroBatch]) -> float:
    """Add the gradients of the mean loss per reply token over the whole batch; return it."""
    num_targets = sum(int(part.labels.ne(IGNORED_LABEL).sum()) for part in batch)
    batch_loss = 0.0
    for part in batch:
        logits = model(input_ids=part.input_ids).logits[:, :-1].flatten(0, 1)
        targets = part.labels[:, 1:].flatten()
        loss = cross_entropy(logits, targets, reduction="sum") / num_targets
        loss.backward()
        batch_loss += loss.item()
    return batch_loss


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the input embeddings and the norms."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def apply_gradients(
    model: LlamaForCausalLM, optimizers: Sequence[torch.optim.Optimizer], *, rate: float
) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()


def learning_rate_at(step: int, *, max_steps: int) -> float:
    """Linear warm-up into a cosine that ends at a twentieth of the peak."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / max_steps))
    return PEAK_LEARNING_RATE * min(1.0, step / WARMUP_STEPS) * (0.05 + 0.95 * cosine)


def train(policy: Policy, rng: Random, *, target: float, max_steps: int) -> int:
    """Train in place up to the target or the end of the schedule; return the steps taken."""
    optimizers = build_optimizers(policy.model)
    for step in range(1, max_steps + 1):
        loss = accumulate_gradients(policy.model, draw_batch(policy, rng))
        apply_gradients(policy.model, optimizers, rate=learning_rate_at(step, max_steps=max_steps))
        if step % EVALUATE_EVERY_STEPS == 0:
            accuracy = evaluate(policy, "add2").accuracy
            print(f"step {step}: loss {loss:.3f}, add2 accuracy {accuracy:.2f}", flush=True)
            if accuracy >= target:
                return step
    return max_steps


@torch.no_grad()
def sample_replies(policy: Policy, problems: Sequence[Problem]) -> list[str]:
    """`GROUP_SIZE` replies to each problem at temperature 1, those to one problem side by side."""
    prompts = [torch.tensor(prompt) for prompt in policy.encode_prompts(problems)]
    # Padded here: the tokenizer would keep its padding switched on, and be saved so.
    input_ids = pad_sequence(prompts, batch_first=True, padding_value=PAD_ID, padding_side="left")
    output = policy.model.generate(
        input_ids=input_ids,
        attention_mask=input_ids.ne(PAD_ID).long(),
        num_return_sequences=GROUP_SIZE,
        top_k=0,
    )
    return policy.tokenizer.batch_decode(output[:, input_ids.shape[1] :], skip_special_tokens=True)


def evaluate(policy: Policy, kind: Kind) -> Score:
    """Grade sampled replies to 32 problems of the kind, the same problems at each call."""
    rng = Random(1)
    problems = [draw_problem(rng, kind) for _ in range(32)]
    replies = sample_replies(policy, problems)
    asked = [problem for problem in problems for _ in range(GROUP_SIZE)]
    right = [problem.is_solved_by(reply) for problem, reply in zip(asked, replies, strict=True)]
    groups = torch.tensor(right).view(-1, GROUP_SIZE)
    mixed = groups.any(dim=1) & ~groups.all(dim=1)
    return Score(accuracy=groups.float().mean().item(), mixed_groups=mixed.float().mean().item())


def save_policy(policy: Policy, folder: Path) -> None:
    """Save in bf16, in a form that transformers 4 and 5 both load."""
    policy.model.to(torch.bfloat16)
    policy.model.config.dtype = torch.bfloat16
    policy.model.save_pretrained(folder)
    policy.tokenizer.backend_tokenizer.no_padding()
    # Not to a file of its own: only later releases of transformers 4 read a template from there.
    policy.tokenizer.save_pretrained(folder, save_jinja_files=False)
    add_keys(folder / "config.json", {"rope_theta": 10000.0, "torch_dtype": "bfloat16"})
    add_keys(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def add_keys(path: Path, keys: Mapping[str, object]) -> None:
    """Set the keys that transformers 4 reads and transformers 5 no longer writes."""
    document = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(document | keys, indent=2) + "\n", "utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m infra.demo_model.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder to write the model to")
    add("--target", type=float, default=0.8, help="add2 accuracy that ends training (%(default)s)")
    add("--max-steps", type=int, default=1100, help="length of the schedule (%(default)s)")
    add("--seed", type=int, default=0, help="fixes problems, weights and samples (%(default)s)")
    add("--threads", type=int, default=1, help="CPU threads for torch (%(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    started = time.monotonic()
    rng = Random(arguments.seed)
    tokenizer = build_tokenizer(rng)
    policy = Policy(model=build_model(len(tokenizer)), tokenizer=tokenizer)
    steps = train(policy, rng, target=arguments.target, max_steps=arguments.max_steps)
    report = {
        "seed": arguments.seed,
        "target": arguments.target,
        "max_steps": arguments.max_steps,
        "steps": steps,
        "wall_seconds": round(time.monotonic() - started, 1),
        "parameters": policy.model.num_parameters(),
        "scores_at_temperature_1": {kind: asdict(evaluate(policy, kind)) for kind in KIND_WEIGHTS},
    }
    save_policy(policy, arguments.out)
    (arguments.out / "train_report.json").write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    print(f"saved to {arguments.out} after {steps} steps")


if __name__ == "__main__":
    main()
