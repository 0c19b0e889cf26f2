import pickle

import numpy as np
import pytest
from gymnasium.spaces import Tuple
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from tbx_envs.spaces import AnyText


@pytest.mark.parametrize("text", ["", "é", "日本語 🙂", "\ud800", "\x00", "a" * 100_000, np.str_("numpy")])
def test_any_text_contains_every_string(text):
    assert text in AnyText()


@pytest.mark.parametrize("other", [None, 3, b"bytes", ["a"], ("a",)])
def test_any_text_contains_nothing_else(other):
    assert other not in AnyText()


def test_samples_are_varied_text_and_follow_the_seed():
    samples = [AnyText(seed=seed).sample() for seed in range(200)]
    assert all(isinstance(sample, str) for sample in samples)
    assert len(set(samples)) > 100
    assert "" in samples and any("<tool_call>" in sample for sample in samples)
    assert samples == [AnyText(seed=seed).sample() for seed in range(200)]


def test_any_text_pickles_and_is_equal_to_every_other():
    space = AnyText(seed=3)
    copy = pickle.loads(pickle.dumps(space))
    assert copy == space == AnyText()
    assert copy.sample() == space.sample()
    assert space.from_jsonable(space.to_jsonable(["a", "\ud800"])) == ["a", "\ud800"]


def test_a_batch_is_a_tuple_of_texts():
    batch = batch_space(AnyText(seed=1), 3)
    assert isinstance(batch, Tuple) and len(batch) == 3
    assert batch.sample() in batch
    assert len({batch.spaces[i].sample() for i in range(3)} | {""}) > 1
    empty = create_empty_array(AnyText(), n=3)
    assert empty == ("", "", "")
    assert concatenate(AnyText(), ["a", "b", "c"], empty) == ("a", "b", "c")
    assert list(iterate(batch, ("a", "b", "c"))) == ["a", "b", "c"]
