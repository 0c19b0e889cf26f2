"""Logical axes: one letter for each, the same in variable names, types, einsums and sharding rules.

`logits_btv` is an array over sequences, token positions and vocabulary; its type is `Float[Array, "b t v"]`, and a
rule `{"v": "tensor"}` of `conf/mesh` splits it over the mesh axis `tensor`. A new axis gets an entry here first.
"""

from __future__ import annotations

import jax
import numpy as np

# Records that are built on the host and read on the devices have arrays of either kind.
HostOrDevice = np.ndarray | jax.Array

LOGICAL_AXES = {
    "p": "tasks in a batch",
    "g": "attempts at one task (the GRPO group)",
    "b": "sequences in a batch, p * g; in the sampler the rows of its cache",
    "t": "token positions being computed",
    "s": "token positions in the cache",
    "j": "token positions computed but not committed to the cache yet",
    "m": "previous tokens that token shift or a delta layer's convolution still reads",
    "l": "layers",
    "d": "model width",
    "n": "query heads, k * r",
    "k": "key-value heads",
    "r": "query heads per key-value head",
    "q": "queries of one key-value head, r * t",
    "h": "width of one head",
    "f": "feed-forward width",
    "v": "vocabulary",
    "o": "a query beside its output gate, 2 * h (hybrid models)",
    "e": "delta layers before each attention layer (hybrid models; the rest is about delta layers)",
    "c": "channels of the convolution: queries, keys and values",
    "w": "taps of the convolution",
    "u": "heads, each with a memory",
    "x": "width of a key: rows of a memory",
    "y": "width of a value: columns of a memory",
    "a": "chunks of t in the delta rule",
    "i": "token positions in such a chunk; j is the earlier of two",
}


def parse_axes(axes: str) -> tuple[str, ...]:
    """The logical axes in a string such as `"l d n h"`.

    Raises:
        ValueError: an axis that is not in `LOGICAL_AXES`.
    """
    names = tuple(axes.split())
    unknown = [name for name in names if name not in LOGICAL_AXES]
    if unknown:
        raise ValueError(
            f"axes {axes!r} use unknown logical axes {', '.join(map(repr, unknown))}; "
            f"known: {' '.join(LOGICAL_AXES)}; write letters apart, or add a new axis to tbx_jax.shapes.LOGICAL_AXES"
        )
    return names
