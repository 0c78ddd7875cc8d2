"""What counts as a reward: one finite number."""

import math
from typing import Any

from areal_pipe.contract.errors import RewardError


def as_reward(value: Any) -> float:
    """The reward as a float.

    Accepts numbers, bools, and one-element numpy arrays or tensors.

    Raises:
        RewardError: None, text, several numbers, NaN or infinity. A failed reward is never 0.
    """
    if isinstance(value, str | bytes) or value is None:
        raise RewardError(f"a reward must be a number, got {value!r}; return 0.0 to mean zero")
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RewardError(f"a reward must be one number, got {type(value)}: {error}") from error
    if not math.isfinite(number):
        raise RewardError(f"a reward must be finite, got {number}")
    return number
