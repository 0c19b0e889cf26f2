"""The learner against plain gradients, against itself cut otherwise, and against itself on eight devices."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tbx_envs.errors import ConfigError
from tbx_jax.batching import build_batch
from tbx_jax.config import AlgoConfig, MeshConfig, ModelConfig, OptimConfig
from tbx_jax.keys import key_for
from tbx_jax.learner import _add_policy_gradients, build_learner
from tbx_jax.mesh import partition_spec
from tbx_jax.models import build, parameter_axes, token_logps
from tbx_jax.trajectory import Trajectory

MODEL = ModelConfig(
    num_layers=2,
    width=16,
    num_heads=2,
    num_kv_heads=1,
    head_width=8,
    mlp_width=32,
    rope_theta=1e4,
    rope_scaling=None,
    norm_eps=1e-6,
    tie_embeddings=True,
    qk_norm=True,
    qkv_bias=False,
    hybrid=None,
    token_shift=1,
    max_length=64,
    dtype="float32",
)
OPTIM = OptimConfig(
    learning_rate=1e-2, b1=0.9, b2=0.95, weight_decay=0.1, clip_norm=0.5, warmup_steps=0, schedule="constant"
)
ALGO = AlgoConfig(
    group_size=4,
    groups_per_update=2,
    groups_rolled=2,
    max_rounds=1,
    normalize_by_std=False,
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=None,
    max_void_retries=0,
    micro_batch=8,
)
ONE = MeshConfig(axes={"fsdp": 1}, rules={})
FSDP8 = MeshConfig(axes={"fsdp": 8}, rules={"b": "fsdp", "d": "fsdp"})
VOCABULARY = 24
TEMPERATURE = 1.5  # not 1, so that a forgotten temperature shows in every number


@functools.cache
def built():
    model, params = build(MODEL, VOCABULARY, key_for(0, "parameters"))
    return model, jax.device_get(params)


def learner_of(mesh=ONE, optim=OPTIM, num_steps=10, temperature=TEMPERATURE):
    model, params = built()
    learner = build_learner(model, optim=optim, mesh=mesh, num_steps=num_steps, algo=ALGO, temperature=temperature)
    return learner, learner.init(params)


def trajectories(num=11, seed=0):
    generator = np.random.default_rng(seed)
    made = []
    for attempt in range(num):
        length = int(generator.integers(2, 30))
        wrote_t = generator.random(length) < 0.5
        wrote_t[0] = False
        made.append(
            Trajectory(
                uid="t",
                attempt=attempt,
                reward=1.0,
                truncated=False,
                tokens_t=generator.integers(0, VOCABULARY, length).astype(np.int32),
                loss_mask_t=wrote_t,
                logp_behavior_t=np.where(wrote_t, -3.2, 0.0).astype(np.float32),
            )
        )
    return made, generator.normal(0, 1, num).astype(np.float32)


logps = jax.jit(token_logps, static_argnums=0)


def padded(made):
    return jnp.array([np.pad(one.tokens_t, (0, 32 - len(one))) for one in made])


def batch_of(micro_batch=8, buckets=(32,), **kwargs):
    made, advantage_b = trajectories(**kwargs)
    return build_batch(made, advantage_b, micro_batch=micro_batch, buckets=buckets)


@functools.partial(jax.jit, static_argnums=0)
def adamw_step(model, params, tokens_bt, slope_bt):
    """Clipping and AdamW as optax has them, on a loss with this slope in each token's log-probability."""
    grads = jax.grad(lambda params: jnp.sum(token_logps(model, params, tokens_bt, temperature=TEMPERATURE) * slope_bt))(
        params
    )
    norm = optax.tree.norm(grads)
    grads = jax.tree.map(lambda grad: grad * jnp.minimum(1.0, 0.5 / norm), grads)
    adamw = optax.adamw(1e-2, b1=0.9, b2=0.95, weight_decay=0.1)
    updates, _ = adamw.update(grads, adamw.init(params), params)
    return optax.apply_updates(params, updates), norm


def test_an_update_is_adamw_on_the_clipped_gradient_of_the_token_mean():
    learner, state = learner_of()
    params = built()[1]
    made, advantage_b = trajectories()

    logp_bt = np.asarray(logps(learner.model, state.params, padded(made), temperature=TEMPERATURE))
    count = sum(int(one.loss_mask_t.sum()) for one in made)
    loss, slope_bt = 0.0, np.zeros(logp_bt.shape, np.float32)  # of the loss, by log-probability
    for row, (one, advantage) in enumerate(zip(made, advantage_b.tolist(), strict=True)):
        for place in np.flatnonzero(one.loss_mask_t):
            ratio = math.exp(float(logp_bt[row, place]) - float(one.logp_behavior_t[place]))
            loss -= min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage) / count
            is_clipped = ratio > 1.28 if advantage > 0 else ratio < 0.8
            slope_bt[row, place] = 0.0 if is_clipped else -ratio * advantage / count
    wanted, norm = adamw_step(learner.model, params, padded(made), slope_bt)

    state, metrics = learner.update(state, batch_of())
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    # Adam divides by the size of the gradient, so rounding shows where a gradient is almost zero.
    chex.assert_trees_all_close(state.params, wanted, atol=2e-4)
    assert int(state.step) == 1


