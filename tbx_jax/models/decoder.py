"""A dense decoder of the Qwen3 kind: pre-norm, grouped-query attention with query and key norms, rotary, SwiGLU.

Layers are scanned: every layer parameter carries a leading axis `l`, so compile time does not grow with depth. Each
parameter names its axes where it is made (`letters`), which is all that sharding needs to know.

One addition to Qwen3, off by default: *token shift*. The embeddings of the `m` previous tokens are added to a
token's own, each through a learned diagonal that starts at zero. Small models copy long strings far better with it.

Attention has two parts: tokens in the cache, and fresh tokens that are not in it yet. A forward pass without a cache
has only the fresh part, prefill has both, and several decode steps share one small buffer of fresh tokens, so that
the large cache is only read between two writes.

Source: Qwen3 technical report, https://arxiv.org/abs/2505.09388
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tbx_envs.errors import ConfigError
from tbx_jax.cache import NO_TOKEN
from tbx_jax.config import ModelConfig

_EMBEDDING_STD = 0.02
_MASKED = -1e30  # finite, so that a difference of two masked scores is not NaN


class Fresh(NamedTuple):
    """Keys and values that were computed but are not in the cache yet."""

    keys_lbjkh: Float[Array, "*l b j k h"]
    values_lbjkh: Float[Array, "*l b j k h"]


class Cached(NamedTuple):
    """The part of the cache that attention reads."""

    keys_lbkhs: Float[Array, "*l b k h s"]
    values_lbksh: Float[Array, "*l b k s h"]

    def layers(self) -> list[Cached]:
        """The same, taken apart into layers."""
        return [Cached(self.keys_lbkhs[layer], self.values_lbksh[layer]) for layer in range(len(self.keys_lbkhs))]


def parameter(shape: tuple[int, ...], letters: str, *, start: float = 0.0, std: float = 0.0) -> nnx.Param:
    """The description of a parameter: its axes, and its initial values, `start` plus normal noise of this deviation.

    A decoder is made of descriptions only; numbers come in with `nnx.merge` (`tbx_jax.models.build` draws some).
    """
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), letters=letters, start=start, std=std)


class Block(nnx.Module):
    """One layer. Built with all layers' parameters stacked, called with one layer's by `Decoder`'s scan."""

    def __init__(self, config: ModelConfig):
        d, f = config.width, config.mlp_width
        n, k, h = config.num_heads, config.num_kv_heads, config.head_width
        l = config.num_layers  # noqa: E741
        if n % k or h % 2:
            raise ConfigError(
                f"model.num_heads {n}, model.num_kv_heads {k}, model.head_width {h}: query heads share key-value heads "
                f"evenly and a head is rotated in pairs; make num_heads a multiple of num_kv_heads, head_width even"
            )
        # Projections back into the residual stream start smaller, so that its variance does not grow with depth.
        out_scale = (2 * l) ** -0.5

        self.config = config
        self.attention_norm = parameter((l, d), "l d", start=1.0)
        self.query = parameter((l, d, n, h), "l d n h", std=d**-0.5)
        self.key = parameter((l, d, k, h), "l d k h", std=d**-0.5)
        self.value = parameter((l, d, k, h), "l d k h", std=d**-0.5)
        self.out = parameter((l, n, h, d), "l n h d", std=out_scale * (n * h) ** -0.5)
        if config.qk_norm:
            self.query_norm = parameter((l, h), "l h", start=1.0)
            self.key_norm = parameter((l, h), "l h", start=1.0)
        self.mlp_norm = parameter((l, d), "l d", start=1.0)
        self.gate = parameter((l, d, f), "l d f", std=d**-0.5)
        self.up = parameter((l, d, f), "l d f", std=d**-0.5)
        self.down = parameter((l, f, d), "l f d", std=out_scale * f**-0.5)

    def __call__(
        self,
        x_btd: Float[Array, "b t d"],
        rotary: tuple[Float[Array, "#b t h2"], Float[Array, "#b t h2"]],
        attends_btj: Bool[Array, "#b t j"],
        fresh: Fresh | None,
        at: Int[Array, ""] | int,
        cached: Cached | None,
        attends_bs: Bool[Array, "b s"] | None,
    ) -> tuple[Float[Array, "b t d"], Fresh]:
        config, dtype = self.config, x_btd.dtype
        y_btd = rms_norm(x_btd, self.attention_norm[...], config.norm_eps)
        query_btnh = jnp.einsum("btd,dnh->btnh", y_btd, self.query[...].astype(dtype))
        key_btkh = jnp.einsum("btd,dkh->btkh", y_btd, self.key[...].astype(dtype))
        value_btkh = jnp.einsum("btd,dkh->btkh", y_btd, self.value[...].astype(dtype))
        if config.qk_norm:
            query_btnh = rms_norm(query_btnh, self.query_norm[...], config.norm_eps)
            key_btkh = rms_norm(key_btkh, self.key_norm[...], config.norm_eps)
        query_btnh, key_btkh = rotate(query_btnh, *rotary), rotate(key_btkh, *rotary)
        if fresh is None:
            fresh = Fresh(key_btkh, value_btkh)
        else:
            fresh = Fresh(
                jax.lax.dynamic_update_slice_in_dim(fresh.keys_lbjkh, key_btkh, at, axis=1),
                jax.lax.dynamic_update_slice_in_dim(fresh.values_lbjkh, value_btkh, at, axis=1),
            )
        mixed_btnh = attention(query_btnh, fresh, attends_btj, cached, attends_bs)
        x_btd = x_btd + jnp.einsum("btnh,nhd->btd", mixed_btnh, self.out[...].astype(dtype))
        y_btd = rms_norm(x_btd, self.mlp_norm[...], config.norm_eps)
        gate_btf = jnp.einsum("btd,df->btf", y_btd, self.gate[...].astype(dtype))
        up_btf = jnp.einsum("btd,df->btf", y_btd, self.up[...].astype(dtype))
        return x_btd + jnp.einsum("btf,fd->btd", jax.nn.silu(gate_btf) * up_btf, self.down[...].astype(dtype)), fresh


