"""The decoder once more, in loops over numbers: an oracle that shares nothing with the implementation but its
parameters. One sequence, no cache, float64.
"""

import math


def reference_logits(config, params, tokens):
    """Logits after each token, as lists of floats."""
    table = params["embedding"].tolist()
    layers = [{name: stack[i].tolist() for name, stack in params["layers"].items()} for i in range(config.num_layers)]
    states = [_embed(config, params, table, tokens, place) for place in range(len(tokens))]
    for layer in layers:
        normed = [_norm(x, layer["attention_norm"], config.norm_eps) for x in states]
        mixed = _attend(config, layer, normed)
        states = [_add(x, y) for x, y in zip(states, mixed, strict=True)]
        states = [_add(x, _mlp(layer, _norm(x, layer["mlp_norm"], config.norm_eps))) for x in states]
    outputs = table if config.tie_embeddings else params["unembedding"].tolist()
    final = [_norm(x, params["norm"].tolist(), config.norm_eps) for x in states]
    return [[sum(a * b for a, b in zip(x, row, strict=True)) for row in outputs] for x in final]


def reference_logps(config, params, tokens, temperature=1.0):
    """log pi(token) of each token given the ones before it; 0.0 for the first."""
    logps = [0.0]
    for logits, following in zip(reference_logits(config, params, tokens)[:-1], tokens[1:], strict=True):
        scaled = [logit / temperature for logit in logits]
        logps.append(scaled[following] - math.log(sum(math.exp(logit) for logit in scaled)))
    return logps


def _embed(config, params, table, tokens, place):
    x = list(table[tokens[place]])
    for back in range(1, config.token_shift + 1):
        if place - back >= 0:
            scale = params["token_shift"][back - 1].tolist()
            x = [a + s * b for a, s, b in zip(x, scale, table[tokens[place - back]], strict=True)]
    return x


def _norm(x, scale, eps):
    root = math.sqrt(sum(a * a for a in x) / len(x) + eps)
    return [a / root * s for a, s in zip(x, scale, strict=True)]


def _add(x, y):
    return [a + b for a, b in zip(x, y, strict=True)]


def _heads(x, weight):
    """x (d) times weight (d, heads, h)."""
    return [
        [sum(x[d] * weight[d][head][i] for d in range(len(x))) for i in range(len(weight[0][0]))]
        for head in range(len(weight[0]))
    ]


def _rotate(x, place, config):
    half = len(x) // 2
    out = list(x)
    for i in range(half):
        angle = place * _frequency(config, i, len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def _frequency(config, i, width):
    """Of pair i; Llama 3.1 speaks of wave lengths: long ones are stretched, short ones not, between them a mixture."""
    frequency = config.rope_theta ** (-2 * i / width)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    length = 2 * math.pi / frequency
    if length > scaling.original_length / scaling.low_freq_factor:
        return frequency / scaling.factor
    if length < scaling.original_length / scaling.high_freq_factor:
        return frequency
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = (scaling.original_length / length - low) / (high - low)
    return (1 - kept) * frequency / scaling.factor + kept * frequency


def _projected(config, layer, name, x):
    heads = _heads(x, layer[name])
    if config.qkv_bias:
        heads = [_add(head, bias) for head, bias in zip(heads, layer[f"{name}_bias"], strict=True)]
    return heads


def _attend(config, layer, normed):
    queries, keys, values = ([_projected(config, layer, name, x) for x in normed] for name in ("query", "key", "value"))
    if config.qk_norm:
        queries = [[_norm(head, layer["query_norm"], config.norm_eps) for head in heads] for heads in queries]
        keys = [[_norm(head, layer["key_norm"], config.norm_eps) for head in heads] for heads in keys]
    queries = [[_rotate(head, place, config) for head in heads] for place, heads in enumerate(queries)]
    keys = [[_rotate(head, place, config) for head in heads] for place, heads in enumerate(keys)]
    outputs = []
    for place in range(len(normed)):
        out = [0.0] * config.width
        for head in range(config.num_heads):
            shared = head * config.num_kv_heads // config.num_heads
            scores = [
                sum(a * b for a, b in zip(queries[place][head], keys[seen][shared], strict=True))
                / math.sqrt(config.head_width)
                for seen in range(place + 1)
            ]
            weights = [math.exp(score) for score in scores]
            for i in range(config.head_width):
                mixed = sum(w * values[seen][shared][i] for seen, w in enumerate(weights)) / sum(weights)
                for d in range(config.width):
                    out[d] += mixed * layer["out"][head][i][d]
        outputs.append(out)
    return outputs


def _mlp(layer, x):
    gate, up = (
        [sum(x[d] * layer[name][d][f] for d in range(len(x))) for f in range(len(layer[name][0]))]
        for name in ("gate", "up")
    )
    hidden = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
    return [sum(hidden[f] * layer["down"][f][d] for f in range(len(hidden))) for d in range(len(x))]
