"""Every key of every configuration record has its effect.

Each program runs with a configuration and again with one key changed; what reaches the ends of tbx must then differ.
The ends are environments (their options, seeds and turns), served models, compiled programs (traced, never compiled:
what would be computed, on which shapes and devices) and files. Fingerprints and copies of the configuration are no
ends: they hold what was asked for, whether or not anything was done about it.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import datetime
import fnmatch
import inspect
import json
import pathlib
import shutil
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import numpy as np
import pytest
import tiny_policy
from hydra import compose, initialize_config_module

from tbx_envs.agents.oracle import OracleAgent
from tbx_envs.commands import evaluate
from tbx_envs.commands.config import EvaluateConfig, PoolConfig, Record, validated
from tbx_envs.endpoints.client import ChatEndpoint
from tbx_envs.endpoints.costs import TokenUsage
from tbx_envs.endpoints.responses import Completion
from tbx_envs.env import ToolEnv
from tbx_envs.episode import CheckReport
from tbx_envs.errors import TbxError, ToolFault
from tbx_envs.evaluation import regrade, run
from tbx_envs.evaluation.metrics import Tally
from tbx_envs.evaluation.pool import save_pool, select_pool
from tbx_envs.sources import source_of
from tbx_jax import train
from tbx_jax.checkpoint import Checkpoints
from tbx_jax.commands import demo, sft
from tbx_jax.config import DemoConfig, SftConfig, TrainConfig

UID, OTHER = "clinic/cancel_visit/000", "clinic/cancel_visit/001"
BENCHMARK = "rentals_main.py:test_end_rental"
ENDPOINT = {
    "base_url": "http://127.0.0.1:1/v1",
    "model": "m",
    "api_key_env": None,
    "temperature": 0.5,
    "max_tokens": 7,
    "timeout_s": 9.0,
    "concurrency": 3,
    "max_retries": 0,
    "extra_body": {},
    "prices": {"input": 1.0, "cached": 1.0, "output": 1.0},
}
SERVED = {"kind": "endpoint", "endpoint": ENDPOINT}
CLOCK = datetime.datetime(2025, 10, 1, 13)
PROGRAMS: dict[str, tuple[type[Record], Callable[[Any], Any]]] = {
    "evaluate": (EvaluateConfig, evaluate.run_evaluation),
    "pool": (PoolConfig, evaluate.run_pool),
    "train": (TrainConfig, train.run),
    "sft": (SftConfig, sft.run),
    "demo": (DemoConfig, demo.run),
}


# --- the keys -----------------------------------------------------------------------------------------------


def subclasses(record: type) -> Iterator[type]:
    for derived in record.__subclasses__():
        yield derived
        yield from subclasses(derived)


def parts_of(annotation: object) -> list[type]:
    """The records that a key of this type may hold."""
    if isinstance(annotation, type) and (issubclass(annotation, Record) or dataclasses.is_dataclass(annotation)):
        return [annotation]
    return [part for argument in typing.get_args(annotation) for part in parts_of(argument)]


def fields_of(record: type) -> dict[str, object]:
    if issubclass(record, Record):
        return {name: field.annotation for name, field in record.model_fields.items()}
    hints = typing.get_type_hints(record)
    return {field.name: hints[field.name] for field in dataclasses.fields(record)}


def keys_of(record: type, before: str = "") -> Iterator[str]:
    """`algo.clip_low` and so on: all that can be set one by one."""
    for name, annotation in fields_of(record).items():
        for part in parts_of(annotation):
            yield from keys_of(part, f"{before}{name}.")
        if not parts_of(annotation):
            yield before + name


def records_in(record: type) -> set[type]:
    found = (
        {record, *(base for base in record.__mro__ if issubclass(base, Record))} - {Record}
        if issubclass(record, Record)
        else set()
    )
    for annotation in fields_of(record).values():
        for part in parts_of(annotation):
            found |= records_in(part)
    return found


# --- what programs are run with ------------------------------------------------------------------------------

SAMPLING = {"slots": 2, "episodes": 3, "decode_steps": 2, "max_turn_tokens": 4, "max_episode_tokens": 512}
ALGO = {"group_size": 2, "groups_per_update": 2, "groups_rolled": 1, "max_rounds": 2, "micro_batch": 2}
SHARDED = {"axes": {"fsdp": 2}, "rules": {"b": "fsdp"}}
HYBRID = {"delta_layers": 1, "rotary_width": 4, "conv_taps": 3, "key_heads": 1, "value_heads": 2} | {
    "key_width": 4,
    "value_width": 4,
}
ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 64}
PARTS = {"judge": SERVED, "user": SERVED, "environment": {"clock": CLOCK, "concurrency": 2}}
PLAYED = ("judge.*", "user.*", "environment.*")


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to run a program, and the keys that have an effect in it.

    Attributes:
        program: its name in `conf/`.
        keys: patterns of the keys.
        given: what is set, over the defaults of `conf/`; `{root}` in texts is a folder.
        but: patterns of keys that have none.
        breaks: pattern of the tasks whose environments break as they start.
        several: for keys (patterns) that are passed on to several places, all the ends that must change.
    """

    program: str
    keys: tuple[str, ...]
    given: dict[str, Any]
    but: tuple[str, ...] = ()
    breaks: str = ""
    several: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @property
    def affected(self) -> list[str]:
        every = keys_of(PROGRAMS[self.program][0])
        return [key for key in every if matches(key, self.keys) and not matches(key, self.but)]

    def ends_of(self, key: str) -> tuple[str, ...]:
        return next((ends for pattern, ends in self.several.items() if fnmatch.fnmatchcase(key, pattern)), ())


def matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def cases_of_attempts(program: str, **extra: Any) -> dict[str, Case]:
    """Of `evaluate` and `pool`, which have most keys in common."""
    small = {"tasks": UID, "attempts": 1, "max_void_retries": 0, **extra}
    model = {**small, "policy": "{root}/policy", "attempts": 4, "sampling": SAMPLING, "mesh": SHARDED}
    return {
        f"{program} an agent of ours": Case(
            program, ("attempts", "seed", "policy", "tasks", "output_dir"), {**small, "policy": "oracle"}
        ),
        f"{program} a served model": Case(
            program, (*PLAYED, "agent.*"), {**small, "policy": "endpoint", **PARTS, "agent": SERVED}
        ),
        f"{program} a policy": Case(
            program,
            ("sampling.*", "mesh.*", "compute_dtype", "seed", "policy"),
            model,
            several={"seed": ("ToolEnv.reset", "decode")},
        ),
        f"{program} a policy with served models": Case(
            program, PLAYED, {**model, **PARTS, "attempts": 1}, but=("environment.concurrency",)
        ),
        f"{program} in a broken environment": Case(
            program, ("max_void_retries",), {**small, "policy": "oracle"}, breaks="*"
        ),
    }


ALL_BANDS = ["too_hard", "hard", "medium", "easy", "too_easy"]
MADE_BY_THE_DEMO = ("EvaluateConfig", "PoolConfig", "TrainConfig")
TRAINED = {
    "policy": "{root}/policy",
    "tasks": "clinic/cancel_visit/00?",
    "steps": 2,
    "checkpoint_every": 2,
    "algo": ALGO,
    "sampling": SAMPLING,
    "mesh": SHARDED,
}
TUNED = {"demonstrations": 4, "batch_tokens": 512, "vocabulary": 300, "mesh": {"axes": {"fsdp": 1}, "rules": {}}}
MODEL = tiny_policy.MODEL.model_dump() | {"num_layers": 2, "head_width": 8, "width": 16, "mlp_width": 32}
OF_A_DENSE_MODEL = ("model.hybrid.*",)
CASES = {
    **cases_of_attempts("evaluate"),
    "evaluate with errors": Case(
        "evaluate", ("error_rate",), {"tasks": "clinic/*/000", "attempts": 2, "policy": "scripted"}
    ),
    "evaluate by grading again": Case(
        "evaluate",
        ("judge.*", "environment.check_timeout_s", "regrade", "output_dir"),
        {"regrade": "{root}/oracle", "policy": "oracle", "judge": SERVED},
    ),
    **cases_of_attempts("pool", bands=ALL_BANDS),
    "pool in bands": Case("pool", ("bands",), {"policy": "oracle", "tasks": UID, "attempts": 2, "bands": ALL_BANDS}),
    "pool of the benchmark": Case(
        "pool",
        ("train_on_benchmark_and_mark_results",),
        {"policy": "idle", "tasks": BENCHMARK, "attempts": 1, "max_void_retries": 0},
        breaks="*",
    ),
    "train": Case(
        "train",
        ("*",),
        {**TRAINED, **PARTS},
        but=("environment.concurrency", "algo.max_void_retries", "train_on_benchmark_and_mark_results"),
        several={
            "seed": ("ToolEnv.__init__", "ToolEnv.reset", "decode"),
            "sampling.temperature": ("decode", "_add_policy_gradients"),
            "mesh.*": ("commit", "_add_policy_gradients"),
            "algo.group_size": ("ToolEnv.reset", "_add_policy_gradients"),
        },
    ),
    "train with a broken task": Case(
        "train",
        ("algo.max_void_retries",),
        {**TRAINED, "steps": 1, "algo": {**ALGO, "groups_rolled": 4}},
        breaks="*/00[0-4]",
    ),
    "train on the benchmark": Case(
        "train", ("train_on_benchmark_and_mark_results",), {**TRAINED, "tasks": BENCHMARK}, breaks="*"
    ),
    "sft of a new model": Case(
        "sft",
        ("*",),
        {**TUNED, "model": MODEL | {"rope_scaling": ROPE, "max_length": 1024}},
        but=(*OF_A_DENSE_MODEL, "compute_dtype", "chat_template", "domain"),
    ),
    "sft of a new hybrid": Case(
        "sft",
        OF_A_DENSE_MODEL,
        {**TUNED, "model": MODEL | {"hybrid": HYBRID, "num_layers": 6, "token_shift": 0, "max_length": 1024}},
    ),
    "sft of a policy": Case(
        "sft",
        ("policy", "compute_dtype", "chat_template", "mesh.*", "domain", "output_dir"),
        {
            **TUNED,
            "mesh": {"axes": {"fsdp": 2}, "rules": {"d": "fsdp"}},
            "policy": "{root}/policy",
            "chat_template": "compact",
            "batch_tokens": 2048,
        },
    ),
    "demo": Case(
        "demo",
        ("*",),
        PARTS,
        several={
            "rollout.*": ("TrainConfig",),
            **dict.fromkeys(("evaluation.*", "max_void_retries"), ("EvaluateConfig", "PoolConfig")),
            **dict.fromkeys(("mesh.*", *PLAYED, "seed", "policy", "output_dir"), MADE_BY_THE_DEMO),
        },
    ),
}
# Keys whose effect is that a program refuses to run.
REFUSED = ("agent", "bands", "domain", "model.max_length")
# What a key is changed to; else `another` makes something up.
CHANGED: dict[str, Any] = {
    "*sampling.cache_dtype": "bfloat16",
    "rollout.cache_dtype": "bfloat16",
    "evaluation.cache_dtype": "bfloat16",
    "*.top_k": 3,
    "sampling.slots": 4,
    "rollout.episodes": 9,
    "evaluation.episodes": 9,
    "user.kind": {"kind": "default", "endpoint": None},
    "*.kind": {"kind": "none", "endpoint": None},
    "*.chat_format": "qwen3_coder",
    "*.api_key_env": "HOME",
    "*.base_url": "http://127.0.0.1:2/v1",
    "*.extra_body": {"seed": 1},
    "*.tool_timeout_s": 3.0,
    "*.user_timeout_s": 4.0,
    "*.clock": datetime.datetime(2024, 1, 1),
    "mesh.axes": lambda axes: {"fsdp": 3 - axes["fsdp"]},
    "mesh.rules": lambda rules: {} if rules else {"d": "fsdp"},
    "algo.max_rounds": 1,
    "algo.dual_clip": 3.0,
    "algo.micro_batch": 4,
    "algo.group_size": 4,
    "algo.groups_per_update": 1,
    "compute_dtype": "bfloat16",
    "tasks": OTHER,
    "pool": "{root}/pool.json",
    "regrade": "{root}/other",
    "policy": "{root}/wider",
    "output_dir": "{root}/elsewhere",
    "checkpoint_every": 1,
    "batch_tokens": 4096,
    "vocabulary": 320,
    "bands": ["easy"],
    "error_rate": 1.0,
    "families": ["cancel_visit"],
    "domain": "kiosk",
    "chat_template": "tools",
    "model.max_length": 64,
    "model.rope_scaling": None,
    "model.num_layers": 4,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_width": 16,
    "model.hybrid.rotary_width": 2,
    "model.hybrid.value_heads": 3,
    "model.token_shift": 2,
}


