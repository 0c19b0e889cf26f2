"""The hybrid decoder once more, token by token in float64: an oracle that shares only parameters with it.

One sequence, no cache, no chunks: the memory of each head is a matrix that each token changes in turn.
"""

import numpy as np


def reference_hybrid_logits(config, params, tokens):
    """Logits after each token."""
    params = _float64(params)
    x = params["embedding"][np.asarray(tokens)]
    for layer in range(config.num_layers):
        period, place = divmod(layer, config.hybrid.delta_layers + 1)
        if place < config.hybrid.delta_layers:
            own = {name: stack[period, place] for name, stack in params["layers"]["delta"].items()}
            x = x + _delta(config, own, _norm(config, x, own["mixer_norm"]))
        else:
            own = {name: stack[period] for name, stack in params["layers"]["attention"].items()}
            x = x + _gated_attention(config, own, _norm(config, x, own["attention_norm"]))
        y = _norm(config, x, own["mlp_norm"])
        x = x + (_silu(y @ own["gate"]) * (y @ own["up"])) @ own["down"]
    outputs = params["embedding"] if config.tie_embeddings else params["unembedding"]
    return _norm(config, x, params["norm"]) @ outputs.T


def _float64(tree):
    return {name: _float64(leaf) if isinstance(leaf, dict) else np.asarray(leaf, float) for name, leaf in tree.items()}


def _norm(config, x, distance_from_one):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * (1 + distance_from_one)


def _silu(x):
    return x / (1 + np.exp(-x))


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _delta(config, own, y):
    sizes = config.hybrid
    keys = sizes.key_heads * sizes.key_width
    mixed, outputs = y @ own["mixed"], np.zeros_like(y)
    memory = np.zeros((sizes.value_heads, sizes.key_width, sizes.value_width))
    for t in range(len(y)):
        seen = [mixed[t - back] if t >= back else 0 * mixed[t] for back in range(sizes.conv_taps)]
        channels = _silu(sum(own["taps"][:, -1 - back] * seen[back] for back in range(sizes.conv_taps)))
        for head in range(sizes.value_heads):
            shared = head * sizes.key_heads // sizes.value_heads
            query = channels[:keys].reshape(-1, sizes.key_width)[shared]
            key = channels[keys : 2 * keys].reshape(-1, sizes.key_width)[shared]
            value = channels[2 * keys :].reshape(-1, sizes.value_width)[head]
            query = query / np.sqrt((query**2).sum() + 1e-6) / np.sqrt(sizes.key_width)
            key = key / np.sqrt((key**2).sum() + 1e-6)
            speed = np.log1p(np.exp(y[t] @ own["decay"][:, head] + own["decay_bias"][head]))
            memory[head] *= np.exp(-np.exp(own["decay_rate"][head]) * speed)
            strength = _sigmoid(y[t] @ own["write"][:, head])
            memory[head] += np.outer(key, strength * (value - key @ memory[head]))
            read = query @ memory[head]
            read = read / np.sqrt((read**2).mean() + config.norm_eps) * own["read_norm"]
            outputs[t] += read * _silu(y[t] @ own["read_gate"][:, head]) @ own["out"][head]
    return outputs


def _gated_attention(config, own, y):
    h = config.head_width
    queries = np.einsum("td,dno->tno", y, own["query"])
    keys = np.einsum("td,dkh->tkh", y, own["key"])
    values = np.einsum("td,dkh->tkh", y, own["value"])
    outputs = np.zeros_like(y)
    rotated_keys = [_rotate(config, _norm(config, key, own["key_norm"]), t) for t, key in enumerate(keys)]
    for t in range(len(y)):
        rotated = _rotate(config, _norm(config, queries[t, :, :h], own["query_norm"]), t)
        for head in range(config.num_heads):
            shared = head * config.num_kv_heads // config.num_heads
            scores = np.array([rotated[head] @ rotated_keys[s][shared] / np.sqrt(h) for s in range(t + 1)])
            weights = np.exp(scores) / np.exp(scores).sum()
            mixed = sum(weight * values[s, shared] for s, weight in enumerate(weights))
            outputs[t] += (mixed * _sigmoid(queries[t, head, h:])) @ own["out"][head]
    return outputs


def _rotate(config, x, place):
    width = config.hybrid.rotary_width
    out = x.copy()
    for i in range(width // 2):
        angle = place * config.rope_theta ** (-2 * i / width)
        first, second = x[:, i], x[:, i + width // 2]
        out[:, i] = first * np.cos(angle) - second * np.sin(angle)
        out[:, i + width // 2] = second * np.cos(angle) + first * np.sin(angle)
    return out
