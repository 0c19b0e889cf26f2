"""Which shapes are compiled."""

import pytest

from tbx_jax import dispatch_shapes
from tbx_jax.dispatch_shapes import CHUNKS, DispatchShapes, capacity_for, filled_up, in_groups, length_bucket

SMALL, LARGE = 4 * 10**6, 5 * 10**8


def shapes(slots, parameter_bytes, max_length=512, num_devices=1):
    return DispatchShapes.choose(slots, max_length, parameter_bytes=parameter_bytes, num_devices=num_devices)


def test_one_compiled_shape_serves_each_bucket_of_lengths():
    lengths = [length_bucket(longest) for longest in range(2000)]
    assert all(bucket >= longest for longest, bucket in enumerate(lengths))
    assert sorted(set(lengths)) == [0, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048]
    whole = shapes(64, SMALL, max_length=500)
    assert sorted({whole.prefill_length(longest) for longest in range(501)}) == [0, 128, 192, 256, 384, 500]
    assert all(whole.prefill_length(longest) >= longest <= whole.write_length(longest) for longest in range(501))


@pytest.mark.parametrize(
    ("slots", "size", "write_rows", "prefill_rows"),
    [
        (96, SMALL, (6, 24), (1, 4)),
        (64, SMALL, (4, 16), (1, 4)),
        (16, SMALL, (2, 8), (1, 4)),
        (1, SMALL, (1,), (1,)),
        (64, LARGE, (16, 64), (1, 4)),
        (16, LARGE, (1, 16), (1, 4)),
    ],
)
def test_small_models_are_computed_in_groups_and_large_ones_all_at_once(slots, size, write_rows, prefill_rows):
    chosen = shapes(slots, size)
    assert (chosen.write_rows, chosen.prefill_rows) == (write_rows, prefill_rows)
    assert chosen.write_rows[-1] <= slots and chosen.prefill_rows[-1] <= slots


def test_dispatches_run_side_by_side_only_for_small_models_on_one_device(monkeypatch):
    monkeypatch.setattr(dispatch_shapes, "num_cores", lambda: 64)
    assert shapes(16, SMALL).threads == 4
    assert shapes(16, LARGE).threads == shapes(16, SMALL, num_devices=2).threads == 1
    monkeypatch.setattr(dispatch_shapes, "num_cores", lambda: 1)
    assert shapes(16, SMALL).threads == 1


def test_an_accelerator_takes_large_groups(monkeypatch):
    monkeypatch.setattr(dispatch_shapes.jax, "default_backend", lambda: "gpu")
    chosen = shapes(64, SMALL)
    assert (chosen.write_rows, chosen.prefill_rows, chosen.threads) == ((16, 64), (1, 16), 1)


def test_groups_are_full_but_for_the_last_and_filled_up_with_other_slots():
    assert in_groups([7, 5, 3, 1, 0], 2) == [[7, 5], [3, 1], [0]]
    assert in_groups([], 2) == []
    assert filled_up([7], (2,), 8) == [0, 7]
    assert filled_up([1, 0], (2, 4), 8) == [0, 1]
    assert filled_up([2, 0, 5], (1, 4), 8) == [0, 1, 2, 5]


def test_chunks_of_one_length_go_together_and_shorter_ones_fill_their_rows():
    groups = shapes(64, SMALL).prefill_groups
    assert groups({}) == []
    assert groups({0: 20, 1: 200, 2: 20}) == [[1], [0, 2]]
    assert groups({0: 20, 1: 200, 2: 20, 3: 128, 4: 5}) == [[1, 3, 0, 2], [4]]
    assert groups(dict.fromkeys(range(6), 7)) == [[0, 1, 2, 3], [4, 5]]


def test_a_row_has_room_for_a_whole_chunk_behind_the_longest_episode():
    assert capacity_for(100, decode_steps=8) == 100 + CHUNKS[-1]
    assert capacity_for(100, decode_steps=500) == 600
