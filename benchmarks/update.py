"""How many tokens does the learner train on in a second?

A batch of random sequences, as long as the clinic's episodes and a third of them sampled by the policy, in the
micro-batches and buckets that `tbx train` uses. The policy has the shape of `conf/model/<model>.yaml` and random
parameters. Prints one JSON line per case, from most convenient to barest:

    policy      a GRPO update: gradients of all micro-batches, clipping, AdamW
    supervised  the same with the SFT loss
    forward     log-probabilities of the same micro-batches, which every update needs

    tokens_per_s  tokens of the sequences by wall time, padding not counted, best of the repeats; compilation is
                  excluded by running each case once before
    seconds       of one update

    python -m benchmarks.update [--sequences 48] [--micro-batch 16] [--repeats 5] [--model nano]
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import pathlib
import platform
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from omegaconf import OmegaConf

from tbx_jax.batching import Batch, build_batch, length_buckets
from tbx_jax.compilation import enable_compilation_cache
from tbx_jax.config import AlgoConfig, MeshConfig, ModelConfig, OptimConfig, validated
from tbx_jax.keys import key_for
from tbx_jax.learner import build_learner
from tbx_jax.models import build, token_logps
from tbx_jax.trajectory import Trajectory

VOCABULARY = 768
MEAN_TOKENS, DEVIATION_TOKENS, WRITTEN_SHARE = 180, 45, 0.35


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=48, help="6 groups of 8")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="nano")
    options = parser.parse_args(arguments)

    enable_compilation_cache()
    conf = pathlib.Path(str(importlib.resources.files("tbx_conf")))
    config = validated(ModelConfig, OmegaConf.load(conf / "model" / f"{options.model}.yaml"))
    model, params = build(config, VOCABULARY, key_for(0, "benchmark"))
    learner = build_learner(
        model,
        optim=validated(OptimConfig, OmegaConf.load(conf / "optim" / "adamw.yaml")),
        mesh=validated(MeshConfig, OmegaConf.load(conf / "mesh" / "one.yaml")),
        num_steps=1 + options.repeats,
        algo=validated(AlgoConfig, OmegaConf.load(conf / "algo" / "grpo.yaml")),
    )
    batch = made_up_batch(options.sequences, options.micro_batch, config.max_length)
    state = learner.init(params)
    logps = jax.jit(token_logps, static_argnums=0)

    def policy() -> None:
        nonlocal state
        state, _ = learner.update(state, batch)

    def supervised() -> None:
        nonlocal state
        state, _ = learner.sft_update(state, batch)

    def forward() -> None:
        for micro_batch in batch.micro_batches:
            jax.block_until_ready(logps(model, state.params, micro_batch.tokens_bt))

    about = {"jax": jax.__version__, "device": jax.devices()[0].platform, "machine": platform.machine()}
    for case in (policy, supervised, forward):
        seconds = best_seconds(case, options.repeats)
        figures = {
            "tokens_per_s": round(batch.num_tokens / seconds, 1),
            "seconds": round(seconds, 4),
            "tokens": batch.num_tokens,
            "trained_tokens": batch.num_trained,
            "shapes": [list(micro_batch.tokens_bt.shape) for micro_batch in batch.micro_batches],
        }
        print(json.dumps({"benchmark": "update", "case": case.__name__, **figures, **about}), flush=True)


def made_up_batch(num_sequences: int, micro_batch: int, max_length: int) -> Batch:
    generator = np.random.default_rng(0)
    lengths = generator.normal(MEAN_TOKENS, DEVIATION_TOKENS, num_sequences).clip(32, max_length).astype(int)
    trajectories = []
    for length in lengths.tolist():
        wrote_t = generator.random(length) < WRITTEN_SHARE
        tokens_t = generator.integers(0, VOCABULARY, length).astype(np.int32)
        logp_t = np.where(wrote_t, np.float32(-np.log(VOCABULARY)), np.float32(0))
        trajectories.append(Trajectory("made/up/000", 0, 1.0, False, tokens_t, wrote_t, logp_t))
    advantages = generator.normal(0, 1, num_sequences).astype(np.float32)
    return build_batch(trajectories, advantages, micro_batch=micro_batch, buckets=length_buckets(max_length))


def best_seconds(run: Callable[[], None], repeats: int) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


if __name__ == "__main__":
    main()
