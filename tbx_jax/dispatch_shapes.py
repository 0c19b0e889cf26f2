"""Which shapes the sampler's programs are compiled for: few, and little computed in vain.

Slots are computed in groups, a group is filled up to a number of rows that has been compiled, chunks of tokens and the
part of the cache that is read are rounded up likewise.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence

import jax

# Parameters of up to so many bytes stay in a processor's own cache, so that a row costs the same in a small group as
# in a large one; larger ones are read from memory once for each group.
_SMALL_MODEL = 2**25
# Up to so many slots of a larger model are always computed together.
_FEW_SLOTS = 16
_MAX_THREADS = 4
# Given tokens are computed in chunks of these lengths; what is longer takes several.
CHUNKS = (8, 16, 24, 32, 48, 64, 96, 128)


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
            prefill_rows=tuple(sorted({1, min(4, slots) if on_cpu else quarter})),
            chunks=CHUNKS,
            max_length=max_length,
            # Programs that talk between devices must start in the same order on all of them.
            threads=min(_MAX_THREADS, num_cores()) if small and num_devices == 1 else 1,
        )

    def chunk(self, num_tokens: int) -> int:
        """The chunk that holds so many tokens, or the longest there is."""
        return bucket(num_tokens, self.chunks)

    def prefill_groups(self, num_tokens: Mapping[int, int]) -> list[list[int]]:
        """Slots that take tokens in together, longest first: those of one chunk, and shorter ones where rows are left.

        Only the last group may be smaller than a compiled number of rows.

        Args:
            num_tokens: slot -> how many tokens it is to take in.
        """
        left = sorted(num_tokens, key=lambda slot: (-num_tokens[slot], slot))
        groups = []
        while left:
            chunk = self.chunk(num_tokens[left[0]])
            alike = sum(self.chunk(num_tokens[slot]) == chunk for slot in left)
            rows = bucket(alike, self.prefill_rows)
            groups.append(left[:rows])
            left = left[rows:]
        return groups

    def write_length(self, longest: int) -> int:
        """How much of the cache decode steps read when the longest row has `longest` tokens."""
        return min(length_bucket(longest), self.max_length)

    def prefill_length(self, longest: int) -> int:
        """The same for a chunk of given tokens; for short rows one program does."""
        return min(max(length_bucket(longest), 128), self.max_length) if longest else 0


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
    """The slots in groups of `rows`; only the last may be smaller."""
    return [list(slots[start : start + rows]) for start in range(0, len(slots), rows)]


def filled_up(group: Sequence[int], rows: Sequence[int], num_slots: int) -> list[int]:
    """A group with as many other slots as fill a compiled number of rows, ascending.

    What is kept for the others leaves their rows as they were when it was computed: keep it before their own news.
    """
    wanted = bucket(len(group), rows)
    others = (slot for slot in range(num_slots) if slot not in group)
    return sorted([*group, *itertools.islice(others, wanted - len(group))])
