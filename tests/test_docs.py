"""The words are held to account: what README and docs/ show runs, what they name exists, and what exists is named."""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import re
import shlex

import pytest
from hydra import compose, initialize_config_module

import tbx_envs.domains
import tbx_jax.config
from tbx_envs.agents import Attempt
from tbx_envs.commands import cli
from tbx_envs.commands.command import HydraCommand, imported
from tbx_envs.domains import load_domain
from tbx_envs.endpoints.config import EndpointConfig
from tbx_envs.endpoints.costs import Prices
from tbx_envs.evaluation.run import row_of
from tbx_envs.task import Task
from tbx_envs.testing.agents import prescribed_episode

ROOT = pathlib.Path(__file__).parents[1]
README, CHANGELOG = ROOT / "README.md", ROOT / "CHANGELOG.md"
ARCHITECTURE, TASKS, TRAIN = (ROOT / "docs" / f"{name}.md" for name in ("architecture", "tasks", "train"))
CONTRIBUTING, API = ROOT / "CONTRIBUTING.md", ROOT / "docs" / "api.md"
PAGES = (README, CHANGELOG, CONTRIBUTING, *sorted((ROOT / "docs").glob("*.md")))
EXPERIMENTS = sorted((ROOT / "conf" / "experiment").glob("*.yaml"))


def leaves(record):
    """The records that a configuration is validated by, their common bases left out."""
    below = record.__subclasses__()
    return tuple(leaf for part in below for leaf in leaves(part)) if below else (record,)


RECORDS = {record.__name__: list(record.model_fields) for record in leaves(tbx_jax.config.Record)} | {
    record.__name__: [field.name for field in dataclasses.fields(record)] for record in (EndpointConfig, Prices)
}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXCERPT = re.compile(r"# ((?:tbx_envs|tbx_jax|conf)/\S+)\n")


# --- reading a page -----------------------------------------------------------------------------------------


def blocks(page, *languages):
    """(number of the first line, text) of the fenced blocks in these languages."""
    text = page.read_text(encoding="utf-8")
    return [
        (text[: found.start()].count("\n") + 2, found[2]) for found in FENCE.finditer(text) if found[1] in languages
    ]


def spans(page):
    """The inline code of a page."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text(encoding="utf-8")))


def section(page, heading):
    """What stands under the one heading that contains these words, up to the next heading."""
    parts = re.split(r"^(#+ .*)$", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    found = [body for title, body in zip(parts[1::2], parts[2::2], strict=True) if heading in title]
    assert len(found) == 1, f"{page.name} has {len(found)} headings with {heading!r}"
    return found[0]


def first_cells(text):
    """The names, between backticks, in the first cells of a table's rows."""
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def commands(page):
    """The words after `tbx` of every command that a page shows."""
    lines = [line for _, block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    found = []
    for line in [*lines, *spans(page)]:
        words = shlex.split(line, comments=True) if re.match(r"(\w+=\S+ )*tbx ", line) else []
        found += [words[words.index("tbx") + 1 :]] if "tbx" in words else []
    return found


@functools.cache
def composed(program, *overrides):
    """The validated configuration of a Hydra program; of a sweep its first run."""
    first = [re.sub(r"^([^=]+=[^,\[]+),.*", r"\1", override) for override in overrides]
    with initialize_config_module("tbx_conf", version_base=None):
        record = imported(hydra_programs()[program].record)
        return tbx_jax.config.validated(record, compose(program, overrides=["output_dir=x", *first]))


def hydra_programs():
    return {name: command for name, command in cli.commands().items() if isinstance(command, HydraCommand)}


# --- what is shown runs -------------------------------------------------------------------------------------


def python_blocks():
    shown = [(page, line, text) for page in PAGES for line, text in blocks(page, "python", "yaml")]
    excerpts = [block for block in shown if EXCERPT.match(block[2])]
    return [block for block in shown if block not in excerpts], excerpts


def named(block):
    return f"{block[0].name}:{block[1]}"


RUNNABLE, EXCERPTS = python_blocks()


@pytest.mark.parametrize("block", RUNNABLE, ids=named)
def test_python_that_is_shown_runs_and_gets_the_reward_it_claims(block, tmp_path, monkeypatch):
    page, line, text = block
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tbx_envs.domains, "_registered", dict(tbx_envs.domains._registered))
    namespace = {"__name__": "shown"}
    code = compile("\n" * (line - 1) + text, str(page), "exec")  # so that a traceback names the page's own line
    exec(code, namespace)
    claimed = re.search(r"\brewards?(?:\.tolist\(\))? == (\[.*?\]|[\d.]+)", text)
    if claimed:  # the page says it by an assertion; this looks at the value once more
        got = namespace["rewards"].tolist() if "rewards" in namespace else namespace["reward"]
        assert got == ast.literal_eval(claimed[1])


