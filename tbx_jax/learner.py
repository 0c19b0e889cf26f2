"""The learner: parameters and optimizer moments as a value, and the two functions that update it.

`update` is one GRPO step, `sft_update` one step of supervised fine-tuning (SFT) on demonstrations. Both accumulate
gradients over the micro-batches of a global batch and then take a single optimizer step; every micro-batch is divided
by the number of trained tokens of the whole batch, so the result does not depend on how the batch was split.
Parameters, moments and batches are placed by the mesh rules; the compiler derives the communication.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from tbx_envs.errors import ConfigError
from tbx_jax.batching import Batch, MicroBatch
from tbx_jax.config import AlgoConfig, MeshConfig, OptimConfig
from tbx_jax.losses import PolicyMetrics, clipped_policy_loss, merge_metrics, sft_loss
from tbx_jax.mesh import build_mesh, shard_tree, sharding_for
from tbx_jax.models import Model, Params, parameter_axes, token_logps


class LearnerState(NamedTuple):
    """Everything that training changes.

    Attributes:
        params: parameters of the model, placed by the mesh rules.
        opt_state: optax state; moments are placed as their parameters.
        step: number of optimizer steps taken.
    """

    params: Params
    opt_state: Any
    step: Int[Array, ""]


# The logical axes of a micro-batch's arrays, in its structure.
_BATCH_AXES: PyTree[str] = MicroBatch._make(("b t", "b t", "b t", "b"))


class SftMetrics(NamedTuple):
    """Metrics of an SFT update.

    Attributes:
        loss: mean loss in nats per trained token.
    """

    loss: Float[Array, ""]


M = TypeVar("M", PolicyMetrics, SftMetrics)


# Gradients and metrics, summed over the micro-batches of one batch so far.
Totals = tuple[Params, M]


@dataclasses.dataclass(frozen=True)
class Learner:
    """The static part of training; holds no array: each function takes the state and returns the new one.

    Made by `build_learner`.

    Attributes:
        model: model to train.
        optim: optimizer and schedule.
        num_steps: number of optimizer steps of the whole run, where a cosine schedule ends.
        algo: settings of the policy loss; None for a learner that takes only SFT steps.
        temperature: sampling temperature of the policy, at which its log-probabilities are computed.
        mesh: mesh of devices.
        rules: (logical axis, mesh axis) pairs.
    """

    model: Model
    optim: OptimConfig
    num_steps: int
    algo: AlgoConfig | None
    temperature: float
    mesh: Mesh
    rules: tuple[tuple[str, str], ...]

    def init(self, params: Params) -> LearnerState:
        """The initial state. Takes ownership of `params`: their buffers are donated."""
        params = shard_tree(params, parameter_axes(self.model), self.mesh, dict(self.rules))
        # Through a compiled function, as all later parameters: otherwise the same placement has two representations,
        # and every function of the parameters is compiled twice.
        params = _as_updated(self, params)
        replicated = NamedSharding(self.mesh, PartitionSpec())
        opt_state, step = jax.tree.map(
            # Moments are placed like their parameters already; counters are not.
            lambda leaf: leaf if jnp.ndim(leaf) else jax.device_put(leaf, replicated),
            (self.optimizer.init(params), jnp.int32(0)),
        )
        return LearnerState(params, opt_state, step)

    def update(self, state: LearnerState, batch: Batch) -> tuple[LearnerState, dict[str, float]]:
        """One GRPO step on `batch`. Takes ownership of `state`: its buffers are donated.

        Returns:
            The new state, and metrics: those of `PolicyMetrics`, `grad_norm` before clipping, `learning_rate`.

        Raises:
            ConfigError: the learner has no `algo`, or the mesh does not divide the rows of a micro-batch.
            FloatingPointError: the gradient is not finite; the state must be discarded.
        """
        if self.algo is None:
            raise ConfigError("a policy update needs algo, and this learner has algo=None; build it with one.")
        state, metrics, figures = self._step(state, batch, _add_policy_gradients, PolicyMetrics)
        return state, {**{name: float(value) for name, value in metrics._asdict().items()}, **figures}

    def sft_update(self, state: LearnerState, batch: Batch) -> tuple[LearnerState, dict[str, float]]:
        """One SFT step on the trained tokens of `batch`. Takes ownership of `state`: its buffers are donated.

        Returns:
            The new state, and metrics: `loss` (nats per trained token), `grad_norm` before clipping,
            `learning_rate`.

        Raises:
            ConfigError: the mesh does not divide the rows of a micro-batch.
            FloatingPointError: the gradient is not finite; the state must be discarded.
        """
        state, metrics, figures = self._step(state, batch, _add_sft_gradients, SftMetrics)
        return state, {"loss": float(metrics.loss), **figures}

    def sft_loss(self, state: LearnerState, batch: Batch) -> float:
        """The loss that `sft_update` minimises, in nats per trained token, without a step."""
        num_trained = jnp.float32(batch.num_trained)
        losses = [
            _sft_loss(self, state.params, self._place(micro_batch), num_trained) for micro_batch in batch.micro_batches
        ]
        return float(sum(losses))

    @functools.cached_property
    def schedule(self) -> optax.Schedule:
        """Learning rate by optimizer steps taken; a warm-up starts above zero, so that the first step counts."""
        peak, warmup = self.optim.learning_rate, self.optim.warmup_steps
        start = peak / max(warmup, 1)
        if self.optim.schedule == "cosine":
            end = max(self.num_steps, warmup + 1)
            return optax.warmup_cosine_decay_schedule(start, peak, warmup, end, end_value=0.0, exponent=1.0)
        return optax.warmup_constant_schedule(start, peak, warmup) if warmup else optax.constant_schedule(peak)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.optim.clip_norm),
            optax.adamw(
                self.schedule,
                b1=self.optim.b1,
                b2=self.optim.b2,
                eps=1e-8,
                eps_root=0.0,
                mu_dtype=None,
                weight_decay=self.optim.weight_decay,
                mask=None,
                nesterov=False,
            ),
        )

    def _step(
        self,
        state: LearnerState,
        batch: Batch,
        add_gradients: Callable[[Learner, Params, Totals[M], MicroBatch, Float[Array, ""]], Totals[M]],
        metrics: type[M],
    ) -> tuple[LearnerState, M, dict[str, float]]:
        """Gradients of all micro-batches, then one optimizer step: the new state, metrics, figures of the step."""
        num_trained = jnp.float32(batch.num_trained)
        learning_rate = float(self.schedule(state.step))
        totals = _zero_totals(self, state.params, metrics)
        for micro_batch in batch.micro_batches:
            totals = add_gradients(self, state.params, totals, self._place(micro_batch), num_trained)
        grads, summed = totals
        state, grad_norm = _apply_gradients(self, state, grads)
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"the gradient of optimizer step {int(state.step)} has norm {float(grad_norm)} "
                f"(learning rate {learning_rate:g}), which is not finite. "
                f"Lower optim.learning_rate and continue from a checkpoint."
            )
        return state, summed, {"grad_norm": float(grad_norm), "learning_rate": learning_rate}

    def _place(self, micro_batch: MicroBatch) -> MicroBatch:
        """The micro-batch on the devices."""
        rules = dict(self.rules)
        num_rows, axis = len(micro_batch.advantage_b), rules.get("b")
        if axis is not None and num_rows % self.mesh.shape[axis]:
            raise ConfigError(
                f"a micro-batch of {num_rows} rows cannot be split over the {self.mesh.shape[axis]} devices "
                f"of mesh axis '{axis}'; make algo.micro_batch a multiple of {self.mesh.shape[axis]}."
            )
        return shard_tree(micro_batch, _BATCH_AXES, self.mesh, rules)


def build_learner(
    model: Model,
    *,
    optim: OptimConfig,
    mesh: MeshConfig,
    num_steps: int,
    algo: AlgoConfig | None = None,
    temperature: float = 1.0,
) -> Learner:
    """A learner of `model`; `Learner.init(params)` gives the initial state.

    Args:
        model: model from `tbx_jax.models`.
        optim: optimizer and schedule.
        mesh: devices, and the rules that place parameters, moments and batches on them.
        num_steps: number of optimizer steps of the whole run.
        algo: settings of the policy loss; None when only `sft_update` is used.
        temperature: sampling temperature of the policy.

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
def _zero_totals(learner: Learner, params: Params, metrics: type[M]) -> Totals[M]:
    zeros = metrics(*(jnp.zeros(()) for _ in metrics._fields))
    return _placed(learner, (jax.tree.map(jnp.zeros_like, params), zeros))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _add_policy_gradients(
    learner: Learner, params: Params, totals: Totals[PolicyMetrics], batch: MicroBatch, num_trained: Float[Array, ""]
) -> Totals[PolicyMetrics]:
    algo = learner.algo
    assert algo is not None  # checked in `Learner.update`
    tokens_bt, loss_mask_bt, logp_behavior_bt, advantage_b = map(jnp.asarray, batch)  # on the device already

    def loss_of(params: Params) -> tuple[Float[Array, ""], PolicyMetrics]:
        logp_bt = token_logps(learner.model, params, tokens_bt, temperature=learner.temperature)
        return clipped_policy_loss(
            logp_bt,
            logp_behavior_bt,
            advantage_b,
            loss_mask_bt,
            num_trained,
            clip_low=algo.clip_low,
            clip_high=algo.clip_high,
            dual_clip=algo.dual_clip,
        )

    so_far, metrics_so_far = totals
    grads, metrics = jax.grad(loss_of, has_aux=True)(params)
    return _placed(learner, (jax.tree.map(jnp.add, so_far, grads), merge_metrics(metrics_so_far, metrics)))


