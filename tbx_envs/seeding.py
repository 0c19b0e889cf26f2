"""Named child seeds: everything random is a function of (seed, names), never of the order of calls.

>>> derive(0, "user", "clinic/cancel_visit/003") == derive(0, "user", "clinic/cancel_visit/003")
True
>>> derive(0, "user", 3) == derive(0, "world", 3)
False

Seeds come from SHA-256, so they depend neither on Python's string hashing nor on a library's version.
"""

from __future__ import annotations

import hashlib
import random


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the part of a run called `names` (for example `"user", uid, attempt`)."""
    text = "\x1f".join([str(int(seed)), *(f"{type(name).__name__}:{name}" for name in names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def rng(seed: int, *names: str | int) -> random.Random:
    """A generator of its own for the part of a run called `names`."""
    return random.Random(derive(seed, *names))