class Decoder(nnx.Module):
    """Token ids in, normed hidden states out; `unembed` makes logits of them."""

    def __init__(self, config: ModelConfig, vocabulary: int):
        d, v, m = config.width, vocabulary, config.token_shift
        self.config = config
        self.embedding = parameter((v, d), "v d", std=_EMBEDDING_STD)
        if m:
            self.token_shift = parameter((m, d), "m d")
        self.layers = Block(config)
        self.norm = parameter((d,), "d", start=1.0)
        if not config.tie_embeddings:
            self.unembedding = parameter((v, d), "v d", std=_EMBEDDING_STD)

    def __call__(
        self,
        tokens_bt: Int[Array, "b t"],
        recent_bm: Int[Array, "b m"],
        position_bt: Int[Array, "#b t"],
        attends_btj: Bool[Array, "#b t j"],
        *,
        segments_bt: Int[Array, "b t"] | None = None,
        fresh: Fresh | None = None,
        at: Int[Array, ""] | int = 0,
        cached: Cached | list[Cached] | None = None,
        attends_bs: Bool[Array, "b s"] | None = None,
        remat: bool = False,
    ) -> tuple[Float[Array, "b t d"], Fresh]:
        """Hidden states of `tokens_bt`, and their keys and values.

        Args:
            tokens_bt: ids to compute.
            recent_bm: ids before the first of them, oldest first, `NO_TOKEN` where there is none.
            position_bt: place of each token in its own sequence, for the rotary embedding.
            attends_btj: True where token t sees fresh token j.
            segments_bt: packed sequences; token shift does not cross from one into the next.
            fresh: a buffer that already holds earlier fresh tokens; None when there are none but these.
            at: where in the buffer these tokens go.
            cached: the part of the cache to read. As a list of layers (`Cached.layers`) no layer is copied out of
                the whole again in each step of a loop; the layers are then compiled one by one.
            attends_bs: True where a row's cache holds a token.
            remat: recompute a layer in the backward pass instead of keeping its activations.
        """
        x_btd = self.embed(tokens_bt, recent_bm, segments_bt)
        rotary = rotary_angles(position_bt, self.config.head_width, self.config.rope_theta)
        block, parameters = nnx.split(self.layers)

        def layer(x_btd, scanned):
            parameters, fresh, cached = scanned
            return nnx.merge(block, parameters)(x_btd, rotary, attends_btj, fresh, at, cached, attends_bs)

        if remat:
            layer = jax.checkpoint(layer, prevent_cse=False)
        if isinstance(cached, list):
            news = []
            for index, cached_layer in enumerate(cached):
                parameters_layer, fresh_layer = jax.tree.map(lambda leaf: leaf[index], (parameters, fresh))  # noqa: B023
                x_btd, new = layer(x_btd, (parameters_layer, fresh_layer, cached_layer))
                news.append(new)
            fresh = jax.tree.map(lambda *leaves: jnp.stack(leaves), *news)
        else:
            x_btd, fresh = jax.lax.scan(layer, x_btd, (parameters, fresh, cached))
        return rms_norm(x_btd, self.norm[...], self.config.norm_eps), fresh

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