@functools.partial(jax.jit, static_argnums=0)
def _sft_loss(learner: Learner, params: Params, batch: MicroBatch, num_trained: Float[Array, ""]) -> Float[Array, ""]:
    logp_bt = token_logps(learner.model, params, jnp.asarray(batch.tokens_bt))  # on the device already
    return sft_loss(logp_bt, jnp.asarray(batch.loss_mask_bt), num_trained)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _add_sft_gradients(
    learner: Learner, params: Params, totals: Totals[SftMetrics], batch: MicroBatch, num_trained: Float[Array, ""]
) -> Totals[SftMetrics]:
    so_far, metrics_so_far = totals
    loss, grads = jax.value_and_grad(_sft_loss, argnums=1)(learner, params, batch, num_trained)
    return _placed(learner, (jax.tree.map(jnp.add, so_far, grads), SftMetrics(metrics_so_far.loss + loss)))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _apply_gradients(learner: Learner, state: LearnerState, grads: Params) -> tuple[LearnerState, Float[Array, ""]]:
    updates, opt_state = learner.optimizer.update(grads, state.opt_state, state.params)
    params = _like_parameters(learner, optax.apply_updates(state.params, updates))
    return LearnerState(params, opt_state, state.step + 1), optax.tree.norm(grads)


def _placed(learner: Learner, totals: Totals[M]) -> Totals[M]:
    """Totals in one fixed placement, so that all micro-batches of a shape share one compilation."""
    grads, metrics = totals
    metrics = jax.lax.with_sharding_constraint(metrics, NamedSharding(learner.mesh, PartitionSpec()))
    return _like_parameters(learner, grads), metrics


def _like_parameters(learner: Learner, tree: Params) -> Params:
    """`tree` (parameters or gradients) placed by the mesh rules, inside `jax.jit`."""
    placements = jax.tree.map(
        lambda axes: sharding_for(axes, learner.mesh, dict(learner.rules)), parameter_axes(learner.model)
    )
    return jax.lax.with_sharding_constraint(tree, placements)