@pytest.mark.parametrize(("micro_batch", "buckets"), [(1, (32,)), (8, (16, 32))])
def test_how_a_batch_is_cut_does_not_change_the_gradient(micro_batch, buckets):
    learner, state = learner_of()
    _, whole = learner.update(state, batch_of())
    _, state = learner_of()
    _, cut = learner.update(state, batch_of(micro_batch, buckets))
    assert cut == pytest.approx(whole, rel=2e-5)


def test_eight_devices_under_fsdp_train_as_one_device_does():
    results = {}
    for name, mesh in {"one": ONE, "eight": FSDP8}.items():
        learner, state = learner_of(mesh)
        for seed in range(3):
            state, metrics = learner.update(state, batch_of(seed=seed))
        results[name] = (state, metrics)
    assert results["eight"][1] == pytest.approx(results["one"][1], rel=1e-3)
    chex.assert_trees_all_close(
        jax.device_get(results["eight"][0].params), jax.device_get(results["one"][0].params), atol=2e-4
    )


def test_parameters_and_moments_stay_where_the_mesh_rules_put_them():
    learner, state = learner_of(FSDP8)
    state, _ = learner.update(state, batch_of())
    wanted = jax.tree.map(lambda axes: partition_spec(axes, FSDP8.rules), parameter_axes(learner.model))
    adam = state.opt_state[1][0]
    for tree in (state.params, adam.mu, adam.nu):
        is_as_wanted = jax.tree.map(
            lambda leaf, spec: leaf.sharding.is_equivalent_to(
                jax.sharding.NamedSharding(learner.mesh, spec), leaf.ndim
            ),
            tree,
            wanted,
        )
        assert all(jax.tree.leaves(is_as_wanted))
    embedding = max(jax.tree.leaves(state.params), key=lambda leaf: leaf.size)
    assert embedding.addressable_shards[0].data.size == embedding.size // 8


def test_batches_of_the_same_shapes_are_compiled_once():
    learner, state = learner_of()
    state, _ = learner.update(state, batch_of())
    num_compiled = _add_policy_gradients._cache_size()
    for seed in (1, 2, 3):
        state, _ = learner.update(state, batch_of(seed=seed, num=5 + seed))
    assert _add_policy_gradients._cache_size() == num_compiled


def test_a_batch_with_nothing_to_train_has_no_gradient():
    made, advantage_b = trajectories()
    silent = [
        Trajectory("t", 0, 0.0, False, one.tokens_t, np.zeros(len(one), bool), one.logp_behavior_t) for one in made
    ]
    learner, state = learner_of()
    _, metrics = learner.update(state, build_batch(silent, advantage_b, micro_batch=8, buckets=(32,)))
    assert metrics["grad_norm"] == 0.0 and metrics["loss"] == 0.0


def test_log_probabilities_are_taken_at_the_sampling_temperature():
    learner, state = learner_of()
    made, advantage_b = trajectories()
    logp_bt = np.asarray(logps(learner.model, state.params, padded(made), temperature=TEMPERATURE))
    sampled = []
    for one, logp_t in zip(made, logp_bt, strict=True):
        logp_behavior_t = np.where(one.loss_mask_t, logp_t[: len(one)], np.float32(0))
        sampled.append(Trajectory("t", 0, 0.0, False, one.tokens_t, one.loss_mask_t, logp_behavior_t))
    _, metrics = learner.update(state, build_batch(sampled, advantage_b, micro_batch=8, buckets=(32,)))
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["logp_gap_max"] < 1e-5


def test_supervised_updates_learn_a_fixed_sequence():
    learner, state = learner_of()
    made, _ = trajectories(num=4)
    batch = build_batch(made, np.zeros(4, np.float32), micro_batch=4, buckets=(32,))
    before = learner.sft_loss(state, batch)
    state, first = learner.sft_update(state, batch)
    for _ in range(40):
        state, _ = learner.sft_update(state, batch)
    assert first["loss"] == pytest.approx(before, rel=1e-6)
    assert learner.sft_loss(state, batch) < 0.5 * before


def test_a_schedule_warms_up_from_its_first_step_and_ends_at_zero():
    optim = OPTIM.model_copy(update={"warmup_steps": 4, "schedule": "cosine"})
    learner, _ = learner_of(optim=optim, num_steps=20)
    rates = [float(learner.schedule(step)) for step in range(21)]
    assert rates[0] > 0 and max(rates) == pytest.approx(1e-2) and rates.index(max(rates)) == 4
    assert rates[20] == pytest.approx(0.0, abs=1e-9)


def test_a_gradient_that_is_not_finite_stops_the_run():
    learner, state = learner_of()
    made, advantage_b = trajectories()
    advantage_b[0] = np.inf
    with pytest.raises(FloatingPointError, match="learning_rate"):
        learner.update(state, build_batch(made, advantage_b, micro_batch=8, buckets=(32,)))


def test_rows_that_do_not_divide_over_the_devices_are_refused():
    learner, state = learner_of(FSDP8)
    with pytest.raises(ConfigError, match="multiple of 8"):
        learner.update(state, batch_of(micro_batch=6))


def test_greedy_sampling_cannot_be_trained_on():
    with pytest.raises(ConfigError, match="temperature"):
        learner_of(temperature=0.0)
