"""How many tokens does the sampler decode in a second, and how much does each of its features gain?

Episodes of several turns: a prompt, then turns of the policy and answers that are appended, so that the context grows.
All cache slots work on episodes until the number asked for is done. Parameters are random; a share of the vocabulary
ends
a turn, which sets the mean length of turns. Prints one JSON line per case:

    no_reuse a comparison: the cache of an episode is kept between its turns, against every turn starting with an empty
             cache and prefilling the episode so far again. Of the shapes `nano` and `smollm2`, with prompts and
             answers as in the shipped policy's episodes (`short`), with a few tool descriptions (`tools`), with those
             of a real benchmark (`long`)
    generate a comparison: the sampler, against `transformers.generate` in torch with the same weights, a fixed batch
             of as many episodes as slots, a cache within a turn, the context prefilled again for each turn, and the
             number of threads that is fastest for it (one, or one per core). Of the shape `nano`, here without token
             shift, which transformers does not know, and of SmolLM2-135M (`smollm2`)
    write    decode steps alone: all slots in the middle of a turn, context of the given length; of any of the shapes,
             `qwen3_0_6b` (bfloat16, meant for a GPU) among them. `read_gb_per_s` counts what every step must read, the
             parameters once and each row's keys and values; `bandwidth_share` is relative to `--peak-gb-per-s`, or to
             the bandwidth of a sum of a large array here

    tokens_per_s      sampled tokens by wall time, median of the repeats; everything ran once before, so that
                      compilation is excluded, and every call waits for its tokens
    tokens_per_cpu_s  the same by processor time of the process (others may share the machine)
    ratio, cpu_ratio  the sampler's rate over the other side's, median over the repeats, in which the two alternate

    python -m benchmarks.decode [--cases no_reuse generate write] [--models nano smollm2] [--slots 16 64] [--turns 6]
    python -m benchmarks.decode --cases write --models qwen3_0_6b --slots 64 --contexts 256 1024 [--peak-gb-per-s 4800]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.resources
import importlib.util
import itertools
import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from omegaconf import OmegaConf

from benchmarks.transformers_peer import GeneratePeer
from tbx_jax.compilation import enable_compilation_cache
from tbx_jax.config import ModelConfig, SamplingConfig, validated
from tbx_jax.keys import key_for
from tbx_jax.models import Model, Params, build, compute_params
from tbx_jax.sampler.dispatch_shapes import num_cores
from tbx_jax.sampler.sampler import Sampler

MEAN_TURN_TOKENS = 14
BATCH = 16
MODELS = ("nano", "smollm2", "qwen3_0_6b")


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Lengths of the given texts of an episode, in tokens.

    Attributes:
        prompt: length of the prompt.
        answer: length of the text after each turn.
        episodes: number of episodes that a comparison runs.
    """

    prompt: int
    answer: int
    episodes: int


# As in the shipped policy's episodes; with a few tool descriptions in the prompt; with those of a real benchmark.
LENGTHS = {"short": Lengths(60, 20, 128), "tools": Lengths(300, 36, 64), "long": Lengths(1200, 120, 32)}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model with random parameters.

    Attributes:
        config: sizes.
        vocabulary: number of tokens.
        episodes: number of episodes that a comparison with transformers runs.
    """

    config: ModelConfig
    vocabulary: int
    episodes: int

    @functools.cached_property
    def model(self) -> tuple[Model, Params]:
        model, params = build(self.config, self.vocabulary, key_for(0, "benchmark"))
        return model, jax.block_until_ready(compute_params(model, params))


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a run took.

    Attributes:
        tokens: number of sampled tokens.
        seconds: wall time.
        cpu_seconds: processor time.
    """

    tokens: int
    seconds: float
    cpu_seconds: float

    @property
    def per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def per_cpu_s(self) -> float:
        return self.tokens / self.cpu_seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=("no_reuse", "generate", "write"), default=["no_reuse", "write"])
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["nano", "smollm2"])
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[64, 256], help="context lengths of `write`, in tokens"
    )
    parser.add_argument("--peak-gb-per-s", type=float, help="peak bandwidth of the device's memory, for `write`")
    parser.add_argument("--peer-threads", type=int, help="threads of torch; by default the fastest number")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    enable_compilation_cache()
    if "no_reuse" in options.cases:
        compare_with_no_reuse(options)
    if "generate" in options.cases:
        compare_with_generate(options)
    if "write" in options.cases:
        measure_writes(options)


def compare_with_no_reuse(options: argparse.Namespace) -> None:
    for model, name, slots in itertools.product(options.models, options.lengths, options.slots):
        shape, lengths = shape_of(model), LENGTHS[name]
        episodes = lengths.episodes if model == "nano" else shape.episodes
        run = functools.partial(run_episodes, shape, slots, lengths, episodes, options.turns)
        ours, others = alternated(options.repeats, lambda: run(reuse=True), lambda: run(reuse=False))  # noqa: B023
        about = {"model": model, "slots": slots, "lengths": name, "turns": options.turns}
        print_comparison("no_reuse", ours, others, **about)