def rms_norm(x: Float[Array, "*b d"], scale_d: Float[Array, "d"], eps: float) -> Float[Array, "*b d"]:
    """x over its root mean square along the last axis, times a learned scale; computed in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale_d.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def rotary_angles(
    position_bt: Int[Array, "b t"], head_width: int, theta: float
) -> tuple[Float[Array, "b t h2"], Float[Array, "b t h2"]]:
    """Cosine and sine of each position's rotation, one angle per pair of components."""
    frequency = theta ** (-jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width)
    angle = position_bt[..., None].astype(jnp.float32) * frequency[None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x_btnh: Float[Array, "b t n h"], cos: Float[Array, "#b t h2"], sin: Float[Array, "#b t h2"]
) -> Float[Array, "b t n h"]:
    """Rotary embedding; component i is paired with component i + h/2, as in the published Qwen3 weights."""
    first, second = jnp.split(x_btnh, 2, axis=-1)
    cos, sin = cos[:, :, None, :].astype(x_btnh.dtype), sin[:, :, None, :].astype(x_btnh.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(
    query_btnh: Float[Array, "b t n h"],
    fresh: Fresh,
    attends_btj: Bool[Array, "#b t j"],
    cached: Cached | None,
    attends_bs: Bool[Array, "b s"] | None,
) -> Float[Array, "b t n h"]:
    """Softmax attention over cached and fresh tokens together, without joining their arrays.

    Both parts share one maximum and one denominator; softmax is in float32. Query head i reads key-value head
    i // r, as in Qwen3. All queries of a key-value head form one axis q: two free axes in one product make CPU code
    several times slower.
    """
    b, t, n, h = query_btnh.shape
    k = fresh.keys_lbjkh.shape[-2]
    r = n // k
    query_bkqh = (query_btnh * h**-0.5).transpose(0, 2, 1, 3).reshape(b, k, r * t, h)
    score_bkqj = jnp.einsum("bkqh,bjkh->bkqj", query_bkqh, fresh.keys_lbjkh, preferred_element_type=jnp.float32)
    score_bkqj = jnp.where(jnp.tile(attends_btj, (1, r, 1))[:, None], score_bkqj, _MASKED)
    highest_bkq1 = jax.lax.stop_gradient(jnp.max(score_bkqj, axis=-1, keepdims=True))
    if cached is not None:
        score_bkqs = jnp.einsum("bkqh,bkhs->bkqs", query_bkqh, cached.keys_lbkhs, preferred_element_type=jnp.float32)
        score_bkqs = jnp.where(attends_bs[:, None, None], score_bkqs, _MASKED)
        highest_bkq1 = jnp.maximum(highest_bkq1, jnp.max(score_bkqs, axis=-1, keepdims=True))
    weight_bkqj = jnp.exp(score_bkqj - highest_bkq1)
    total_bkq = jnp.sum(weight_bkqj, axis=-1)
    mixed_bkqh = jnp.einsum("bkqj,bjkh->bkqh", weight_bkqj.astype(query_btnh.dtype), fresh.values_lbjkh)
    if cached is not None:
        weight_bkqs = jnp.exp(score_bkqs - highest_bkq1)
        total_bkq = total_bkq + jnp.sum(weight_bkqs, axis=-1)
        mixed_bkqh += jnp.einsum("bkqs,bksh->bkqh", weight_bkqs.astype(query_btnh.dtype), cached.values_lbksh)
    mixed_bkqh = mixed_bkqh / total_bkq[..., None].astype(mixed_bkqh.dtype)
    return mixed_bkqh.reshape(b, n, t, h).transpose(0, 2, 1, 3)
