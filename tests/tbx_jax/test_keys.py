"""Named keys."""

import jax
import numpy as np

from tbx_envs.seeding import derive
from tbx_jax.keys import as_keys, key_bits, key_for


def test_a_key_is_a_function_of_seed_and_names():
    assert key_for(3, "a", 1) == key_for(3, "a", 1)
    assert len({key_bits(seed, *names).tobytes() for seed in (0, 1) for names in (("a",), ("b",), ("a", 1))}) == 6


def test_a_key_has_all_bits_of_the_named_seed():
    high, low = key_bits(5, "x").tolist()
    assert (high << 32) | low == derive(5, "x")
    np.testing.assert_array_equal(jax.random.key_data(key_for(5, "x")), [high, low])


def test_many_keys_come_from_many_bits():
    bits = np.stack([key_bits(0, name) for name in "ab"])
    together = jax.vmap(jax.random.uniform)(as_keys(bits))
    np.testing.assert_array_equal(together, [jax.random.uniform(key_for(0, name)) for name in "ab"])