def compare_with_generate(options: argparse.Namespace) -> None:
    if importlib.util.find_spec("torch") is None:
        print_line(case="generate", skipped="torch is not installed: pip install torch==2.13.0")
        return
    for name in options.models:
        shape, lengths = shapes()[name], LENGTHS["short"]
        peer = GeneratePeer(*shape.model, end_ids(shape.vocabulary), sampling_for(BATCH, 1).max_turn_tokens)
        texts = given_texts(shape, lengths, shape.episodes, options.turns)

        def generate(peer=peer, texts=texts, lengths=lengths) -> Figures:
            return timed(lambda: peer.run(texts, lengths.prompt, lengths.answer, BATCH))

        peer.threads = options.peer_threads or best_threads(peer, texts[:BATCH], lengths)

        def sample(shape=shape, lengths=lengths) -> Figures:
            return run_episodes(shape, BATCH, lengths, shape.episodes, options.turns, reuse=True)

        ours, others = alternated(options.repeats, sample, generate)
        print_comparison(
            "generate",
            ours,
            others,
            model=name,
            slots=BATCH,
            turns=options.turns,
            torch=peer.version,
            threads=peer.threads,
        )


def measure_writes(options: argparse.Namespace) -> None:
    peak = options.peak_gb_per_s or read_gb_per_s()
    for model, slots, context in itertools.product(options.models, options.slots, options.contexts):
        shape = shape_of(model)
        figures = run_writes(shape, slots, context, options.repeats)
        steps_per_s = statistics.median(one.per_s for one in figures) / slots
        read = steps_per_s * bytes_of_step(shape, slots, context) / 1e9
        print_line(
            case="write",
            model=model,
            slots=slots,
            context=context,
            **shown(figures),
            read_gb_per_s=round(read, 2),
            peak_gb_per_s=round(peak, 1),
            bandwidth_share=round(read / peak, 3),
        )


def bytes_of_step(shape: Shape, slots: int, context: int) -> int:
    """Bytes that a decode step must read: the parameters, and each row's keys and values."""
    model, params = shape.model
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if not model.config.tie_embeddings:
        parameters -= params["embedding"].nbytes  # only one row per token is read
    position = 2 * model.config.attention_layers * model.config.num_kv_heads * model.config.head_width
    return parameters + slots * context * position * jnp.dtype(model.config.dtype).itemsize


def read_gb_per_s() -> float:
    """Bandwidth of a sum of a large array, best of five."""
    array = jnp.ones(2**28 if jax.default_backend() == "cpu" else 2**31, jnp.float32)
    total = jax.jit(jnp.sum)
    seconds = [timed(lambda: int(jax.block_until_ready(total(array)) > 0)).seconds for _ in range(6)][1:]
    return array.nbytes / min(seconds) / 1e9


def best_threads(peer: GeneratePeer, texts: np.ndarray, lengths: Lengths) -> int:
    """The number of threads with which the peer is fastest: often one, on a busy machine or for a small model."""
    speed = {}
    for threads in sorted({1, num_cores()}):
        peer.threads = threads
        speed[threads] = timed(lambda: peer.run(texts, lengths.prompt, lengths.answer, BATCH)).per_s
    return max(speed, key=speed.__getitem__)


# --- measured runs ------------------------------------------------------------------------------------------


@functools.cache
def shapes() -> dict[str, Shape]:
    text = conf_file("model", "nano").read_text("utf-8")
    nano = validated(ModelConfig, OmegaConf.create(text)).model_copy(update={"max_length": 4096})
    smollm2 = {
        "num_layers": 30,
        "width": 576,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_width": 64,
        "mlp_width": 1536,
        "rope_theta": 1e5,
        "norm_eps": 1e-5,
        "qk_norm": False,
        "token_shift": 0,
    }
    qwen3 = {
        "num_layers": 28,
        "width": 1024,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_width": 128,
        "mlp_width": 3072,
        "rope_theta": 1e6,
        "qk_norm": True,
        "token_shift": 0,
        "dtype": "bfloat16",
    }
    return {
        "qwen3_0_6b": Shape(nano.model_copy(update=qwen3), 151936, BATCH),
        "nano_shift": Shape(nano, 768, 128),
        "nano": Shape(nano.model_copy(update={"token_shift": 0}), 768, 48),
        "smollm2": Shape(nano.model_copy(update=smollm2), 49152, BATCH),
    }


def shape_of(model: str) -> Shape:
    """The shape of that name; `nano` as it is shipped, with token shift."""
    return shapes()["nano_shift" if model == "nano" else model]


def conf_file(group: str, name: str) -> pathlib.Path:
    return pathlib.Path(str(importlib.resources.files("tbx_conf"))) / group / f"{name}.yaml"


def sampling_for(slots: int, max_episode_tokens: int) -> SamplingConfig:
    base = validated(SamplingConfig, OmegaConf.load(conf_file("sampling", "train")))
    return base.model_copy(update={"slots": slots, "max_episode_tokens": max_episode_tokens})


