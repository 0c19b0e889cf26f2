"""The delta rule: both forms against a plain loop, and against each other where a loop says nothing (gradients)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tbx_jax.models.delta_rule import chunked, recurrent, unit_triangular_inverse

chunked_jit, recurrent_jit = jax.jit(chunked), jax.jit(recurrent)
B, U, X, Y = 2, 3, 8, 6


def random_inputs(seed, t):
    """Queries, keys of length one, values, log decays, write strengths, and a memory that is not empty."""
    rng = np.random.default_rng(seed)
    query, key = rng.standard_normal((2, B, t, U, X)).astype(np.float32)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = rng.standard_normal((B, t, U, Y)).astype(np.float32)
    log_decay = -rng.exponential(0.3, (B, t, U)).astype(np.float32)
    write = rng.uniform(0, 1, (B, t, U)).astype(np.float32)
    return query, key, value, log_decay, write, rng.standard_normal((B, U, X, Y)).astype(np.float32)


def plain(query, key, value, log_decay, write, memory, segments=None):
    """One head, one token at a time, in float64."""
    read, memory = np.zeros(value.shape), memory.astype(float)
    for b in range(B):
        for u in range(U):
            m = memory[b, u]
            for t in range(query.shape[1]):
                if segments is not None and t and segments[b, t] != segments[b, t - 1]:
                    m = np.zeros_like(m)
                m = m * np.exp(log_decay[b, t, u])
                m = m + np.outer(key[b, t, u], write[b, t, u] * (value[b, t, u] - key[b, t, u] @ m))
                read[b, t, u] = query[b, t, u] @ m
            memory[b, u] = m
    return read, memory


@pytest.mark.parametrize("form", [chunked_jit, recurrent_jit], ids=["chunked", "recurrent"])
@pytest.mark.parametrize("t", [1, 5, 64, 150])
def test_both_forms_equal_a_plain_loop_whatever_is_left_over_of_a_chunk(form, t):
    inputs = random_inputs(t, t)
    for got, wanted in zip(form(*inputs), plain(*inputs), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_the_memory_goes_from_call_to_call():
    *inputs, memory = random_inputs(1, 100)
    whole, end = chunked_jit(*inputs, memory)
    parts, at = [], 0
    for form, size in ((chunked_jit, 70), (recurrent_jit, 1), (chunked_jit, 29)):
        read, memory = form(*(part[:, at : at + size] for part in inputs), memory)
        parts.append(read)
        at += size
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=2e-5)
    np.testing.assert_allclose(memory, end, atol=2e-5)


@pytest.mark.optimized
@pytest.mark.parametrize("form", [chunked_jit, recurrent_jit], ids=["chunked", "recurrent"])
def test_tokens_that_write_nothing_and_forget_nothing_leave_the_memory_bit_for_bit(form):
    query, key, value, log_decay, write, memory = random_inputs(2, 70)
    nothing = np.zeros_like(write)
    np.testing.assert_array_equal(form(query, key, value, nothing, nothing, memory)[1], memory)
    log_decay[:, 40:], write[:, 40:] = 0.0, 0.0
    cut = [part[:, :40] for part in (query, key, value, log_decay, write)]
    np.testing.assert_allclose(form(query, key, value, log_decay, write, memory)[1], form(*cut, memory)[1], atol=1e-5)


def test_packed_segments_start_from_an_empty_memory_also_inside_a_chunk_and_over_its_edge():
    inputs = random_inputs(3, 150)
    segments = np.stack([np.repeat([4, 5, 6, 7], [10, 54, 1, 85]), np.repeat([0, 1, 2], [100, 30, 20])]).astype(
        np.int32
    )
    for got, wanted in zip(chunked_jit(*inputs, segments), plain(*inputs, segments), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_both_forms_have_the_same_gradients():
    inputs = random_inputs(4, 90)

    def gradients(form):
        def loss(*inputs):
            read, memory = form(*inputs)
            return jnp.sum(jnp.sin(read)) + jnp.sum(jnp.cos(memory))

        return jax.jit(jax.grad(loss, argnums=tuple(range(6))))(*inputs)

    for of_chunks, of_tokens in zip(gradients(chunked), gradients(recurrent), strict=True):
        np.testing.assert_allclose(of_chunks, of_tokens, atol=2e-4)


def test_repeated_keys_that_are_written_in_full_stay_exact():
    """The worst system within a chunk: every token overwrites what every other one wrote."""
    query, key, value, log_decay, write, memory = random_inputs(5, 64)
    key[:], log_decay[:], write[:] = key[:, :1], 0.0, 0.999
    inputs = query, key, value, log_decay, write, memory
    for got, wanted in zip(chunked_jit(*inputs), plain(*inputs), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize("size", [8, 16, 64])
def test_the_inverse_of_a_unit_triangular_matrix_is_that_of_linear_algebra(size):
    lower = np.random.default_rng(size).uniform(-1, 1, (2, 3, size, size)).astype(np.float32) * 0.3
    wanted = np.linalg.inv(np.tril(lower, -1).astype(float) + np.eye(size))
    np.testing.assert_allclose(unit_triangular_inverse(jnp.array(lower)), wanted, atol=1e-5 * np.abs(wanted).max())


def test_the_forms_agree_where_a_memory_is_forgotten_at_once_or_never():
    """Decays of e^0 and e^-1e4, keys of zero, nothing and everything written: values and gradients are finite."""
    query, key, value, log_decay, write, memory = random_inputs(9, 12)
    place = np.arange(12)[:, None] % 3
    log_decay = np.where(place == 0, -1e4, np.where(place == 1, 0.0, log_decay)).astype(np.float32)
    key[:, 5], write[:, 6], write[:, 7] = 0.0, 0.0, 1.0
    inputs = query, key, value, log_decay, write, memory

    def whole(form, given):
        parts = form(*given)
        return sum(jnp.sum(jnp.square(part)) for part in parts), parts

    (of_chunks, chunks), (of_tokens, tokens) = (
        jax.jit(jax.grad(lambda given, form=form: whole(form, given), has_aux=True))(inputs)
        for form in (chunked, recurrent)
    )
    for got, wanted in zip(chunks, plain(*inputs), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-4)
    for got, wanted in zip((*of_chunks, *chunks), (*of_tokens, *tokens), strict=True):
        assert np.isfinite(wanted).all()
        np.testing.assert_allclose(got, wanted, atol=2e-3)
