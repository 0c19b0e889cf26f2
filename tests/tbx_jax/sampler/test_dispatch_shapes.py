"""Which shapes are compiled."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tbx_jax.sampler import dispatch_shapes
from tbx_jax.sampler.dispatch_shapes import CHUNKS, DispatchShapes, capacity_for, filled_up, length_bucket

SMALL, LARGE = 4 * 10**6, 5 * 10**8
EMPTY = dict.fromkeys(range(64), 0)


def shapes(slots, parameter_bytes, max_length=512, num_devices=1):
    return DispatchShapes.choose(
        slots, max_length, parameter_bytes=parameter_bytes, position_bytes=2048, num_devices=num_devices
    )


def test_one_compiled_shape_serves_each_bucket_of_lengths():
    lengths = [length_bucket(longest) for longest in range(2000)]
    assert all(bucket >= longest for longest, bucket in enumerate(lengths))
    assert sorted(set(lengths)) == [0, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
    whole = shapes(64, SMALL, max_length=500)
    assert sorted({whole.prefill_length(longest) for longest in range(501)}) == [0, 128, 192, 256, 384, 500]
    assert all(whole.prefill_length(longest) >= longest <= whole.decode_length(longest) for longest in range(501))


@pytest.mark.parametrize(
    ("slots", "size", "decode_rows", "prefill_rows"),
    [
        (96, SMALL, (6, 24), (1, 4)),
        (64, SMALL, (4, 16), (1, 4)),
        (16, SMALL, (2, 8), (1, 4)),
        (1, SMALL, (1,), (1,)),
        (64, LARGE, (1, 2, 4, 8, 16, 32, 64), (1, 2, 4)),
        (16, LARGE, (1, 2, 4, 8, 16), (1, 2, 4)),
        (6, LARGE, (1, 2, 3, 6), (1, 2, 4)),
        (1, LARGE, (1,), (1,)),
    ],
)
def test_small_models_are_computed_in_groups_and_large_ones_all_at_once(slots, size, decode_rows, prefill_rows):
    chosen = shapes(slots, size)
    assert (chosen.decode_rows, chosen.prefill_rows) == (decode_rows, prefill_rows)
    assert chosen.decode_rows[-1] <= slots and chosen.prefill_rows[-1] <= slots


def test_dispatches_run_side_by_side_only_for_small_models_on_one_device(monkeypatch):
    monkeypatch.setattr(dispatch_shapes, "num_cores", lambda: 64)
    assert shapes(16, SMALL).threads == 4
    assert shapes(16, LARGE).threads == shapes(16, SMALL, num_devices=2).threads == 1
    monkeypatch.setattr(dispatch_shapes, "num_cores", lambda: 1)
    assert shapes(16, SMALL).threads == 1


def test_an_accelerator_takes_large_groups(monkeypatch):
    monkeypatch.setattr(dispatch_shapes.jax, "default_backend", lambda: "gpu")
    chosen = shapes(64, SMALL)
    assert (chosen.decode_rows, chosen.prefill_rows, chosen.threads) == ((16, 64), (1, 16), 1)


def test_a_group_is_filled_up_with_other_slots():
    assert filled_up([7], 2, 8) == [0, 7]
    assert filled_up([1, 0], 2, 8) == [0, 1]
    assert filled_up([2, 0, 5], 4, 8) == [0, 1, 2, 5]


def test_short_rows_write_together_and_long_ones_in_smaller_groups():
    groups = shapes(16, SMALL, max_length=4096).decode_groups
    assert groups({}) == []
    assert groups(dict.fromkeys(range(9), 100)) == [([0, 1, 2, 3, 4, 5, 6, 7], 8), ([8], 2)]
    assert groups(dict.fromkeys(range(6), 1000)) == [([0, 1, 2, 3], 4), ([4, 5], 2)]
    assert groups({0: 2000, 1: 30, 2: 2000, 3: 40}) == [([1, 3], 2), ([0, 2], 2)]
    assert groups({0: 4000, 1: 4000}) == [([0], 1), ([1], 1)]
    assert shapes(16, LARGE, max_length=4096).decode_groups({0: 4000, 1: 30, 2: 0}) == [([2, 1, 0], 4)]


@given(st.dictionaries(st.integers(0, 63), st.integers(0, 4096)), st.sampled_from([1, 5, 16, 64]))
def test_every_slot_writes_once_and_only_the_last_group_is_filled_up(lengths, slots):
    lengths = {slot: length for slot, length in lengths.items() if slot < slots}
    chosen = shapes(slots, SMALL, max_length=4096)
    groups = chosen.decode_groups(lengths)
    assert [slot for group, _ in groups for slot in group] == sorted(lengths, key=lambda slot: (lengths[slot], slot))
    assert all(len(group) == rows for group, rows in groups[:-1])
    for group, rows in groups:
        assert len(group) <= rows <= slots
        assert rows == 1 or rows * chosen.decode_length(max(lengths[slot] for slot in group)) <= chosen.most_positions


def test_a_large_model_on_a_cpu_reads_the_cache_in_place_and_an_accelerator_takes_it_out(monkeypatch):
    large, small = shapes(64, LARGE), shapes(64, SMALL)
    assert large.in_place and large.decode_length(300) is None and large.prefill_length(0) is None
    assert not small.in_place and (small.decode_length(300), small.prefill_length(0)) == (384, 0)
    monkeypatch.setattr(dispatch_shapes.jax, "default_backend", lambda: "gpu")
    assert not shapes(64, LARGE).in_place and shapes(64, LARGE).most_positions is None


def test_chunks_of_one_length_go_together_and_shorter_ones_fill_their_rows():
    groups = shapes(64, SMALL, max_length=4096).prefill_groups
    assert groups({}, {}) == []
    assert groups({0: 20, 1: 200, 2: 20}, EMPTY) == [[1], [0, 2]]
    assert groups({0: 20, 1: 200, 2: 20, 3: 128, 4: 5}, EMPTY) == [[1, 3, 0, 2], [4]]
    assert groups(dict.fromkeys(range(6), 7), EMPTY) == [[0, 1, 2, 3], [4, 5]]
    assert groups(dict.fromkeys(range(3), 7), EMPTY | {1: 2000}) == [[0], [1], [2]]


def test_a_row_has_room_for_a_whole_chunk_behind_the_longest_episode():
    assert capacity_for(100, decode_steps=8) == 100 + CHUNKS[-1]
    assert capacity_for(100, decode_steps=500) == 600
