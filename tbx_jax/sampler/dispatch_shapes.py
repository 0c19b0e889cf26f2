"""Which shapes the sampler's programs are compiled for: few, and little computed in vain.

Slots are computed in groups, a group is filled up to a number of rows that has been compiled, chunks of tokens and the
part of the cache that is taken out are rounded up likewise.
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
# Up to so many slots are parted into fewer groups.
_FEW_SLOTS = 16
_MAX_THREADS = 4
# What dispatches of a small model take out of the cache should stay near the processor until the last step, for each
# thread: beyond so many bytes it is read from memory in every step, and memory that is new to the process costs more.
_TAKEN_OUT = 12 * 2**20
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
        in_place: the cache is read where it lies, whatever the length; otherwise a part of it is taken out.
        most_positions: rows times positions that are taken out together; None is any number.
    """

    write_rows: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    chunks: tuple[int, ...]
    max_length: int
    threads: int
    in_place: bool
    most_positions: int | None

    @classmethod
    def choose(
        cls, slots: int, max_length: int, *, parameter_bytes: int, position_bytes: int, num_devices: int
    ) -> DispatchShapes:
        """Shapes for this many slots on the machine at hand.

        Args:
            parameter_bytes: of the model, on one device.
            position_bytes: of a token in the cache.
        """
        on_cpu = jax.default_backend() == "cpu"
        small = on_cpu and parameter_bytes <= _SMALL_MODEL
        in_place = on_cpu and not small  # an accelerator would wait for the host before each block
        quarter = -(-slots // 4)
        if in_place:  # one program for each, since they serve all lengths
            write_rows, prefill_rows = halvings(slots), halvings(min(4, slots))
        elif small:
            write_rows = (-(-slots // 16), quarter) if slots > _FEW_SLOTS else (-(-slots // 8), -(-slots // 2))
            prefill_rows = (1, min(4, slots))
        else:
            write_rows = (quarter, slots) if slots > _FEW_SLOTS else (1, slots)
            prefill_rows = (1, quarter)
        return cls(
            write_rows=tuple(sorted(set(write_rows))),
            prefill_rows=tuple(sorted(set(prefill_rows))),
            chunks=CHUNKS,
            max_length=max_length,
            # Programs that talk between devices must start in the same order on all of them.
            threads=min(_MAX_THREADS, num_cores()) if small and num_devices == 1 else 1,
            in_place=in_place,
            most_positions=_TAKEN_OUT // position_bytes if small else None,
        )

    def chunk(self, num_tokens: int) -> int:
        """The chunk that holds so many tokens, or the longest there is."""
        return bucket(num_tokens, self.chunks)

    def write_groups(self, lengths: Mapping[int, int]) -> list[tuple[list[int], int]]:
        """Slots that write together, shortest first, each group with the number of rows that is compiled for it.

        The further a group reads, the fewer are in it. Only the last may be smaller than its number of rows.

        Args:
            lengths: slot -> tokens that its row holds.
        """
        left = sorted(lengths, key=lambda slot: (lengths[slot], slot))
        groups = []
        while left:
            rows = self.write_rows[-1]
            while self._too_many(rows, self.write_length(lengths[left[:rows][-1]])):
                rows = -(-rows // 2)
            group, left = left[:rows], left[rows:]
            groups.append((group, bucket(len(group), (*(few for few in self.write_rows if few < rows), rows))))
        return groups

    def prefill_groups(self, num_tokens: Mapping[int, int], lengths: Mapping[int, int]) -> list[list[int]]:
        """Slots that take tokens in together, longest first: those of one chunk, and shorter ones where rows are left.

        Only the last group may be smaller than a compiled number of rows.

        Args:
            num_tokens: slot -> how many tokens it is to take in.
            lengths: slot -> tokens that its row holds.
        """
        left = sorted(num_tokens, key=lambda slot: (-num_tokens[slot], slot))
        groups = []
        while left:
            chunk = self.chunk(num_tokens[left[0]])
            alike = sum(self.chunk(num_tokens[slot]) == chunk for slot in left)
            rows = bucket(alike, self.prefill_rows)
            if self._too_many(rows, self.prefill_length(max(lengths[slot] for slot in left[:rows]))):
                rows = self.prefill_rows[0]
            groups.append(left[:rows])
            left = left[rows:]
        return groups

    def write_length(self, longest: int) -> int | None:
        """How much of the cache decode steps take out when the longest row has `longest` tokens; None is in place."""
        return None if self.in_place else min(length_bucket(longest), self.max_length)

    def prefill_length(self, longest: int) -> int | None:
        """The same for a chunk of given tokens; for short rows one program does."""
        if self.in_place:
            return None
        return min(max(length_bucket(longest), 128), self.max_length) if longest else 0

    def _too_many(self, rows: int, length: int | None) -> bool:
        """Whether these rows had better not be taken out together to this length."""
        return rows > 1 and bool(self.most_positions and length) and rows * length > self.most_positions


def num_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def capacity_for(max_length: int, decode_steps: int) -> int:
    """Positions of a row: a chunk is written as a whole, its invalid part included."""
    return max_length + max(*CHUNKS, decode_steps)


def bucket(size: int, sizes: Sequence[int]) -> int:
    """The smallest of these sizes that holds `size`, or the largest there is."""
    return next((one for one in sizes if one >= size), sizes[-1])


def halvings(rows: int) -> tuple[int, ...]:
    """1, ..., a quarter, half of it, all of it; rounded up."""
    return (*halvings(-(-rows // 2)), rows) if rows > 1 else (1,)


def length_bucket(longest: int) -> int:
    """0, 64, 96, 128, 192, 256, ...: the first that is not less than `longest`."""
    if longest == 0:
        return 0
    length = 64
    while length < longest:
        length += length // 2 if length & (length - 1) == 0 else length // 3
    return length


def filled_up(group: Sequence[int], rows: int, num_slots: int) -> list[int]:
    """A group with as many other slots as fill so many rows, ascending.

    What is kept for the others leaves their rows as they were when it was computed: keep it before their own news.
    """
    others = (slot for slot in range(num_slots) if slot not in group)
    return sorted([*group, *itertools.islice(others, rows - len(group))])
