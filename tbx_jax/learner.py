"""The learner: parameters and moments as a value, and the two functions that move it.

`update` is one GRPO step, `supervised_update` one step of ordinary training on demonstrations. Both
accumulate gradients over the micro-batches of a global batch and then take a single optimizer step; every
micro-batch is divided by the trained tokens of the whole batch, so the result does not depend on how the
batch was cut. Parameters, moments and batches live where the mesh rules put them; the compiler derives the
communication.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from tbx_envs.errors import ConfigError
from tbx_jax.batching import Batch, MicroBatch
from tbx_jax.config import AlgoConfig, MeshConfig, OptimConfig
from tbx_jax.losses import PolicyMetrics, clipped_policy_loss, merge_metrics, supervised_loss
from tbx_jax.mesh import build_mesh, shard_tree, sharding_for
from tbx_jax.models import Model, Params, parameter_letters, token_logps


class LearnerState(NamedTuple):
    """All that training changes.

    Attributes:
        params: of the model, placed by the mesh rules.
        opt_state: of optax; moments are placed as their parameters.
        step: optimizer steps taken.
    """

    params: Params
    opt_state: Any
    step: Int[Array, ""]


class DeviceBatch(NamedTuple):
    """A micro-batch on the devices; fields as in `tbx_jax.batching.MicroBatch`."""

    tokens_bt: Int[Array, "b t"]
    loss_mask_bt: Bool[Array, "b t"]
    logp_behavior_bt: Float[Array, "b t"]
    advantage_b: Float[Array, "b"]


class SupervisedMetrics(NamedTuple):
    """What a supervised update looked like: its loss, in nats per trained token."""

    loss: Float[Array, ""]


class Totals(NamedTuple):
    """Sums over the micro-batches of one batch so far."""

    grads: Params
    metrics: PolicyMetrics | SupervisedMetrics


@dataclasses.dataclass(frozen=True)
class Learner:
    """What is static about learning; holds no array: the state goes in and comes out. Made by
    `build_learner`.

    Attributes:
        model: what is trained.
        optim: the optimizer and its schedule.
        num_steps: optimizer steps of the whole run, with which a cosine schedule ends.
        algo: of the policy loss; None for a learner that takes only supervised steps.
        temperature: at which the policy is sampled; log-probabilities are taken at the same.
        mesh: of devices.
        rules: (axis letter, mesh axis) pairs.
    """

    model: Model
    optim: OptimConfig
    num_steps: int
    algo: AlgoConfig | None
    temperature: float
    mesh: Mesh
    rules: tuple[tuple[str, str], ...]

    def init(self, params: Params) -> LearnerState:
        """The state to start from. Takes `params` over: updates reuse their memory."""
        params = shard_tree(params, parameter_letters(self.model), self.mesh, dict(self.rules))
        # Through a compiled function, as all later parameters: equal placements are otherwise written in two ways, and
        # everything that reads parameters would be compiled twice.
        params = _as_updated(self, params)
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        opt_state, step = jax.tree.map(
            # Moments are made like their parameters, placement included; counters are not.
            lambda leaf: leaf if jnp.ndim(leaf) else jax.device_put(leaf, everywhere),
            (self.optimizer.init(params), jnp.int32(0)),
        )
        return LearnerState(params, opt_state, step)

    def update(self, state: LearnerState, batch: Batch) -> tuple[LearnerState, dict[str, float]]:
        """One GRPO step on `batch`; only the returned state may be used afterwards.

        Returns:
            The new state, and metrics: those of `PolicyMetrics`, `grad_norm` before clipping,
                `learning_rate`.

        Raises:
            ConfigError: the learner has no `algo`, or the rows of a micro-batch do not divide over the mesh.
            FloatingPointError: the gradient is not finite; the state must be thrown away.
        """
        if self.algo is None:
            raise ConfigError("a policy update was asked of a learner with algo=None; build it with one.")
        state, metrics, figures = self._step(state, batch, _add_policy_gradients, PolicyMetrics)
        return state, {**{name: float(value) for name, value in metrics._asdict().items()}, **figures}

    def supervised_update(self, state: LearnerState, batch: Batch) -> tuple[LearnerState, dict[str, float]]:
        """One step towards the masked tokens of `batch`; only the returned state may be used afterwards.

        Returns:
            The new state, and metrics: `loss` (nats per trained token), `grad_norm` before clipping,
            `learning_rate`.

        Raises:
            ConfigError: the rows of a micro-batch do not divide over the mesh.
            FloatingPointError: the gradient is not finite; the state must be thrown away.
        """
        state, metrics, figures = self._step(state, batch, _add_supervised_gradients, SupervisedMetrics)
        return state, {"loss": float(metrics.loss), **figures}

    def supervised_loss(self, state: LearnerState, batch: Batch) -> float:
        """What `supervised_update` would minimise, in nats per trained token, without taking a step."""
        num_trained = jnp.float32(batch.num_trained)
        losses = [
            _supervised_loss(self, state.params, self._place(micro_batch), num_trained)
            for micro_batch in batch.micro_batches
        ]
        return float(sum(losses))

    @functools.cached_property
    def schedule(self) -> optax.Schedule:
        """Learning rate by optimizer steps taken; a warm-up starts above zero, so that no step is lost."""
        peak, warmup = self.optim.learning_rate, self.optim.warmup_steps
        start = peak / max(warmup, 1)
        if self.optim.schedule == "cosine":
            return optax.warmup_cosine_decay_schedule(start, peak, warmup, max(self.num_steps, warmup + 1))
        return optax.warmup_constant_schedule(start, peak, warmup) if warmup else optax.constant_schedule(peak)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.optim.clip_norm),
            optax.adamw(self.schedule, b1=self.optim.b1, b2=self.optim.b2, weight_decay=self.optim.weight_decay),
        )

    def _step(
        self,
        state: LearnerState,
        batch: Batch,
        add_gradients: Callable[..., Totals],
        metrics: type[PolicyMetrics] | type[SupervisedMetrics],
    ) -> tuple[LearnerState, Any, dict[str, float]]:
        """Gradients of all micro-batches, then one optimizer step: the new state, metrics, figures of the
        step.
        """
        num_trained = jnp.float32(batch.num_trained)
        learning_rate = float(self.schedule(state.step))
        totals = _zero_totals(self, state.params, metrics)
        for micro_batch in batch.micro_batches:
            totals = add_gradients(self, state.params, totals, self._place(micro_batch), num_trained)
        state, grad_norm = _apply_gradients(self, state, totals.grads)
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"the gradient of optimizer step {int(state.step)} has norm {float(grad_norm)} "
                f"(learning rate {learning_rate:g}); wanted a finite number. "
                f"Lower optim.learning_rate and go on from a checkpoint."
            )
        return state, totals.metrics, {"grad_norm": float(grad_norm), "learning_rate": learning_rate}

    def _place(self, micro_batch: MicroBatch) -> DeviceBatch:
        rows_b = sharding_for("b", self.mesh, dict(self.rules))
        rows_bt = sharding_for("b t", self.mesh, dict(self.rules))
        num_rows, axis = len(micro_batch.advantage_b), dict(self.rules).get("b")
        if axis is not None and num_rows % self.mesh.shape[axis]:
            raise ConfigError(
                f"a micro-batch of {num_rows} rows cannot be split over the {self.mesh.shape[axis]} devices "
                f"of mesh axis '{axis}'; make algo.micro_batch a multiple of {self.mesh.shape[axis]}."
            )
        return jax.device_put(
            DeviceBatch(
                micro_batch.tokens_bt,
                micro_batch.loss_mask_bt,
                micro_batch.logp_behavior_bt,
                micro_batch.advantage_b,
            ),
            DeviceBatch(rows_bt, rows_bt, rows_bt, rows_b),
        )


def build_learner(
    model: Model,
    *,
    optim: OptimConfig,
    mesh: MeshConfig,
    num_steps: int,
    algo: AlgoConfig | None = None,
    temperature: float = 1.0,
) -> Learner:
    """A learner of `model`; `Learner.init(params)` gives the state to start from.

    Args:
        model: from `tbx_jax.models`.
        optim: the optimizer and its schedule.
        mesh: devices, and the rules that place parameters, moments and batches on them.
        num_steps: optimizer steps of the whole run.
        algo: of the policy loss; None when only `supervised_update` is used.
        temperature: at which the policy is sampled.

    Raises:
        ConfigError: the mesh cannot be built, or the temperature is 0: greedy choices have no
            log-probability.
    """
    if temperature <= 0.0:
        raise ConfigError(
            f"sampling.temperature is {temperature}: greedy choices have no log-probability to train on. "
            f"Train with a temperature above 0 (1.0 is usual)."
        )
    return Learner(
        model=model,
        optim=optim,
        num_steps=num_steps,
        algo=algo,
        temperature=temperature,
        mesh=build_mesh(mesh),
        rules=tuple(sorted(mesh.rules.items())),
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _as_updated(learner: Learner, params: Params) -> Params:
    return _like_parameters(learner, params)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _zero_totals(learner: Learner, params: Params, metrics: type[PolicyMetrics] | type[SupervisedMetrics]) -> Totals:
    zeros = metrics(*(jnp.zeros(()) for _ in metrics._fields))
    return _placed(learner, Totals(jax.tree.map(jnp.zeros_like, params), zeros))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _add_policy_gradients(
    learner: Learner, params: Params, totals: Totals, batch: DeviceBatch, num_trained: Float[Array, ""]
) -> Totals:
    algo = learner.algo
    assert algo is not None  # `Learner.update` has said so to the caller

    def loss_of(params: Params) -> tuple[Float[Array, ""], PolicyMetrics]:
        logp_bt = token_logps(learner.model, params, batch.tokens_bt, temperature=learner.temperature)
        return clipped_policy_loss(
            logp_bt,
            batch.logp_behavior_bt,
            batch.advantage_b,
            batch.loss_mask_bt,
            num_trained,
            clip_low=algo.clip_low,
            clip_high=algo.clip_high,
            dual_clip=algo.dual_clip,
        )

    grads, metrics = jax.grad(loss_of, has_aux=True)(params)
    grads = jax.tree.map(jnp.add, totals.grads, grads)
    return _placed(learner, Totals(grads, merge_metrics(totals.metrics, metrics)))


@functools.partial(jax.jit, static_argnums=0)
def _supervised_loss(
    learner: Learner, params: Params, batch: DeviceBatch, num_trained: Float[Array, ""]
) -> Float[Array, ""]:
    logp_bt = token_logps(learner.model, params, batch.tokens_bt)
    return supervised_loss(logp_bt, batch.loss_mask_bt, num_trained)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _add_supervised_gradients(
    learner: Learner, params: Params, totals: Totals, batch: DeviceBatch, num_trained: Float[Array, ""]
) -> Totals:
    loss, grads = jax.value_and_grad(_supervised_loss, argnums=1)(learner, params, batch, num_trained)
    grads = jax.tree.map(jnp.add, totals.grads, grads)
    return _placed(learner, Totals(grads, SupervisedMetrics(totals.metrics.loss + loss)))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _apply_gradients(learner: Learner, state: LearnerState, grads: Params) -> tuple[LearnerState, Float[Array, ""]]:
    updates, opt_state = learner.optimizer.update(grads, state.opt_state, state.params)
    params = _like_parameters(learner, optax.apply_updates(state.params, updates))
    return LearnerState(params, opt_state, state.step + 1), optax.tree.norm(grads)


def _placed(learner: Learner, totals: Totals) -> Totals:
    """Always placed alike, so that the first and the later micro-batches of a shape share one compilation."""
    metrics = jax.lax.with_sharding_constraint(totals.metrics, NamedSharding(learner.mesh, PartitionSpec()))
    return Totals(_like_parameters(learner, totals.grads), metrics)


def _like_parameters(learner: Learner, tree: Params) -> Params:
    """`tree` (parameters or gradients) placed by the mesh rules, inside `jax.jit`."""
    placements = jax.tree.map(
        lambda axes: sharding_for(axes, learner.mesh, dict(learner.rules)), parameter_letters(learner.model)
    )
    return jax.lax.with_sharding_constraint(tree, placements)
