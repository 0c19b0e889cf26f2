"""The shapes that the sampler's programs are compiled for: few of them, and little padding.

Cache rows are computed in groups. A group is padded to a compiled number of rows; chunks of tokens and the copied part
of the cache are rounded up in the same way.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence

import jax

# Parameters of up to this many bytes stay in the processor's cache, so a row costs the same in a small group as in a
# large one; larger models are read from memory once for each group.
_SMALL_MODEL = 2**25
# Up to this many cache rows form fewer groups.
_FEW_SLOTS = 16
_MAX_THREADS = 4
# Bytes that a dispatch of a small model copies out of the cache, for each thread. More does not stay in the processor's
# cache until the last step: it is read from memory in every step, and newly allocated memory costs more still.
_TAKEN_OUT = 12 * 2**20
# Given tokens are computed in chunks of these lengths; longer inputs take several.
CHUNKS = (8, 16, 24, 32, 48, 64, 96, 128)


@dataclasses.dataclass(frozen=True, slots=True)
class DispatchShapes:
    """Sizes that programs are compiled for.

    Attributes:
        decode_rows: numbers of rows of a decode dispatch, ascending.
        prefill_rows: numbers of rows of a prefill dispatch, ascending.
        chunks: `CHUNKS`.
        max_length: longest episode, the most that a program needs to read.
        threads: number of dispatches that run at the same time.
        in_place: True when the cache is read in place at every length; otherwise a part of it is copied out.
        most_positions: limit of rows times positions that are copied out together; None is no limit.
    """

    decode_rows: tuple[int, ...]
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
        """Shapes for this many cache rows on this machine.

        Args:
            slots: number of cache rows.
            max_length: longest episode.
            parameter_bytes: size of the parameters on one device.
            position_bytes: size of one token in the cache.
            num_devices: number of devices of the mesh.
        """
        on_cpu = jax.default_backend() == "cpu"
        small = on_cpu and parameter_bytes <= _SMALL_MODEL
        in_place = on_cpu and not small  # an accelerator would wait for the host before each block
        quarter = -(-slots // 4)
        if in_place:  # one program for each number of rows, since it serves all lengths
            decode_rows, prefill_rows = halvings(slots), halvings(min(4, slots))
        elif small:
            decode_rows = (-(-slots // 16), quarter) if slots > _FEW_SLOTS else (-(-slots // 8), -(-slots // 2))
            prefill_rows = (1, min(4, slots))
        else:
            decode_rows = (quarter, slots) if slots > _FEW_SLOTS else (1, slots)
            prefill_rows = (1, quarter)
        return cls(
            decode_rows=tuple(sorted(set(decode_rows))),
            prefill_rows=tuple(sorted(set(prefill_rows))),
            chunks=CHUNKS,
            max_length=max_length,
            # Programs with collectives must start in the same order on all devices.
            threads=min(_MAX_THREADS, num_cores()) if small and num_devices == 1 else 1,
            in_place=in_place,
            most_positions=_TAKEN_OUT // position_bytes if small else None,
        )

    def chunk(self, num_tokens: int) -> int:
        """The shortest chunk that holds this many tokens, or the longest chunk."""
        return bucket(num_tokens, self.chunks)

    def decode_groups(self, lengths: Mapping[int, int]) -> list[tuple[list[int], int]]:
        """Slots that decode together, shortest first, each group with the compiled number of rows.

        The longer the rows of a group, the smaller the group. Only the last may be smaller than its number of rows.

        Args:
            lengths: slot -> number of tokens in its row.
        """
        left = sorted(lengths, key=lambda slot: (lengths[slot], slot))
        groups = []
        while left:
            rows = self.decode_rows[-1]
            while self._too_many(rows, self.decode_length(lengths[left[:rows][-1]])):
                rows = -(-rows // 2)
            group, left = left[:rows], left[rows:]
            groups.append((group, bucket(len(group), (*(few for few in self.decode_rows if few < rows), rows))))
        return groups

    def prefill_groups(self, num_tokens: Mapping[int, int], lengths: Mapping[int, int]) -> list[list[int]]:
        """Slots to prefill together, longest first: those of one chunk, and shorter ones in the remaining rows.

        Only the last group may be smaller than a compiled number of rows.

        Args:
            num_tokens: slot -> number of tokens to prefill.
            lengths: slot -> number of tokens in its row.
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

    def decode_length(self, longest: int) -> int | None:
        """Cache positions that decode steps copy out when the longest row has `longest` tokens; None is in place."""
        return None if self.in_place else min(length_bucket(longest), self.max_length)

    def prefill_length(self, longest: int) -> int | None:
        """The same for a chunk of given tokens; all short rows share one program."""
        if self.in_place:
            return None
        return min(max(length_bucket(longest), 128), self.max_length) if longest else 0

    def _too_many(self, rows: int, length: int | None) -> bool:
        """True when this many rows should not be copied out together to this length."""
        return rows > 1 and bool(self.most_positions and length and rows * length > self.most_positions)


def num_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def capacity_for(max_length: int, decode_steps: int) -> int:
    """Positions of a cache row: a chunk is written as a whole, its invalid part included."""
    return max_length + max(*CHUNKS, decode_steps)


def bucket(size: int, sizes: Sequence[int]) -> int:
    """The smallest of these sizes that holds `size`, or the largest of them."""
    return next((one for one in sizes if one >= size), sizes[-1])


def halvings(rows: int) -> tuple[int, ...]:
    """1, ..., a quarter, half and all of `rows`, rounded up."""
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
    """A group with other slots added until it has `rows` slots, ascending.

    Committing a dispatch writes the added rows back as they were when it was computed, so it must be committed before
    the added rows' own results.
    """
    others = (slot for slot in range(num_slots) if slot not in group)
    return sorted([*group, *itertools.islice(others, rows - len(group))])
