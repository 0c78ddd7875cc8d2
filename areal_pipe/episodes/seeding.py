"""One sampling seed per generation, so that any sample can be replayed alone."""

import hashlib


def derive_seed(base: int, task_id: int, sample_idx: int, turn: int) -> int:
    """A seed in [0, 2**63) from the campaign's base seed and the place of the generation.

    Equal arguments give equal seeds on every machine; different ones are independent draws
    (BLAKE2b of the decimal numbers).
    """
    text = f"{base}/{task_id}/{sample_idx}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
