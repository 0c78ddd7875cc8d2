"""Draw arithmetic problems, each with the worked solution that the demo model learns to write.

A problem is a first number and a chain of steps, each an operator and an operand. The question
words that chain, as an expression or as a story; the solution works it out. The same seed draws
the same problems.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

Kind = Literal["add1", "add2", "sub2", "mul1", "add3", "word", "word2", "add3d"]
Step = tuple[str, int]

KIND_WEIGHTS: Final[Mapping[Kind, int]] = {
    "add1": 5,
    "add2": 50,
    "sub2": 14,
    "mul1": 6,
    "add3": 8,
    "word": 9,
    "word2": 5,
    "add3d": 3,
}
"""How often `draw_problem` draws each kind, in percent."""

_NAMES: Final = ("Tom", "Ann", "Sam", "Mia", "Leo", "Eva", "Max", "Zoe")
_THINGS: Final = ("apples", "books", "coins", "cards", "pens", "shells")
_PLAIN_WORDING: Final = "What is {}?"
_OTHER_WORDINGS: Final = ("Compute {}.", "{}=?", "Please calculate {}.")
_OPERATORS: Final[Mapping[str, Callable[[int, int], int]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
_BARE_KINDS: Final = frozenset({"add1", "add2", "sub2", "mul1", "add3d"})
"""Kinds solved without working, which could only repeat the question."""
_FINAL_ANSWER: Final = re.compile(r"The answer is (-?\d+)\.$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    kind: Kind
    """Which family the problem belongs to, for accuracy by kind."""
    question: str
    """What the user asks."""
    solution: str
    """The reply to learn: the working where there is any, then "The answer is N."."""
    answer: int
    """The N that a right reply ends with."""

    def is_solved_by(self, reply: str) -> bool:
        """Whether the reply ends in "The answer is N." with the right N; the working may err."""
        match = _FINAL_ANSWER.search(reply.strip())
        return match is not None and int(match.group(1)) == self.answer


def draw_problem(rng: Random, kind: Kind | None = None) -> Problem:
    """Draw a problem of the given kind, or of one drawn by `KIND_WEIGHTS`."""
    if kind is None:
        kind = rng.choices(list(KIND_WEIGHTS), weights=list(KIND_WEIGHTS.values()))[0]
    return _DRAW_BY_KIND[kind](rng)


def _draw_add1(rng: Random) -> Problem:
    return _ask_expression(rng, "add1", start=rng.randint(0, 9), steps=[("+", rng.randint(0, 9))])


def _draw_add2(rng: Random) -> Problem:
    first, second = rng.randint(10, 99), rng.randint(10, 99)
    return _ask_expression(rng, "add2", start=first, steps=[("+", second)])


def _draw_add3d(rng: Random) -> Problem:
    first, second = rng.randint(100, 999), rng.randint(100, 999)
    return _ask_expression(rng, "add3d", start=first, steps=[("+", second)])


def _draw_sub2(rng: Random) -> Problem:
    smaller, larger = sorted((rng.randint(0, 99), rng.randint(0, 99)))
    return _ask_expression(rng, "sub2", start=larger, steps=[("-", smaller)])


def _draw_mul1(rng: Random) -> Problem:
    return _ask_expression(rng, "mul1", start=rng.randint(2, 12), steps=[("*", rng.randint(2, 12))])


def _draw_add3(rng: Random) -> Problem:
    first, second, third = (rng.randint(1, 50) for _ in range(3))
    return _ask_expression(rng, "add3", start=first, steps=[("+", second), ("+", third)])


def _draw_word(rng: Random) -> Problem:
    name, friend = rng.sample(_NAMES, 2)
    things, owned = rng.choice(_THINGS), rng.randint(10, 60)
    if rng.random() < 0.5:
        bought = rng.randint(2, 39)
        question = (
            f"{name} has {owned} {things} and buys {bought} more. "
            f"How many {things} does {name} have?"
        )
        return _solve("word", question, start=owned, steps=[("+", bought)])
    given = rng.randint(1, owned)
    question = (
        f"{name} has {owned} {things} and gives {given} to {friend}. "
        f"How many {things} does {name} have left?"
    )
    return _solve("word", question, start=owned, steps=[("-", given)])


def _draw_word2(rng: Random) -> Problem:
    name, friend = rng.sample(_NAMES, 2)
    things, owned, bought = rng.choice(_THINGS), rng.randint(10, 60), rng.randint(2, 39)
    given = rng.randint(1, owned + bought)
    question = (
        f"{name} has {owned} {things}, buys {bought} more and gives {given} to {friend}. "
        f"How many {things} does {name} have left?"
    )
    return _solve("word2", question, start=owned, steps=[("+", bought), ("-", given)])


_DRAW_BY_KIND: Final[Mapping[Kind, Callable[[Random], Problem]]] = {
    "add1": _draw_add1,
    "add2": _draw_add2,
    "sub2": _draw_sub2,
    "mul1": _draw_mul1,
    "add3": _draw_add3,
    "word": _draw_word,
    "word2": _draw_word2,
    "add3d": _draw_add3d,
}


def _ask_expression(rng: Random, kind: Kind, *, start: int, steps: Sequence[Step]) -> Problem:
    gap = " " if rng.random() < 0.08 else ""
    expression = str(start) + "".join(f"{gap}{sign}{gap}{operand}" for sign, operand in steps)
    wording = _PLAIN_WORDING if rng.random() < 0.75 else rng.choice(_OTHER_WORDINGS)
    return _solve(kind, wording.format(expression), start=start, steps=steps)


def _solve(kind: Kind, question: str, *, start: int, steps: Sequence[Step]) -> Problem:
    working: list[str] = []
    total = start
    for sign, operand in steps:
        result = _OPERATORS[sign](total, operand)
        working.append(f"{total}{sign}{operand}={result}. ")
        total = result
    shown = "" if kind in _BARE_KINDS else "".join(working)
    solution = f"{shown}The answer is {total}."
    return Problem(kind=kind, question=question, solution=solution, answer=total)