def longest(lengths: Lengths, turns: int) -> int:
    """Token limit of an episode of these lengths; all turns together are rarely more than twice their mean length."""
    return lengths.prompt + turns * (lengths.answer + 3 * MEAN_TURN_TOKENS)


def end_ids(vocabulary: int) -> frozenset[int]:
    return frozenset(range(vocabulary // MEAN_TURN_TOKENS))


def given_texts(shape: Shape, lengths: Lengths, episodes: int, turns: int) -> np.ndarray:
    """The given tokens of each episode, prompt first; none of them ends a turn."""
    num = lengths.prompt + (turns - 1) * lengths.answer
    least = len(end_ids(shape.vocabulary))
    return np.random.default_rng(0).integers(least, shape.vocabulary, (episodes, num))


def run_episodes(shape: Shape, slots: int, lengths: Lengths, episodes: int, turns: int, *, reuse: bool) -> Figures:
    """Run episodes through all cache slots, the same ones with and without reuse of the cache."""
    model, params = shape.model
    sampling = sampling_for(slots, longest(lengths, turns))
    sampler = Sampler(model, end_ids(shape.vocabulary), sampling, seed=0)
    texts = given_texts(shape, lengths, episodes, turns)
    waiting = list(range(episodes))[::-1]
    tokens_of: dict[int, list[int]] = {}
    turn_of: dict[int, int] = {}

    def admit() -> None:
        if waiting:
            number = waiting.pop()
            tokens_of[number], turn_of[number] = texts[number, : lengths.prompt].tolist(), 0
            sampler.begin(number, tokens_of[number], (number, 0))

    def write_all() -> int:
        written = 0
        for _ in range(slots):
            admit()
        while sampler.busy:
            for turn in sampler.advance(params):
                number, written = turn.episode, written + len(turn.tokens)
                turn_of[number] += 1
                if turn_of[number] == turns or not turn.stopped:
                    sampler.free(number)
                    admit()
                    continue
                start = lengths.prompt + (turn_of[number] - 1) * lengths.answer
                answer = texts[number, start : start + lengths.answer].tolist()
                tokens_of[number] += turn.tokens + answer
                if reuse:
                    sampler.extend(number, answer, (number, turn_of[number]))
                else:
                    sampler.begin(number, tokens_of[number], (number, turn_of[number]))
        return written

    return timed(write_all)


def run_writes(shape: Shape, slots: int, context: int, repeats: int) -> list[Figures]:
    """Decode steps with all cache slots active: as many dispatches as fit into a turn."""
    model, params = shape.model
    sampling = sampling_for(slots, max(640, context + 128))
    sampler = Sampler(model, frozenset({0}), sampling, seed=0)
    prompt = np.random.default_rng(0).integers(1, model.vocabulary, context).tolist()
    dispatches = sampling.max_turn_tokens // sampling.decode_steps - 2
    figures = []
    for repeat in range(1 + repeats):
        for slot in range(slots):
            sampler.free(slot)
            sampler.begin(slot, prompt, (slot,), temperature=0.0)
        sampler.advance(params)  # prefill and one dispatch, which are not measured

        def write_on() -> int:
            for _ in range(dispatches):
                sampler.advance(params)
            return slots * dispatches * sampling.decode_steps

        figures += [timed(write_on)] if repeat else [timed(write_on)][1:]
    return figures


# --- clocks and lines ---------------------------------------------------------------------------------------


def timed(run: Callable[[], int]) -> Figures:
    """Measure a function that returns a number of tokens."""
    began, began_cpu = time.perf_counter(), time.process_time()
    tokens = run()
    return Figures(tokens, time.perf_counter() - began, time.process_time() - began_cpu)


def alternated(
    repeats: int, first: Callable[[], Figures], second: Callable[[], Figures]
) -> tuple[list[Figures], list[Figures]]:
    """Run both in turns, so that other work on the machine affects both; the first round is a warm-up."""
    rounds = [(first(), second()) for _ in range(1 + repeats)][1:]
    return [one for one, _ in rounds], [other for _, other in rounds]


def print_comparison(case: str, ours: list[Figures], others: list[Figures], **about: object) -> None:
    pairs = list(zip(ours, others, strict=True))
    print_line(
        case=case,
        **about,
        **shown(ours),
        **{f"other_{name}": value for name, value in shown(others).items()},
        ratio=round(statistics.median(one.per_s / other.per_s for one, other in pairs), 2),
        cpu_ratio=round(statistics.median(one.per_cpu_s / other.per_cpu_s for one, other in pairs), 2),
    )


def shown(figures: list[Figures]) -> dict[str, float]:
    return {
        "tokens": round(statistics.median(one.tokens for one in figures)),
        "tokens_per_s": round(statistics.median(one.per_s for one in figures), 1),
        "tokens_per_cpu_s": round(statistics.median(one.per_cpu_s for one in figures), 1),
    }


def print_line(**figures: object) -> None:
    about = {"jax": jax.__version__, "device": jax.devices()[0].platform, "machine": platform.machine()}
    print(json.dumps({"benchmark": "decode", **figures, **about}), flush=True)


if __name__ == "__main__":
    main()
