"""Rewards for answers that are numbers or formulas, judged by math-verify.

All take AReaL's arguments: `fn(prompt, completions, prompt_ids, completion_ids, answer, **data)`.
math-verify's own alarms are switched off: the pool's time limit kills what hangs, and a hang is
then a failed reward instead of a silent 0.
"""

import logging
import re
from typing import Any

from math_verify.grader import verify
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig, parse

logger = logging.getLogger(__name__)

# math-verify warns on every call that its timeouts are off; that is the point.
logging.getLogger("math_verify.parser").setLevel(logging.ERROR)
logging.getLogger("math_verify.grader").setLevel(logging.ERROR)

_BRACKETS = re.compile(r"\[([^\]]+)\]")
_DIGITS_IN_BRACKETS = re.compile(r"\[([0-9\.]+)\]")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class MathVerifyWorker:
    """Compares a response with a ground truth by extracting and comparing expressions."""

    def __init__(self, try_extract_without_anchor: bool = True, precision: int = 6) -> None:
        """
        Args:
            try_extract_without_anchor: take a bare number too, not just one after "answer is".
            precision: decimal places at which numbers count as equal.
        """
        self._precision = precision
        self._targets = (
            ExprExtractionConfig(try_extract_without_anchor=try_extract_without_anchor),
            LatexExtractionConfig(),
        )

    def verify(self, response: str, ground_truth: str) -> float:
        """1.0 if the response's answer equals the ground truth, else 0.0.

        A ground truth in which nothing can be parsed equals nothing; a warning names it.
        """
        gold = self._parse(ground_truth)
        if not gold:
            logger.warning("no answer could be parsed from the ground truth %r", ground_truth)
            return 0.0
        return float(verify(gold, self._parse(response), self._precision, timeout_seconds=None))

    def _parse(self, text: str) -> list[Any]:
        no_alarm: Any = None  # declared int, documented and tested as optional
        return parse(text, self._targets, parsing_timeout=no_alarm)


_worker = MathVerifyWorker()


def gsm8k_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    answer: Any,
    **data: Any,
) -> float:
    """1.0 if the completion's final answer equals `answer` (a plain number or `#### 18`)."""
    return _worker.verify(str(completions), str(answer))


def geometry3k_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    answer: Any,
    **data: Any,
) -> float:
    """1.0 if the last `[bracketed]` answer, or else the last number, equals `answer`."""
    extracted = extract_bracketed_answer(str(completions))
    if not extracted or answer is None:
        return 0.0
    gold = extract_bracketed_answer(str(answer)) or str(answer)
    return _worker.verify(extracted, gold)


def extract_bracketed_answer(text: str) -> str:
    """Content of the last `[...]`, else the last number with its thousands commas removed."""
    if found := _BRACKETS.findall(text):
        return found[-1].strip()
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else ""


def clevr_count_70k_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    answer: Any,
    **data: Any,
) -> float:
    """1.0 if the last `[number]` of the completion is `answer`, character by character."""
    found = _DIGITS_IN_BRACKETS.findall(str(completions))
    if not found or answer is None:
        return 0.0
    return float(found[-1].strip() == str(answer).strip())
