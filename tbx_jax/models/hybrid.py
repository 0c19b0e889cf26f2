"""The hybrid decoder of the Qwen3.5 type: periods of gated delta nets followed by one attention layer.

A period is `delta_layers` delta nets and one `Block`, and the periods are scanned: a parameter of a delta layer has the
axes `l e` (period, index in it), one of attention the axis `l`.

A delta layer reads the past through a short causal convolution and a memory per head (`delta_rule`), so its cache has
a fixed size. A single token is computed in the recurrent form, several tokens in the chunked one.

Source: Qwen3-Next and Qwen3.5 as in transformers 5.24 (facts, not code); Gated Delta Networks,
https://arxiv.org/abs/2412.06464
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tbx_envs.errors import ConfigError
from tbx_jax.config import HybridConfig, ModelConfig
from tbx_jax.models.attention import Cached, Fresh, InPlace
from tbx_jax.models.cache import DeltaState, empty_states
from tbx_jax.models.decoder import (
    Block,
    Decoder,
    LayerFunction,
    Rotary,
    feed_forward,
    model_norm,
    out_scale_of,
    parameter,
    rms_norm,
)
from tbx_jax.models.delta_rule import chunked, recurrent

_UNIT_EPS = 1e-6  # under the root when queries and keys are scaled to length one


class DeltaBlock(nnx.Module):
    """One delta layer. Built with the parameters of all delta layers stacked, called with those of one."""

    def __init__(self, config: ModelConfig):
        hybrid, out_scale = hybrid_of(config), out_scale_of(config)
        l, e = config.attention_layers, hybrid.delta_layers  # noqa: E741
        d, f, c, w = config.width, config.mlp_width, hybrid.channels, hybrid.conv_taps
        u, y = hybrid.value_heads, hybrid.value_width

        self.config = config
        self.mixer_norm = parameter((l, e, d), "l e d")
        self.mixed = parameter((l, e, d, c), "l e d c", std=d**-0.5)
        self.taps = parameter((l, e, c, w), "l e c w", std=w**-0.5)
        self.read_gate = parameter((l, e, d, u, y), "l e d u y", std=d**-0.5)
        self.write = parameter((l, e, d, u), "l e d u", std=d**-0.5)
        self.decay = parameter((l, e, d, u), "l e d u", std=d**-0.5)
        # A token's log decay is -exp(decay_rate) * softplus(... + decay_bias): about -1.3 to start with.
        self.decay_rate = parameter((l, e, u), "l e u", std=1.0)
        self.decay_bias = parameter((l, e, u), "l e u", start=1.0)
        self.read_norm = parameter((l, e, y), "l e y", start=1.0)
        self.out = parameter((l, e, u, y, d), "l e u y d", std=out_scale * (u * y) ** -0.5)
        self.mlp_norm = parameter((l, e, d), "l e d")
        self.gate = parameter((l, e, d, f), "l e d f", std=d**-0.5)
        self.up = parameter((l, e, d, f), "l e d f", std=d**-0.5)
        self.down = parameter((l, e, f, d), "l e f d", std=out_scale * f**-0.5)

    def __call__(
        self,
        x_btd: Float[Array, "b t d"],
        state: DeltaState,
        segments_bt: Int[Array, "b t"] | None,
        valid_bt: Bool[Array, "b t"] | None,
    ) -> tuple[Float[Array, "b t d"], DeltaState]:
        hybrid, dtype = hybrid_of(self.config), x_btd.dtype
        y_btd = model_norm(self.config, x_btd, self.mixer_norm)
        mixed_btc = jnp.einsum("btd,dc->btc", y_btd, self.mixed[...].astype(dtype))
        known_bjc = jnp.concatenate([state.inputs_lebmc.astype(dtype), mixed_btc], axis=1)
        heads = self.heads(causal_convolution(known_bjc, self.taps[...].astype(dtype), segments_bt))

        write_btu = jax.nn.sigmoid(jnp.einsum("btd,du->btu", y_btd, self.write[...].astype(dtype)).astype(jnp.float32))
        speed_btu = jnp.einsum("btd,du->btu", y_btd, self.decay[...].astype(dtype)).astype(jnp.float32)
        speed_btu = jax.nn.softplus(speed_btu + self.decay_bias[...].astype(jnp.float32)[None, None])
        log_decay_btu = -jnp.exp(self.decay_rate[...].astype(jnp.float32))[None, None] * speed_btu
        if valid_bt is not None:
            write_btu, log_decay_btu = (
                jnp.where(valid_bt[..., None], part, 0.0) for part in (write_btu, log_decay_btu)
            )

        if x_btd.shape[1] == 1:
            read_btuy, memory_buxy = recurrent(*heads, log_decay_btu, write_btu, state.memory_lebuxy)
        else:
            read_btuy, memory_buxy = chunked(*heads, log_decay_btu, write_btu, state.memory_lebuxy, segments_bt)
        gate_btuy = jnp.einsum("btd,duy->btuy", y_btd, self.read_gate[...].astype(dtype))
        read_btuy = rms_norm(read_btuy, self.read_norm[...].astype(jnp.float32), self.config.norm_eps)
        read_btuy = (read_btuy * jax.nn.silu(gate_btuy.astype(jnp.float32))).astype(dtype)
        x_btd = x_btd + jnp.einsum("btuy,uyd->btd", read_btuy, self.out[...].astype(dtype))
        inputs_bmc = last_inputs(known_bjc, valid_bt, hybrid.conv_taps - 1)
        return feed_forward(self, x_btd), DeltaState(inputs_bmc.astype(state.inputs_lebmc.dtype), memory_buxy)

    def heads(
        self, mixed_btc: Float[Array, "b t c"]
    ) -> tuple[Float[Array, "b t u x"], Float[Array, "b t u x"], Float[Array, "b t u y"]]:
        """Queries, keys and values in float32: queries and keys of length one, each shared by several value heads."""
        hybrid = hybrid_of(self.config)
        width = hybrid.key_heads * hybrid.key_width
        query, key, value = jnp.split(mixed_btc.astype(jnp.float32), [width, 2 * width], axis=-1)
        shape = mixed_btc.shape[:2]

        def unit(part: Array) -> Array:
            part = part.reshape(*shape, hybrid.key_heads, hybrid.key_width)
            part = part * jax.lax.rsqrt(jnp.sum(jnp.square(part), axis=-1, keepdims=True) + _UNIT_EPS)
            return jnp.repeat(part, hybrid.value_heads // hybrid.key_heads, axis=2)

        value_btuy = value.reshape(*shape, hybrid.value_heads, hybrid.value_width)
        return unit(query) * hybrid.key_width**-0.5, unit(key), value_btuy


class Period(nnx.Module):
    """`delta_layers` delta layers, then one attention layer."""

    def __init__(self, config: ModelConfig):
        self.delta = DeltaBlock(config)
        self.attention = Block(config)


class HybridDecoder(Decoder):
    """`Decoder` with periods for layers. `Fresh` carries the states of delta layers in and out."""

    def build_layers(self) -> nnx.Module:
        refuse_unfit(self.config)
        return Period(self.config)

    def start_buffer(self, rows: int, steps: int) -> Fresh | None:
        """Empty states: a sequence starts from them as if it continued an empty one."""
        return empty_buffer(self.config, rows, steps)

    def layer_function(
        self,
        rotary: Rotary,
        attends_btj: Bool[Array, "#b t j"] | None,
        at: Int[Array, ""] | int,
        attends_bs: Bool[Array, "b s"] | None,
        segments_bt: Int[Array, "b t"] | None,
        valid_bt: Bool[Array, "b t"] | None,
        remat: bool,
    ) -> LayerFunction[Cached | InPlace | None]:
        """As in `Decoder`, for a period: a scan over its delta layers, then its attention layer."""
        assert isinstance(self.layers, Period)  # from `build_layers`
        period = nnx.graphdef(self.layers)
        delta, block = nnx.graphdef(self.layers.delta), nnx.graphdef(self.layers.attention)

        def delta_layer(x_btd: Array, scanned: tuple[nnx.State, DeltaState]) -> tuple[Array, DeltaState]:
            own, state = scanned
            return nnx.merge(delta, own)(x_btd, state, segments_bt, valid_bt)

        def attention_layer(
            x_btd: Array, own: nnx.State, fresh: Fresh, cached: Cached | InPlace | None
        ) -> tuple[Array, Fresh]:
            return nnx.merge(block, own)(x_btd, rotary, attends_btj, fresh, at, cached, attends_bs)

        if remat:
            delta_layer = jax.checkpoint(delta_layer, prevent_cse=False)
            attention_layer = jax.checkpoint(attention_layer, prevent_cse=False)

        def layers(
            x_btd: Array, scanned: tuple[nnx.State, Fresh | None, Cached | InPlace | None]
        ) -> tuple[Array, Fresh]:
            parameters, fresh, cached = scanned
            assert fresh is not None and fresh.states is not None  # from `start_buffer`, or the caller's cache
            parts = nnx.merge(period, parameters)
            x_btd, states = jax.lax.scan(delta_layer, x_btd, (nnx.state(parts.delta), fresh.states))
            x_btd, new = attention_layer(x_btd, nnx.state(parts.attention), fresh._replace(states=None), cached)
            return x_btd, new._replace(states=states)

        return layers


def hybrid_of(config: ModelConfig) -> HybridConfig:
    """The sizes of the delta layers; only hybrid models have this module's layers."""
    assert config.hybrid is not None
    return config.hybrid


