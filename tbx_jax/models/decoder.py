"""The dense decoder: pre-norm, grouped-query attention, rotary, SwiGLU. Llama, Qwen2 and Qwen3 by configuration.

Layers are scanned: every layer parameter has a leading axis `l`, so compile time does not grow with depth. Each
parameter is declared with its logical axes, which is all that sharding needs to know.

One addition, off in published models: *token shift*. The embeddings of the `m` previous tokens are added to a token's
own, each through a learned diagonal that starts at zero. Small models copy long strings far better with it.

An attention layer of a hybrid model is the same `Block`, with three differences: a sigmoid gate on the output of
attention, rotary positions on a part of each head, and norm scales stored as their distance from one.

Sources: Qwen3 technical report, https://arxiv.org/abs/2505.09388; Llama 3, https://arxiv.org/abs/2407.21783
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tbx_envs.errors import ConfigError
from tbx_jax.config import ModelConfig
from tbx_jax.models.attention import Cached, Fresh, InPlace, attention, rotary_angles, rotate
from tbx_jax.models.cache import NO_TOKEN

_EMBEDDING_STD = 0.02

# Cosine and sine from `rotary_angles`.
Rotary = tuple[Float[Array, "#b t h2"], Float[Array, "#b t h2"]]
T = TypeVar("T")
# The body of a scan over the stacked layers: (x_btd, (parameters, fresh, T)) -> (x_btd, fresh).
LayerFunction = Callable[[Array, tuple[nnx.State, Fresh | None, T]], tuple[Array, Fresh]]


def parameter(shape: tuple[int, ...], axes: str, *, start: float = 0.0, std: float = 0.0) -> nnx.Param:
    """The description of a parameter: logical axes, and initial values: `start` plus normal noise of deviation `std`.

    A decoder holds descriptions only; `nnx.merge` puts arrays in their place (`tbx_jax.models.build` draws initial
    ones).
    """
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), logical_axes=axes, start=start, std=std)


class Block(nnx.Module):
    """One layer. Built with the parameters of all layers stacked, called by the decoder's scan with those of one."""

    def __init__(self, config: ModelConfig):
        d, f = config.width, config.mlp_width
        n, k, h = config.num_heads, config.num_kv_heads, config.head_width
        l = config.attention_layers  # noqa: E741
        if n % k or h % 2:
            raise ConfigError(
                f"model.num_heads {n}, model.num_kv_heads {k}, model.head_width {h}: query heads share key-value heads "
                f"evenly and rotary positions need pairs; make num_heads a multiple of num_kv_heads, head_width even"
            )
        one = 0.0 if config.hybrid else 1.0  # how a norm's scale of one is stored
        out_scale = out_scale_of(config)

        self.config = config
        self.attention_norm = parameter((l, d), "l d", start=one)
        if config.hybrid:
            self.query = parameter((l, d, n, 2 * h), "l d n o", std=d**-0.5)
        else:
            self.query = parameter((l, d, n, h), "l d n h", std=d**-0.5)
        self.key = parameter((l, d, k, h), "l d k h", std=d**-0.5)
        self.value = parameter((l, d, k, h), "l d k h", std=d**-0.5)
        self.out = parameter((l, n, h, d), "l n h d", std=out_scale * (n * h) ** -0.5)
        if config.qkv_bias:
            self.query_bias = parameter((l, n, h), "l n h")
            self.key_bias = parameter((l, k, h), "l k h")
            self.value_bias = parameter((l, k, h), "l k h")
        if config.qk_norm:
            self.query_norm = parameter((l, h), "l h", start=one)
            self.key_norm = parameter((l, h), "l h", start=one)
        self.mlp_norm = parameter((l, d), "l d", start=one)
        self.gate = parameter((l, d, f), "l d f", std=d**-0.5)
        self.up = parameter((l, d, f), "l d f", std=d**-0.5)
        self.down = parameter((l, f, d), "l f d", std=out_scale * f**-0.5)

    def __call__(
        self,
        x_btd: Float[Array, "b t d"],
        rotary: Rotary,
        attends_btj: Bool[Array, "#b t j"] | None,
        fresh: Fresh | None,
        at: Int[Array, ""] | int,
        cached: Cached | InPlace | None,
        attends_bs: Bool[Array, "b s"] | None,
    ) -> tuple[Float[Array, "b t d"], Fresh]:
        y_btd = model_norm(self.config, x_btd, self.attention_norm)
        query_btnh, gate_btnh, key_btkh, value_btkh = self.project(y_btd)
        query_btnh, key_btkh = rotate(query_btnh, *rotary), rotate(key_btkh, *rotary)
        if fresh is None:
            fresh = Fresh(key_btkh, value_btkh)
        else:
            fresh = Fresh(
                jax.lax.dynamic_update_slice_in_dim(fresh.keys_lbjkh, key_btkh, at, axis=1),
                jax.lax.dynamic_update_slice_in_dim(fresh.values_lbjkh, value_btkh, at, axis=1),
            )
        mixed_btnh = attention(query_btnh, fresh, attends_btj, cached, attends_bs)
        if gate_btnh is not None:
            mixed_btnh = mixed_btnh * jax.nn.sigmoid(gate_btnh)
        x_btd = x_btd + jnp.einsum("btnh,nhd->btd", mixed_btnh, self.out[...].astype(x_btd.dtype))
        return feed_forward(self, x_btd), fresh

    def project(
        self, y_btd: Float[Array, "b t d"]
    ) -> tuple[
        Float[Array, "b t n h"], Float[Array, "b t n h"] | None, Float[Array, "b t k h"], Float[Array, "b t k h"]
    ]:
        """Queries, output gates (None for dense models), keys and values; with bias and norm, not rotated yet."""
        config, dtype = self.config, y_btd.dtype
        query_btnh = jnp.einsum("btd,dnh->btnh", y_btd, self.query[...].astype(dtype))
        key_btkh = jnp.einsum("btd,dkh->btkh", y_btd, self.key[...].astype(dtype))
        value_btkh = jnp.einsum("btd,dkh->btkh", y_btd, self.value[...].astype(dtype))
        gate_btnh = None
        if config.hybrid:
            query_btnh, gate_btnh = jnp.split(query_btnh, 2, axis=-1)
        if config.qkv_bias:
            query_btnh = query_btnh + self.query_bias[...].astype(dtype)[None, None]
            key_btkh = key_btkh + self.key_bias[...].astype(dtype)[None, None]
            value_btkh = value_btkh + self.value_bias[...].astype(dtype)[None, None]
        if config.qk_norm:
            query_btnh = model_norm(config, query_btnh, self.query_norm)
            key_btkh = model_norm(config, key_btkh, self.key_norm)
        return query_btnh, gate_btnh, key_btkh, value_btkh


