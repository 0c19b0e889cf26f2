"""Which shapes the sampler's programs are compiled for: few, and little computed in vain.

Slots are computed in groups, a group is filled up to a number of rows that has been compiled, chunks of tokens and the
part of the cache that is read are rounded up likewise.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence

import jax

# Parameters of up to so many bytes stay in a processor's own cache, so that a row costs the same in a small group as
# in a large one; larger ones are read from memory once for each group.
_SMALL_MODEL = 2**25
# Up to so many slots of a larger model are always computed together.
_FEW_SLOTS = 16
_MAX_THREADS = 4
# Given tokens are computed in chunks of these lengths; what is longer takes several.
CHUNKS = (8, 16, 24, 32, 64, 128)


@dataclasses.dataclass(frozen=True, slots=True)
class DispatchShapes:
    """Sizes that programs are compiled for.

    Attributes:
        write_rows: numbers of rows that write together, ascending.
        prefill_rows: numbers of rows that take tokens in together, ascending.
        chunks: `CHUNKS`.
        max_length: longest episode, which no program needs to read further than.
        threads: dispatches that run at the same time.
    """

    write_rows: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    chunks: tuple[int, ...]
    max_length: int
    threads: int

    @classmethod
    def choose(cls, slots: int, max_length: int, *, parameter_bytes: int, num_devices: int) -> DispatchShapes:
        """Shapes for this many slots on the machine at hand."""
        on_cpu = jax.default_backend() == "cpu"
        small = on_cpu and parameter_bytes <= _SMALL_MODEL
        quarter = -(-slots // 4)
        if small and slots > _FEW_SLOTS:
            write_rows = (-(-slots // 16), quarter)
        elif small:
            write_rows = (-(-slots // 8), -(-slots // 2))
        else:
            write_rows = (quarter, slots) if slots > _FEW_SLOTS else (1, slots)
        return cls(
            write_rows=tuple(sorted(set(write_rows))),
            prefill_rows=tuple(sorted({1 if slots <= _FEW_SLOTS else 4, min(4, slots)} if on_cpu else {1, quarter})),
            chunks=CHUNKS,
            max_length=max_length,
            # Programs that talk between devices must start in the same order on all of them.
            threads=min(_MAX_THREADS, num_cores()) if small and num_devices == 1 else 1,
        )

    def chunk(self, num_tokens: int) -> int:
        """The chunk that holds so many tokens, or the longest there is."""
        return bucket(num_tokens, self.chunks)

    def write_length(self, longest: int) -> int:
        """How much of the cache decode steps read when the longest row has `longest` tokens."""
        return min(length_bucket(longest), self.max_length)

    def prefill_length(self, longest: int) -> int:
        """The same for a chunk of given tokens, for which reading more costs little: 0, 128, 256, 512, ..."""
        return 0 if longest == 0 else min(max(128, 1 << (longest - 1).bit_length()), self.max_length)


def num_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def capacity_for(max_length: int, decode_steps: int) -> int:
    """Positions of a row: a chunk is written as a whole, its invalid part included."""
    return max_length + max(*CHUNKS, decode_steps)


def bucket(size: int, sizes: Sequence[int]) -> int:
    """The smallest of these sizes that holds `size`, or the largest there is."""
    return next((one for one in sizes if one >= size), sizes[-1])


def length_bucket(longest: int) -> int:
    """0, 64, 96, 128, 192, 256, ...: the first that is not less than `longest`."""
    if longest == 0:
        return 0
    length = 64
    while length < longest:
        length += length // 2 if length & (length - 1) == 0 else length // 3
    return length


def in_groups(slots: Sequence[int], rows: int) -> list[list[int]]:
    """The slots in groups of `rows`; the group that is not full goes first.

    It is filled up with slots of later groups, whose results are kept after its own and so replace what it left
    in their rows.
    """
    edges = [0, *range(len(slots) % rows or rows, len(slots), rows), len(slots)]
    return [list(slots[start:end]) for start, end in itertools.pairwise(edges) if start < end]


def filled_up(group: Sequence[int], rows: Sequence[int], num_slots: int) -> list[int]:
    """A group with as many other slots as fill a compiled number of rows, ascending."""
    wanted = bucket(len(group), rows)
    others = (slot for slot in range(num_slots) if slot not in group)
    return sorted([*group, *itertools.islice(others, wanted - len(group))])