def refuse_unfit(config: ModelConfig) -> None:
    """Raises ConfigError for inconsistent sizes of a hybrid; one message lists all problems."""
    hybrid = hybrid_of(config)
    period = hybrid.delta_layers + 1
    problems = []
    if config.num_layers % period:
        problems.append(f"num_layers {config.num_layers} is not a multiple of {period} (delta_layers + 1)")
    if hybrid.value_heads % hybrid.key_heads:
        problems.append(f"value_heads {hybrid.value_heads} is not a multiple of key_heads {hybrid.key_heads}")
    if hybrid.rotary_width % 2 or hybrid.rotary_width > config.head_width:
        problems.append(
            f"rotary_width {hybrid.rotary_width} is not an even number up to head_width {config.head_width}"
        )
    if problems:
        raise ConfigError(f"model.hybrid: {'; '.join(problems)}. Change the sizes so that they are consistent.")


def empty_buffer(config: ModelConfig, rows: int, steps: int) -> Fresh:
    """Room for the keys and values of `steps` tokens, and initial states of delta layers."""
    shape = (config.attention_layers, rows, steps, config.num_kv_heads, config.head_width)
    keys = jnp.zeros(shape, config.dtype)
    return Fresh(keys, keys, empty_states(config, rows))


def causal_convolution(
    known_bjc: Float[Array, "b j c"], taps_cw: Float[Array, "c w"], segments_bt: Int[Array, "b t"] | None
) -> Float[Array, "b t c"]:
    """SiLU of each channel's weighted sum over a token's input and the w - 1 before it.

    Args:
        known_bjc: inputs, with the w - 1 inputs before the first token.
        taps_cw: weights; the last tap weighs the token's own input.
        segments_bt: segment ids; a token sees inputs of its own segment only, and inputs before the first token belong
            to no segment.
    """
    w = taps_cw.shape[1]
    t = known_bjc.shape[1] - (w - 1)
    total_btc = jnp.zeros((known_bjc.shape[0], t, known_bjc.shape[2]), jnp.float32)
    for tap in range(w):
        part_btc = known_bjc[:, tap : tap + t] * taps_cw[None, None, :, tap]
        if segments_bt is not None:
            back = w - 1 - tap
            before_bt = jnp.pad(segments_bt, ((0, 0), (back, 0)), constant_values=-1)[:, :t]
            part_btc = jnp.where((before_bt == segments_bt)[..., None], part_btc, 0)
        total_btc = total_btc + part_btc.astype(jnp.float32)
    return jax.nn.silu(total_btc).astype(known_bjc.dtype)


def last_inputs(
    known_bjc: Float[Array, "b j c"], valid_bt: Bool[Array, "b t"] | None, count: int
) -> Float[Array, "b m c"]:
    """The last `count` inputs of each row after its valid tokens."""
    if valid_bt is None:
        return known_bjc[:, -count:]
    places = jnp.sum(valid_bt, axis=1, dtype=jnp.int32)[:, None] + jnp.arange(count)[None]
    return jnp.take_along_axis(known_bjc, places[..., None], axis=1)