class Decoder(nnx.Module):
    """Token ids in, normed hidden states out; `unembed` computes logits from them."""

    def __init__(self, config: ModelConfig, vocabulary: int):
        d, v, m = config.width, vocabulary, config.token_shift
        self.config = config
        self.embedding = parameter((v, d), "v d", std=_EMBEDDING_STD)
        if m:
            self.token_shift = parameter((m, d), "m d")
        self.layers = self.build_layers()
        self.norm = parameter((d,), "d", start=0.0 if config.hybrid else 1.0)
        if not config.tie_embeddings:
            self.unembedding = parameter((v, d), "v d", std=_EMBEDDING_STD)

    def build_layers(self) -> nnx.Module:
        """All layers, their parameters stacked."""
        return Block(self.config)

    def start_buffer(self, rows: int, steps: int) -> Fresh | None:
        """The default of `fresh`; a dense model needs no buffer."""
        return None

    def __call__(
        self,
        tokens_bt: Int[Array, "b t"],
        recent_bm: Int[Array, "b m"],
        position_bt: Int[Array, "#b t"],
        attends_btj: Bool[Array, "#b t j"] | None,
        *,
        segments_bt: Int[Array, "b t"] | None = None,
        valid_bt: Bool[Array, "b t"] | None = None,
        fresh: Fresh | list[Fresh] | None = None,
        at: Int[Array, ""] | int = 0,
        cached: Cached | list[Cached] | InPlace | None = None,
        attends_bs: Bool[Array, "b s"] | None = None,
        apart: list[nnx.State] | None = None,
        remat: bool = False,
    ) -> tuple[Float[Array, "b t d"], Fresh | list[Fresh]]:
        """Hidden states of `tokens_bt`, and their keys and values.

        Args:
            tokens_bt: token ids.
            recent_bm: ids before the first token, oldest first, `NO_TOKEN` before the start.
            position_bt: position of each token in its own sequence, for the rotary embedding.
            attends_btj: True where token t attends to fresh token j; None is causal.
            segments_bt: segment ids of packed sequences; token shift and the states of delta layers do not cross from
                one into the next.
            valid_bt: True for the tokens that update the states of delta layers, on the left of each row; None is all.
                Dense models ignore it.
            fresh: buffer with earlier fresh tokens, and the states of delta layers before these tokens; None when
                these are the first tokens of their sequences.
            at: index in the buffer of the first of these tokens.
            cached: copied part of the cache, or the cache itself.
            attends_bs: True where a row of `Cached` holds a token.
            apart: parameters from `layers_apart`; then `fresh`, `cached` and the returned `fresh` are lists with an
                entry for each layer. The layers are compiled one by one.
            remat: recompute a layer in the backward pass instead of keeping its activations.
        """
        config = self.config
        x_btd = self.embed(tokens_bt, recent_bm, segments_bt)
        rotary_width = config.hybrid.rotary_width if config.hybrid else config.head_width
        rotary = rotary_angles(position_bt, rotary_width, config.rope_theta, config.rope_scaling)
        layer = self.layer_function(rotary, attends_btj, at, attends_bs, segments_bt, valid_bt, remat)
        if apart is not None:
            assert isinstance(fresh, list) and isinstance(cached, list)  # given together, as documented
            fresh_layers: list[Fresh] = []
            for scanned in zip(apart, fresh, cached, strict=True):
                x_btd, of_layer = layer(x_btd, scanned)
                fresh_layers.append(of_layer)
            return model_norm(config, x_btd, self.norm), fresh_layers
        assert not isinstance(fresh, list) and not isinstance(cached, list)
        parameters = nnx.state(self.layers)
        fresh = self.start_buffer(*tokens_bt.shape) if fresh is None else fresh
        if isinstance(cached, InPlace):
            index_l = jnp.arange(config.attention_layers)
            x_btd, new_fresh = jax.lax.scan(_reading(cached, layer), x_btd, (parameters, fresh, index_l))
        else:
            x_btd, new_fresh = jax.lax.scan(layer, x_btd, (parameters, fresh, cached))
        return model_norm(config, x_btd, self.norm), new_fresh

    def layers_apart(self) -> list[nnx.State]:
        """The parameters of each layer, sliced out once before a loop instead of in each of its steps."""
        stacked = nnx.state(self.layers)
        parts = [jax.tree.map(lambda leaf: leaf[layer], stacked) for layer in range(self.config.num_layers)]  # noqa: B023
        return jax.lax.optimization_barrier(parts)  # otherwise the compiler moves the slices back into the loop

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
        """The body of the scan over the stacked layers; arguments as in `__call__`."""
        block = nnx.graphdef(self.layers)

        def layer(
            x_btd: Array, scanned: tuple[nnx.State, Fresh | None, Cached | InPlace | None]
        ) -> tuple[Array, Fresh]:
            parameters, fresh, cached = scanned
            return nnx.merge(block, parameters)(x_btd, rotary, attends_btj, fresh, at, cached, attends_bs)

        return jax.checkpoint(layer, prevent_cse=False) if remat else layer

    def embed(
        self,
        tokens_bt: Int[Array, "b t"],
        recent_bm: Int[Array, "b m"],
        segments_bt: Int[Array, "b t"] | None,
    ) -> Float[Array, "b t d"]:
        """Embeddings with token shift, in the compute type."""
        table_vd = self.embedding[...].astype(self.config.dtype)
        if not self.config.token_shift:
            return table_vd[tokens_bt]
        num_tokens, reach = tokens_bt.shape[1], self.config.token_shift
        known = jnp.concatenate([recent_bm, tokens_bt], axis=1)
        embedded = table_vd[jnp.maximum(known, 0)] * (known != NO_TOKEN)[..., None]
        x_btd = embedded[:, reach:]
        for back in range(1, reach + 1):
            shifted_btd = embedded[:, reach - back : reach - back + num_tokens]
            if segments_bt is not None:
                before = jnp.pad(segments_bt, ((0, 0), (back, 0)), constant_values=-1)[:, :num_tokens]
                shifted_btd = shifted_btd * (before == segments_bt)[..., None]
            x_btd = x_btd + shifted_btd * self.token_shift[back - 1].astype(x_btd.dtype)[None, None, :]
        return x_btd

    def unembed(self, hidden_btd: Float[Array, "*b d"]) -> Float[Array, "*b v"]:
        """Logits, in float32 for every compute type."""
        table = self.embedding if self.config.tie_embeddings else self.unembedding
        return jnp.einsum(
            "...d,vd->...v",
            hidden_btd,
            table[...].astype(hidden_btd.dtype),
            preferred_element_type=jnp.float32,
        )


