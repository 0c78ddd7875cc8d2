"""The soft overlong punishment of DAPO, arXiv:2503.14476, equation 13."""


def overlong_penalty(
    num_generated: int,
    *,
    max_response_length: int,
    overlong_tokens: int,
    factor: float = 1.0,
) -> float:
    """What to add to a response's reward for its length: 0, then a line down to `-factor`.

    Args:
        num_generated: tokens of the response, without its prompt.
        max_response_length: from this length on, the penalty is whole (L_max in the paper).
        overlong_tokens: length of the interval before it in which the penalty grows (L_cache).
        factor: the whole penalty; the paper's is 1.

    Raises:
        ValueError: `overlong_tokens` is outside 1..max_response_length, or a negative number came.
    """
    if not 1 <= overlong_tokens <= max_response_length:
        raise ValueError(
            f"overlong_tokens must be in 1..max_response_length={max_response_length}, "
            f"got {overlong_tokens}"
        )
    if num_generated < 0 or not factor >= 0:
        raise ValueError(f"num_generated and factor must be >= 0, got {num_generated} and {factor}")
    excess = num_generated - (max_response_length - overlong_tokens)
    return -factor * min(excess, overlong_tokens) / overlong_tokens if excess > 0 else 0.0
