"""Reward functions for the pool of killable processes: they must be importable there.

Each appends a line to the file it is given when it is called: that counts calls across processes.
"""

import os
import time
from pathlib import Path


def _nth_call(calls: str) -> int:
    with Path(calls).open("a") as file:
        file.write("call\n")
    return count_calls(calls)


def count_calls(calls: str | Path) -> int:
    path = Path(calls)
    return len(path.read_text().splitlines()) if path.exists() else 0


def give_one(calls: str) -> float:
    _nth_call(calls)
    return 1.0


def raise_twice_then_give_one(calls: str) -> float:
    if _nth_call(calls) <= 2:
        raise ValueError("bad")
    return 1.0


def raise_always(calls: str) -> float:
    _nth_call(calls)
    raise ValueError("bad")


def sleep_too_long(calls: str) -> float:
    _nth_call(calls)
    time.sleep(1.2)
    return 1.0


def crash(calls: str) -> float:
    _nth_call(calls)
    os._exit(1)


def crash_once_then_give_one(calls: str) -> float:
    if _nth_call(calls) == 1:
        os._exit(1)
    return 1.0