def _reading(whole: InPlace, layer: LayerFunction[Cached | InPlace | None]) -> LayerFunction[Array]:
    """A layer function that takes the index of its layer in the cache instead of a part of the cache."""

    def indexed(x_btd: Array, scanned: tuple[nnx.State, Fresh | None, Array]) -> tuple[Array, Fresh]:
        parameters, fresh, index = scanned
        return layer(x_btd, (parameters, fresh, whole._replace(layer=index)))

    return indexed


@runtime_checkable
class _WithFeedForward(Protocol):
    """The parameters of a layer's second half, in `Block` and in the hybrid's delta layer."""

    config: ModelConfig
    mlp_norm: nnx.Param
    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param


def feed_forward(block: _WithFeedForward, x_btd: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    """The second half of a layer: x plus SwiGLU of its norm, with the layer's own parameters."""
    dtype = x_btd.dtype
    y_btd = model_norm(block.config, x_btd, block.mlp_norm)
    gate_btf = jnp.einsum("btd,df->btf", y_btd, block.gate[...].astype(dtype))
    up_btf = jnp.einsum("btd,df->btf", y_btd, block.up[...].astype(dtype))
    return x_btd + jnp.einsum("btf,fd->btd", jax.nn.silu(gate_btf) * up_btf, block.down[...].astype(dtype))


def out_scale_of(config: ModelConfig) -> float:
    """Initial scale of projections back into the residual stream, so that its variance does not grow with depth."""
    return (2 * config.num_layers) ** -0.5


def model_norm(config: ModelConfig, x: Float[Array, "*b d"], scale: nnx.Param) -> Float[Array, "*b d"]:
    """`rms_norm` with the scale of this model: hybrids store it as its distance from one."""
    scale_d = scale[...].astype(jnp.float32)
    return rms_norm(x, scale_d + 1.0 if config.hybrid else scale_d, config.norm_eps)


def rms_norm(x: Float[Array, "*b d"], scale_d: Float[Array, "d"], eps: float) -> Float[Array, "*b d"]:
    """x divided by its root mean square along the last axis, times a learned scale; computed in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale_d.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)
