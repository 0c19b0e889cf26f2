"""How many tokens does the sampler write in a second, and what does it save that a cache outlives a turn?

Episodes of several turns: a prompt, then turns of the policy and answers that are appended, so that the context
grows. All slots work on episodes until as many are done as were asked for. The policy has the shape of
`conf/model/<model>.yaml` and random parameters; a share of its vocabulary ends a turn, which sets the mean length
of turns. Prints one JSON line per case, from most convenient to barest:

    reuse    the cache of an episode stays in its slot over its turns
    no_reuse every turn starts with an empty cache and computes the episode so far again
    dispatch decode steps alone: all slots in the middle of a turn, context of the given length

    tokens_per_s      tokens written (sampled) by wall time, best of the repeats; everything ran once before, so that
                      compilation is excluded, and every call waits for its tokens
    tokens_per_cpu_s  the same by processor time of the process (others may share the machine)
    ratio, cpu_ratio  of `reuse` over `no_reuse`, same slots

    python -m benchmarks.decode [--slots 16 64 96] [--episodes 128] [--turns 6] [--model nano]
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import pathlib
import platform
import time
from collections.abc import Sequence

import jax
import numpy as np
from omegaconf import OmegaConf

from tbx_jax.compilation import enable_compilation_cache
from tbx_jax.config import ModelConfig, SamplingConfig, validated
from tbx_jax.keys import key_for
from tbx_jax.models import Model, Params, build
from tbx_jax.sampler import Sampler

VOCABULARY = 768
PROMPT_TOKENS, ANSWER_TOKENS, MEAN_TURN_TOKENS = 60, 20, 14


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64, 96])
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--model", default="nano")
    options = parser.parse_args(arguments)

    enable_compilation_cache()
    conf = pathlib.Path(str(importlib.resources.files("tbx_conf")))
    config = validated(ModelConfig, OmegaConf.load(conf / "model" / f"{options.model}.yaml"))
    base = validated(SamplingConfig, OmegaConf.load(conf / "sampling" / "train.yaml"))
    model, params = jax.block_until_ready(build(config, VOCABULARY, key_for(0, "benchmark")))
    about = {"jax": jax.__version__, "device": jax.devices()[0].platform, "machine": platform.machine()}

    for slots in options.slots:
        sampling = base.model_copy(update={"slots": slots})
        runs: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for _ in range(1 + options.repeats):  # in turns, so that both meet the same neighbours on the machine
            for reuse, figures in runs.items():
                figures.append(run_episodes(model, params, sampling, options.episodes, options.turns, reuse=reuse))
        kept, again = (best(runs[reuse][1:]) for reuse in (True, False))
        ratios = {
            "ratio": round(kept["tokens_per_s"] / again["tokens_per_s"], 2),
            "cpu_ratio": round(kept["tokens_per_cpu_s"] / again["tokens_per_cpu_s"], 2),
        }
        print_line(case="reuse", slots=slots, **kept, **ratios, **about)
        print_line(case="no_reuse", slots=slots, **again, **about)
        for context in (64, 256):
            print_line(
                case="dispatch",
                slots=slots,
                context=context,
                **run_dispatches(model, params, sampling, context, options.repeats),
                **about,
            )


def run_episodes(
    model: Model, params: Params, sampling: SamplingConfig, episodes: int, turns: int, *, reuse: bool
) -> dict[str, float]:
    """Runs episodes through all slots; the same ones each time, whatever is kept of the cache."""
    end_ids = frozenset(range(model.vocabulary // MEAN_TURN_TOKENS))
    sampler = Sampler(model, end_ids, sampling, seed=0)
    texts = np.random.default_rng(0).integers(0, model.vocabulary, (episodes, PROMPT_TOKENS + turns * ANSWER_TOKENS))
    waiting = list(range(episodes))[::-1]
    episode_of: dict[int, int] = {}
    tokens_of: dict[int, list[int]] = {}
    turn_of: dict[int, int] = {}
    written = given = 0

    def admit(slot: int) -> None:
        if waiting:
            episode = episode_of[slot] = waiting.pop()
            tokens_of[slot], turn_of[slot] = texts[episode, :PROMPT_TOKENS].tolist(), 0
            sampler.begin(slot, tokens_of[slot], (episode, 0))

    began, began_cpu = time.perf_counter(), time.process_time()
    for slot in range(sampling.slots):
        admit(slot)
    while sampler.busy:
        for turn in sampler.advance(params):
            slot, written = turn.slot, written + len(turn.tokens)
            turn_of[slot] += 1
            if turn_of[slot] == turns or not turn.stopped:
                given += len(tokens_of[slot])
                sampler.free(slot)
                admit(slot)
                continue
            start = PROMPT_TOKENS + turn_of[slot] * ANSWER_TOKENS
            answer = texts[episode_of[slot], start : start + ANSWER_TOKENS].tolist()
            tokens_of[slot] += turn.tokens + answer
            key = (episode_of[slot], turn_of[slot])
            if reuse:
                sampler.extend(slot, answer, key)
            else:
                sampler.begin(slot, tokens_of[slot], key)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    return {
        "tokens_per_s": round(written / seconds, 1),
        "tokens_per_cpu_s": round(written / cpu_seconds, 1),
        "tokens": written,
        "tokens_per_episode": round((given + written) / episodes, 1),
        "seconds": round(seconds, 3),
    }


def run_dispatches(
    model: Model, params: Params, sampling: SamplingConfig, context: int, repeats: int
) -> dict[str, float]:
    """Decode steps with every slot writing: as many dispatches as a turn has room for, the best of the repeats."""
    sampler = Sampler(model, frozenset({0}), sampling.model_copy(update={"temperature": 0.0}), seed=0)
    prompt = np.random.default_rng(0).integers(1, model.vocabulary, context).tolist()
    best_s, best_cpu_s, dispatches = np.inf, np.inf, sampling.max_turn_tokens // sampling.decode_steps - 1
    for _ in range(1 + repeats):
        for slot in range(sampling.slots):
            sampler.free(slot)
            sampler.begin(slot, prompt, (slot,))
        sampler.advance(params)  # prefill and one dispatch: not part of the question
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(dispatches - 1):
            sampler.advance(params)
        best_s = min(best_s, time.perf_counter() - began)
        best_cpu_s = min(best_cpu_s, time.process_time() - began_cpu)
    tokens = sampling.slots * (dispatches - 1) * sampling.decode_steps
    return {
        "tokens_per_s": round(tokens / best_s, 1),
        "tokens_per_cpu_s": round(tokens / best_cpu_s, 1),
        "tokens": tokens,
        "seconds": round(best_s, 3),
    }


def best(runs: list[dict[str, float]]) -> dict[str, float]:
    """The figures of the fastest run, with the best use of the processor of any."""
    fastest = min(runs, key=lambda run: run["seconds"])
    return fastest | {"tokens_per_cpu_s": max(run["tokens_per_cpu_s"] for run in runs)}


def print_line(**figures: object) -> None:
    print(json.dumps({"benchmark": "decode", **figures}), flush=True)


if __name__ == "__main__":
    main()
