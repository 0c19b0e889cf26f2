"""The alphabet of axes: one letter per axis, the same in names, types, einsums and sharding rules.

`logits_btv` is an array over sequences, token positions and vocabulary; its type is `Float[Array, "b t v"]`, and a
rule `{"v": "tensor"}` of `conf/mesh` splits it over the mesh axis `tensor`. A new axis gets an entry here first.
"""

from __future__ import annotations

LETTERS = {
    "p": "tasks in a batch",
    "g": "attempts at one task (the GRPO group)",
    "b": "sequences in a batch, p * g; in the sampler its slots",
    "t": "token positions being computed",
    "s": "token positions in the cache",
    "j": "token positions computed but not in the cache yet",
    "m": "previous tokens that are still seen: by token shift, or by a delta layer's convolution",
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


def letters_of(axes: str) -> tuple[str, ...]:
    """The letters of an axis string such as `"l d n h"`, each of them known.

    Raises:
        ValueError: a letter that the alphabet does not have.
    """
    letters = tuple(axes.split())
    unknown = [letter for letter in letters if letter not in LETTERS]
    if unknown:
        raise ValueError(
            f"axes {axes!r} use unknown letter(s) {', '.join(map(repr, unknown))}; "
            f"known: {' '.join(LETTERS)}; write letters apart, or add a new axis to tbx_jax.shapes.LETTERS"
        )
    return letters
