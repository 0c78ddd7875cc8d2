"""Write a JSONL file of distinct arithmetic prompts for the demo model, mostly two-digit addition.

Each row is {"messages": [{"role": "user", "content": question}], "answer": "N", "kind": kind}.
The kinds are those that the demo model answers rightly some of the time, so that many a group of
samples holds right and wrong replies.

    python -m infra.demo_model.make_dataset --out configs/data/arithmetic.jsonl
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Final

from infra.demo_model.arithmetic import Kind, Problem, draw_problem

PROMPT_WEIGHTS: Final[Mapping[Kind, int]] = {
    "add2": 60,
    "sub2": 15,
    "mul1": 10,
    "add3": 10,
    "add1": 5,
}
"""How often each kind is drawn, in percent; small kinds run out of new questions in a large set."""

DRAWS_PER_PROMPT: Final = 20
"""Draws allowed for each prompt asked for, before the questions count as exhausted."""


def draw_distinct(rng: Random, count: int) -> list[Problem]:
    """Draw problems by `PROMPT_WEIGHTS` until `count` questions differ."""
    kinds, weights = list(PROMPT_WEIGHTS), list(PROMPT_WEIGHTS.values())
    by_question: dict[str, Problem] = {}
    for _ in range(DRAWS_PER_PROMPT * count):
        problem = draw_problem(rng, rng.choices(kinds, weights=weights)[0])
        by_question.setdefault(problem.question, problem)
        if len(by_question) == count:
            return list(by_question.values())
    raise ValueError(
        f"questions must be distinct, got {len(by_question)} of the {count} asked for "
        f"after {DRAWS_PER_PROMPT} draws each; ask for fewer prompts"
    )


def to_row(problem: Problem) -> str:
    """One line of the file, without its newline."""
    messages = [{"role": "user", "content": problem.question}]
    return json.dumps({"messages": messages, "answer": str(problem.answer), "kind": problem.kind})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m infra.demo_model.make_dataset",
        description="Write distinct arithmetic prompts with their answers, one JSON row a line.",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="JSONL file to write or overwrite")
    add("--prompts", type=int, default=64, metavar="N", help="rows to write (%(default)s)")
    add("--seed", type=int, default=7, help="the same seed writes the same file (%(default)s)")
    arguments = parser.parse_args()
    if arguments.prompts < 1:
        parser.error(f"--prompts must be 1 or more, got {arguments.prompts}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    problems = draw_distinct(Random(arguments.seed), arguments.prompts)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("".join(to_row(problem) + "\n" for problem in problems), "utf-8")
    print(f"wrote {len(problems)} prompts to {arguments.out}")


if __name__ == "__main__":
    main()