def test_the_readme_shows_a_whole_episode_alone_and_in_a_vector():
    texts = [text for page, _, text in RUNNABLE if page == README]
    assert any("gymnasium.make(" in text and "reward == 1.0" in text for text in texts)
    assert any("gymnasium.make_vec(" in text and "[1.0, 0.0]" in text for text in texts)


@pytest.mark.parametrize("block", EXCERPTS, ids=named)
def test_an_excerpt_stands_in_its_file_as_shown(block):
    _, _, text = block
    source = ROOT / EXCERPT.match(text)[1]
    excerpt = EXCERPT.sub("", text, count=1).rstrip()
    assert excerpt and excerpt in source.read_text(encoding="utf-8"), f"{source} does not hold:\n{excerpt}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_tbx_command_that_is_shown_exists_and_its_overrides_compose(page):
    for program, *rest in commands(page):
        if program.startswith("-"):
            continue
        if page == CHANGELOG:  # tells what was, too
            program = cli.RENAMED_COMMANDS.get(program, program)
        assert program in cli.commands(), f"{page.name} shows `tbx {program}`"
        if program in hydra_programs():
            composed(program, *(word for word in rest if not word.startswith("-")))


def test_the_readme_lists_every_command_and_no_other():
    listed = first_cells(section(README, "Train and sweep"))
    assert sorted(listed) == sorted(f"tbx {name}" for name in cli.commands())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_make_target_that_is_shown_exists(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    shown = [line for _, block in blocks(page, "sh") for line in block.splitlines()] + spans(page)
    for target in {found[1] for line in shown if (found := re.match(r"make (\w+)", line))}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name} shows `make {target}`"


# --- what is named exists, and what exists is named ---------------------------------------------------------


def exists(name):
    """True for a module, or what a module has; only the latter is imported."""
    module, _, attribute = name.rpartition(".")
    try:
        if importlib.util.find_spec(name) is not None:
            return True
    except ModuleNotFoundError:  # what stands before the last dot is no package
        pass
    return module in MODULES and hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_dotted_name_on_a_page_can_be_imported(page):
    for name in set(re.findall(r"\btbx_(?:envs|jax)(?:\.\w+)+", page.read_text(encoding="utf-8"))):
        assert exists(name), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_file_that_is_named_is_there(page):
    for span in spans(page):
        if re.fullmatch(r"(tbx_envs|tbx_jax|conf|tests|docs|benchmarks|examples)/[\w./-]*", span):
            assert (ROOT / span).exists(), f"{page.name} names {span}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not re.match(r"https?:", target):
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("record", RECORDS)
def test_every_key_of_a_configuration_record_has_a_line(record):
    listed = first_cells(section(TRAIN, f"`{record}`"))
    assert sorted(listed) == sorted(RECORDS[record])


def test_every_record_that_a_program_composes_has_a_section():
    def records(config):
        yield type(config).__name__
        for part in vars(config).values() if isinstance(config, tbx_jax.config.Record) else ():
            if isinstance(part, tbx_jax.config.Record | EndpointConfig):
                yield from records(part)

    parts = ("agent", "user", "judge")
    where = [f"{part}.endpoint.{key}=x" for part in parts for key in ("base_url", "model")]
    served = composed("evaluate", *(f"{part}=endpoint" for part in parts), *where)
    configs = [served, *(composed(program) for program in hydra_programs())]
    met = {name for config in configs for name in records(config)}
    assert met | {"Prices", "RopeScaling", "HybridConfig"} == RECORDS.keys()  # these three are null by default


def test_the_configuration_groups_of_every_program_are_listed():
    rows = [line.split("|") for line in section(TRAIN, "Configuration").splitlines() if line.startswith("| `tbx")]
    listed = {re.findall(r"\w+", row[1])[1]: set(re.findall(r"`(\w+)`", row[3])) for row in rows}
    for program, groups in listed.items():
        nested = {name for name, value in composed(program) if isinstance(value, tbx_jax.config.Record)}
        nested = {"sampling" if name in ("rollout", "evaluation") else name for name in nested}
        assert groups - {"rollout", "evaluation"} == nested, program
    assert listed.keys() == hydra_programs().keys()