def another(key: str, value: Any) -> Any:
    """A value for this key that is not `value`."""
    for pattern, changed in CHANGED.items():
        if fnmatch.fnmatchcase(key, pattern):
            return changed(value) if callable(changed) else changed
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value / 2 or 0.25
        case "float32" | "fork" | "plain" | "constant" | "cosine":
            pairs = ("float32", "bfloat16"), ("fork", "spawn"), ("plain", "motivation"), ("constant", "cosine")
            return next(one if value == other else other for one, other in pairs if value in (one, other))
        case str():
            return f"{value}-too"
    raise AssertionError(f"say in CHANGED what {key}={value!r} is to be changed to")


def with_key(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy with one key, such as `algo.clip_low`, set."""
    first, _, rest = key.partition(".")
    return {**config, first: with_key(config[first], rest, value) if rest else value}


def value_at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[name]
    return config


def merged(one: Any, other: Any) -> Any:
    if not (isinstance(one, dict) and isinstance(other, dict)) or other.keys() & {"axes", "base_url"}:
        return other
    return {**one, **{name: merged(one.get(name), value) for name, value in other.items()}}


def filled(value: Any, root: object) -> Any:
    if isinstance(value, dict):
        return {name: filled(part, root) for name, part in value.items()}
    return value.replace("{root}", str(root)) if isinstance(value, str) else value


# --- the ends -----------------------------------------------------------------------------------------------


def text(value: Any) -> str:
    """All that can be said of a value in a stable way; nothing of records, models and learners, which hold all keys."""
    match value:
        case np.ndarray() | jax.Array():
            placed = f" on {value.sharding}" if isinstance(value, jax.Array) else ""
            values = np.asarray(value).tolist() if value.size <= 64 else ""
            return f"{value.dtype}{value.shape}{values}{placed}"
        case dict():
            return "{" + ", ".join(f"{name!r}: {text(part)}" for name, part in value.items()) + "}"
        case list() | tuple():
            return "(" + ", ".join(map(text, value)) + ")"
        case jax.sharding.Sharding() | ChatEndpoint() | None | bool() | int() | float() | str() | datetime.datetime():
            return repr(value)
        case types.FunctionType():
            return f"{value.__name__}{text(dict(inspect.getclosurevars(value).nonlocals))}"
        case Record():
            return type(value).__name__
        case _ if type(value).__module__.startswith("tbx_envs"):
            fields = getattr(value, "__dict__", None) or {
                field.name: getattr(value, field.name) for field in dataclasses.fields(value)
            }
            return type(value).__name__ + text(dict(fields))
    return type(value).__name__


Reached: TypeAlias = "collections.Counter[tuple[str, str]]"  # an end, and what reached it


class Different(BaseException):
    """Ends a run: what reached an end did not reach it before."""


class Ends:
    """What reaches the ends of tbx, in any order, since threads have a part in it.

    A run that is compared with another one is ended as soon as it is known to differ.
    """

    def __init__(self) -> None:
        self.reached: Reached = collections.Counter()
        self.wanted: Reached | None = None

    def begin(self, wanted: Reached | None) -> None:
        self.reached, self.wanted = collections.Counter(), wanted

    def note(self, end: str, what: str) -> None:
        self.reached[end, what] += 1
        if self.wanted is not None and self.reached[end, what] > self.wanted[end, what]:
            raise Different


def traced(program: Any, ends: Ends) -> Callable[..., Any]:
    """In place of a compiled program: notes what would be computed, and gives zeros of its results' shapes."""

    def run_nothing(*arguments: Any, **options: Any) -> Any:
        leaves = jax.tree.leaves((arguments, options))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return program(*arguments, **options)
        trace = program.trace(*arguments, **options)
        if (trace.jaxpr, program) not in run_nothing.texts:
            run_nothing.texts[trace.jaxpr, program] = f"{trace.jaxpr} {text(list(trace.jaxpr.consts))}"
        ends.note(program.__name__, f"{run_nothing.texts[trace.jaxpr, program]} {text(options)} {text(leaves)}")
        made = jax.tree.map(lambda out: jax.device_put(np.zeros(out.shape, out.dtype)), trace.out_info)
        for argument in arguments:  # a turn goes on as long as it may
            if hasattr(argument, "num_left_b"):
                count_b = np.minimum(argument.num_left_b, options["steps"])
                made = (made[0]._replace(count_b=count_b), made[1]._replace(count_b=count_b))
        return made

    run_nothing.texts = {}
    return run_nothing


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    ends = Ends()

    def watch(owner: Any, name: str, counts: Callable[..., bool] = lambda *_, **__: True) -> None:
        original = getattr(owner, name)

        def watched(self: Any, *arguments: Any, **options: Any) -> Any:
            if counts(*arguments, **options):
                ends.note(f"{owner.__name__}.{name}", text([*arguments, options]))
            return original(self, *arguments, **options)

        monkeypatch.setattr(owner, name, watched)

    for name in ("__init__", "reset", "step"):
        watch(ToolEnv, name)
    watch(ChatEndpoint, "__init__")
    watch(concurrent.futures.ThreadPoolExecutor, "__init__", lambda _=0, name="", **__: name.startswith("tbx-"))
    # No key has a part in it, and each run would do it again.
    monkeypatch.setattr("tbx_envs.chat.template.check_template", lambda *_, **__: None)
    answer = Completion("I see.", (), "", "", "stop", TokenUsage(10, 0, 10))
    monkeypatch.setattr(ChatEndpoint, "complete", lambda *_, **__: answer)
    # Of two attempts at a task one passes, so that there is something to learn.
    episode = ToolEnv.episode

    def graded(self: ToolEnv, index: int) -> Any:
        made, passed = episode(self, index), index % 2 == 1
        if made.fault is not None:
            return made
        return dataclasses.replace(made, report=CheckReport(passed, "odd"), reward=float(passed))

    monkeypatch.setattr(ToolEnv, "episode", graded)
    monkeypatch.setattr(Checkpoints, "save", lambda _, __, progress: ends.note("checkpoint", str(progress.step)))
    regraded = regrade.regraded
    monkeypatch.setattr(
        regrade,
        "regraded",
        lambda episode, options: ends.note("grading", episode.uid + text(options)) or regraded(episode, options),
    )
    stand_ins: dict[int, Any] = {}
    compiled = type(jax.jit(len))
    for module in [module for name, module in sys.modules.items() if name.startswith("tbx_jax")]:
        for name, value in list(vars(module).items()):
            if isinstance(value, compiled):
                stand_ins.setdefault(id(value), traced(value, ends))
                monkeypatch.setattr(module, name, stand_ins[id(value)])
    return ends


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with what programs read: two policies, a pool, two evaluation runs."""
    root = tmp_path_factory.mktemp("prepared")
    tokenizer = tiny_policy.byte_tokenizer(tiny_policy.CHAT_TEMPLATE)
    for name, width in (("policy", 32), ("wider", 48)):
        config = tiny_policy.MODEL.model_copy(update={"width": width, "max_length": 8192})
        model, params = tiny_policy.build(config, len(tokenizer), tiny_policy.key_for(0, "parameters"))
        tiny_policy.save_policy(root / name, model, params, tokenizer)
    tally = Tally(OTHER, "cancel_visit", 1, 2)
    save_pool(select_pool([tally], bands=ALL_BANDS, policy={}, seed=0), root / "pool.json")
    for name, uid in (("oracle", UID), ("other", OTHER)):
        run.run(OracleAgent(), [uid], attempts=1, seed=0, max_void_retries=0, rows_path=root / name / "rows.jsonl")
    return root


def composed(case: Case) -> dict[str, Any]:
    with initialize_config_module("tbx_conf", version_base=None):
        made = validated(PROGRAMS[case.program][0], compose(case.program, overrides=["output_dir=x"]))
    return merged(made.model_dump(), {**case.given, "output_dir": "{root}/out"})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.usefixtures("bikeshop")
def test_a_changed_key_changes_what_a_program_does(case, prepared, ends, monkeypatch, tmp_path):
    record, program = PROGRAMS[case.program]
    monkeypatch.setattr(
        "tbx_envs.env.source_of",
        lambda uid: Broken(source_of(uid)) if fnmatch.fnmatchcase(uid, case.breaks) else source_of(uid),
    )
    if case.program == "demo":
        use_parts_of_the_demo(monkeypatch, ends)

    def is_as_before(config: dict[str, Any], before: Reached | None) -> bool:
        root = tmp_path / "run"
        shutil.copytree(prepared, root)
        made = record.model_validate(filled(config, root))
        pathlib.Path(made.output_dir).mkdir()
        ends.begin(before)
        try:
            try:
                program(made)
            except TbxError as error:
                ends.note("error", str(error))
            for path in root.rglob("*"):
                ends.note("file", str(path.relative_to(root)))
            for figures in (*root.rglob("summary.json"), *root.rglob("pool.json")):
                read = json.loads(figures.read_text())
                ends.note(figures.name, text([read.get("costs"), read.get("tasks")]))
        except Different:
            return False
        finally:
            shutil.rmtree(root)
        return ends.reached == before

    base = composed(case)
    is_as_before(base, None)
    before = ends.reached
    assert case.breaks == "*" or not [what for end, what in before if end == "error"]
    assert is_as_before(base, before), "two runs alike differ"
    without_effect = []
    for key in case.affected:
        changed = another(key, value_at(base, key))
        if isinstance(changed, dict) and "kind" in changed:  # and with it what belongs to it
            key = key.rpartition(".")[0]
            changed = value_at(base, key) | changed
        assert changed != value_at(base, key), key
        several = case.ends_of(key)
        same = is_as_before(with_key(base, key, changed), None if several else before)
        errors = [what for end, what in ends.reached if end == "error"]
        assert not errors or case.breaks or key in REFUSED, f"{key}: {errors}"
        parts = [(of_end(ends.reached, end), of_end(before, end)) for end in several]
        if same or any(now == then for now, then in parts):
            without_effect.append(key)
    assert without_effect == []


def of_end(reached: Reached, name: str) -> Reached:
    found = collections.Counter({what: count for what, count in reached.items() if what[0] == name})
    assert found, f"nothing reached {name}; there is: {', '.join(sorted({end for end, _ in reached}))}"
    return found


class Broken:
    """A source of tasks whose episodes break as they start."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def start(self, *_: Any) -> None:
        raise ToolFault("broken")


def use_parts_of_the_demo(monkeypatch: pytest.MonkeyPatch, ends: Ends) -> None:
    """The four parts of a demo have cases of their own; here only what they are asked."""
    measured = {"pass_at_1": 0.5, "tasks": 1, "voids": 0, "seed": 0}

    class Measures(dict):
        def __missing__(self, key: str) -> Any:
            return Measures(measured) if "families" in key else 0

    def asked(config: Record) -> Any:
        ends.note(type(config).__name__, repr(config))
        return Measures(measured)

    monkeypatch.setattr(demo.evaluate, "run_evaluation", asked)
    monkeypatch.setattr(
        demo.evaluate, "run_pool", lambda config: asked(config) and types.SimpleNamespace(uids=(), candidates=())
    )
    monkeypatch.setattr(demo.train, "run", asked)
    monkeypatch.setattr(demo, "read_metrics", lambda *_: [])
    monkeypatch.setattr(demo, "draw_demo", lambda *_, attempts, **__: ends.note("picture", str(attempts)))


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_key_is_without_a_case(program):
    record = PROGRAMS[program][0]
    affected = {key for case in CASES.values() if case.program == program for key in case.affected}
    # How many episodes agents of ours run at once; a policy has as many as `sampling` says.
    unused = {"environment.concurrency"} if program == "train" else set()
    assert set(keys_of(record)) - affected == unused


def test_no_record_is_without_a_program():
    reached = set().union(*(records_in(record) for record, _ in PROGRAMS.values()))
    assert {record for record in subclasses(Record) if record.__module__.startswith("tbx_")} == reached
