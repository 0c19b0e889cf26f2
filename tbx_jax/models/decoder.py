"""The dense decoder: pre-norm, grouped-query attention, rotary, SwiGLU. Llama, Qwen2 and Qwen3 by configuration.

Layers are scanned: every layer parameter carries a leading axis `l`, so compile time does not grow with depth. Each
parameter names its axes where it is made (`letters`), which is all that sharding needs to know.

One addition of ours, off in published models: *token shift*. The embeddings of the `m` previous tokens are added to a
token's own, each through a learned diagonal that starts at zero. Small models copy long strings far better with it.

A layer of attention in a hybrid model is the same `Block`, with three differences: a sigmoid gate on what attention
returns, rotary positions on a part of each head, and norm scales stored as their distance from one.

Sources: Qwen3 technical report, https://arxiv.org/abs/2505.09388; Llama 3, https://arxiv.org/abs/2407.21783
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tbx_envs.errors import ConfigError
from tbx_jax.config import ModelConfig
from tbx_jax.models.attention import Cached, Fresh, InPlace, attention, rotary_angles, rotate
from tbx_jax.models.cache import NO_TOKEN

_EMBEDDING_STD = 0.02


def parameter(shape: tuple[int, ...], letters: str, *, start: float = 0.0, std: float = 0.0) -> nnx.Param:
    """The description of a parameter: its axes, and its initial values, `start` plus normal noise of this deviation.

    A decoder is made of descriptions only; numbers come in with `nnx.merge` (`tbx_jax.models.build` draws some).
    """
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), letters=letters, start=start, std=std)


class Block(nnx.Module):
    """One layer. Built with all layers' parameters stacked, called with one layer's by the decoder's scan."""

    def __init__(self, config: ModelConfig):
        d, f = config.width, config.mlp_width
        n, k, h = config.num_heads, config.num_kv_heads, config.head_width
        l = config.attention_layers  # noqa: E741
        if n % k or h % 2:
            raise ConfigError(
                f"model.num_heads {n}, model.num_kv_heads {k}, model.head_width {h}: query heads share key-value heads "
                f"evenly and a head is rotated in pairs; make num_heads a multiple of num_kv_heads, head_width even"
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
        rotary: tuple[Float[Array, "#b t h2"], Float[Array, "#b t h2"]],
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
        """Queries, their output gates (None without), keys and values; with bias and norm, not rotated yet."""
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
    """Token ids in, normed hidden states out; `unembed` makes logits of them."""

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
        """What stands for `fresh` where none is given: nothing, a dense model needs no buffer then."""
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
            tokens_bt: ids to compute.
            recent_bm: ids before the first of them, oldest first, `NO_TOKEN` where there is none.
            position_bt: place of each token in its own sequence, for the rotary embedding.
            attends_btj: True where token t sees fresh token j; None is causal.
            segments_bt: packed sequences; token shift and the states of delta layers do not cross from one into the
                next.
            valid_bt: True for the tokens that move the states of delta layers, on the left of each row; None is all.
                Dense models have no use for it.
            fresh: a buffer that already holds earlier fresh tokens, and the states of delta layers before these; None
                when there are none but these, and they start their sequences.
            at: where in the buffer these tokens go.
            cached: the part of the cache to read, or the cache itself.
            attends_bs: True where a row of `Cached` holds a token.
            apart: from `layers_apart`; then `fresh` and `cached` are lists of layers as well, and so is what is
                returned. The layers are compiled one by one.
            remat: recompute a layer in the backward pass instead of keeping its activations.
        """
        config = self.config
        x_btd = self.embed(tokens_bt, recent_bm, segments_bt)
        rotary_width = config.hybrid.rotary_width if config.hybrid else config.head_width
        rotary = rotary_angles(position_bt, rotary_width, config.rope_theta, config.rope_scaling)
        layer = self.layer_function(rotary, attends_btj, at, attends_bs, segments_bt, valid_bt, remat)
        parameters = nnx.state(self.layers)
        fresh = self.start_buffer(*tokens_bt.shape) if fresh is None else fresh
        if isinstance(cached, InPlace):
            layer, cached = _reading(cached, layer), jnp.arange(config.attention_layers)
        if apart is not None:
            news = []
            for scanned in zip(apart, fresh, cached, strict=True):
                x_btd, new = layer(x_btd, scanned)
                news.append(new)
            fresh = news
        else:
            x_btd, fresh = jax.lax.scan(layer, x_btd, (parameters, fresh, cached))
        return model_norm(config, x_btd, self.norm), fresh

    def layers_apart(self) -> list[nnx.State]:
        """The parameters of each layer. Taken apart before a loop, they are not copied out of the whole in each of its
        steps.
        """
        stacked = nnx.state(self.layers)
        parts = [jax.tree.map(lambda leaf: leaf[layer], stacked) for layer in range(self.config.num_layers)]  # noqa: B023
        return jax.lax.optimization_barrier(parts)  # or the compiler would put the copies back into the loop

    def layer_function(self, rotary, attends_btj, at, attends_bs, segments_bt, valid_bt, remat):
        """What is done at each step over the stacked layers: (x_btd, (parameters, fresh, cached)) -> (x_btd, fresh)."""
        block = nnx.graphdef(self.layers)

        def layer(x_btd, scanned):
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
        """Logits, in float32 whatever the compute type."""
        table = self.embedding if self.config.tie_embeddings else self.unembedding
        return jnp.einsum(
            "...d,vd->...v",
            hidden_btd,
            table[...].astype(hidden_btd.dtype),
            preferred_element_type=jnp.float32,
        )


def _reading(whole: InPlace, layer):
    """A layer that is given its place in the cache instead of its part of it."""

    def placed(x_btd, scanned):
        parameters, fresh, place = scanned
        return layer(x_btd, (parameters, fresh, whole._replace(layer=place)))

    return placed


def feed_forward(block: nnx.Module, x_btd: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
    """The second half of a layer: x plus SwiGLU of its norm, with the layer's own parameters."""
    dtype = x_btd.dtype
    y_btd = model_norm(block.config, x_btd, block.mlp_norm)
    gate_btf = jnp.einsum("btd,df->btf", y_btd, block.gate[...].astype(dtype))
    up_btf = jnp.einsum("btd,df->btf", y_btd, block.up[...].astype(dtype))
    return x_btd + jnp.einsum("btf,fd->btd", jax.nn.silu(gate_btf) * up_btf, block.down[...].astype(dtype))


def out_scale_of(config: ModelConfig) -> float:
    """Projections back into the residual stream start smaller, so that its variance does not grow with depth."""
    return (2 * config.num_layers) ** -0.5


def model_norm(config: ModelConfig, x: Float[Array, "*b d"], scale: nnx.Param) -> Float[Array, "*b d"]:
    """`rms_norm` as this model has it: hybrids store a scale as its distance from one."""
    scale_d = scale[...].astype(jnp.float32)
    return rms_norm(x, scale_d + 1.0 if config.hybrid else scale_d, config.norm_eps)


def rms_norm(x: Float[Array, "*b d"], scale_d: Float[Array, "d"], eps: float) -> Float[Array, "*b d"]:
    """x over its root mean square along the last axis, times a learned scale; computed in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale_d.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)