def test_every_column_of_the_training_metrics_has_a_line():
    from tbx_jax.groups import Collected
    from tbx_jax.train import batch_of, metrics_of

    nothing = Collected((), (), num_mixed=0, num_rounds=1, num_voids=0, set_aside=(), position=0)
    row = metrics_of(1, nothing, batch_of((), composed("train").algo, (128,)), None, {})
    assert first_cells(section(TRAIN, "Columns of metrics.jsonl")) == list(row)


def test_every_column_of_a_runs_rows_has_a_line():
    episode = prescribed_episode(Attempt("clinic/cancel_visit/000", 0, 1), "pass")
    row = row_of(episode, "idle", 0, "")
    assert first_cells(section(TRAIN, "Columns of rows.jsonl")) == list(row)


def test_every_field_of_a_task_has_a_line():
    listed = first_cells(section(TASKS, "What a task holds"))
    assert listed == [field.name for field in dataclasses.fields(Task)]


def test_the_domain_is_described_as_it_is():
    domain = load_domain("clinic")
    text = section(TASKS, "The domain clinic")
    tables, reads, writes = (
        re.findall(r"`(\w+)`", re.search(rf"{words}.*?\.\s", text, re.DOTALL)[0])
        for words in (r"\*\*Tables\*\*", "Eight read:", "Eleven write:")
    )
    assert tables == list(domain.metadata.tables)
    assert reads == [tool.name for tool in domain.tools if not tool.mutates]
    assert writes == [tool.name for tool in domain.tools if tool.mutates]
    assert len(reads) == 8 and len(writes) == 11
    assert f"**Tables** ({len(tables)})" in text and f"**Tools** ({len(domain.tools)})" in text
    families = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    assert [(name, int(train), int(heldout)) for name, train, heldout in families] == [
        (family.name, family.num_train, family.num_heldout) for family in domain.families.values()
    ]
    counts = f"{len(domain.uids('train'))} training and {len(domain.uids('heldout'))} held-out tasks"
    assert counts in README.read_text(encoding="utf-8") and counts in CHANGELOG.read_text(encoding="utf-8")


def test_the_api_reference_has_every_public_name_once():
    listed = re.findall(r"^::: tbx_envs\.(\w+)$", API.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted([*listed, "__version__"]) == sorted(tbx_envs.__all__)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_composes_and_says_what_it_is_for(experiment):
    header = [line for line in experiment.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
    said = {word: line.split(":", 1)[1].strip() for line in header if (word := line[2:].split(":")[0]) and ":" in line}
    assert {"Claim", "Command", "Cost", "Number"} <= said.keys()
    _, program, *overrides = shlex.split(said["Command"])
    assert f"+experiment={experiment.stem}" in overrides
    assert composed(program, *overrides) != composed(program)
    assert said["Command"] in TRAIN.read_text(encoding="utf-8")


# --- modules (the map of the code is held by test_architecture.py) ------------------------------------------


def modules():
    """Name -> file of every module of both packages."""
    files = sorted([*(ROOT / "tbx_envs").rglob("*.py"), *(ROOT / "tbx_jax").rglob("*.py")])
    named = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    # The check worker is a program of its own: its files import one another from its own folder.
    return {name: file for name, file in named.items() if not name.startswith("tbx_envs.thinkingbox.grading.worker.")}


MODULES = modules()


def test_letters_named_for_sharding_are_those_of_the_alphabet():
    from tbx_jax.shapes import LOGICAL_AXES

    named_letters = re.findall(r"`([a-z])` ", section(TRAIN, "Sharding"))
    assert named_letters and set(named_letters) <= LOGICAL_AXES.keys()


def test_the_pages_have_something_of_each_kind_that_is_checked_page_by_page():
    everything = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert RUNNABLE and EXCERPTS and any(commands(page) for page in PAGES)
    assert any("rewards == [" in text or "reward == " in text for _, _, text in RUNNABLE)
    assert any(span.startswith("tests/") for page in PAGES for span in spans(page))
    for kind in (r"\bmake \w+", r"\btbx_envs\.\w+", r"\btbx_jax\.\w+", r"\]\((?!https?:)"):
        assert re.search(kind, everything), kind
