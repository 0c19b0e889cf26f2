"""What a wheel holds, and what works where only the wheel's own requirements are installed.

`make dist` builds the wheel and installs it into bare environments; these tests look at the checkout, in seconds.
"""

import ast
import configparser
import json
import pathlib
import re
import runpy
import subprocess
import sys

import pytest
import yaml
from lowest_versions import lowest

from tbx_envs.commands.cli import _EXTRA_OF
from tbx_envs.version import __version__

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = {"tbx_envs": "tbx_envs", "tbx_jax": "tbx_jax", "tbx_conf": "conf"}  # top-level package -> its folder

# What an environment with the extra `jax`, and no other, has more than a bare one.
OF_THE_TRAINER = ("jax", "jaxlib", "flax", "optax", "orbax", "jaxtyping", "ml_dtypes", "transformers", "tokenizers")
NOT_BARE = (*OF_THE_TRAINER, "safetensors", "huggingface_hub", "scipy", "bm25s", "matplotlib", "gguf", "torch", "numba")


@pytest.fixture(scope="module")
def setup():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def lines(text):
    return [line for line in text.splitlines() if line]


def in_python(code, *, without=(), cwd, check=True):
    """Run code in a fresh process where these modules cannot be imported."""
    hidden = f"import sys\nsys.modules.update(dict.fromkeys({list(without)!r}))\n"
    return subprocess.run(
        [sys.executable, "-c", hidden + code], capture_output=True, text=True, cwd=cwd, check=check, timeout=100
    )


def test_the_packages_are_all_folders_with_python_in_them(setup):
    found = {
        ".".join((package, *file.parent.relative_to(ROOT / folder).parts))
        for package, folder in FOLDERS.items()
        for file in (ROOT / folder).rglob("*.py")
    }
    assert sorted(lines(setup["options"]["packages"])) == sorted(found)


def test_every_file_that_is_no_python_is_package_data(setup):
    packages = lines(setup["options"]["packages"])
    folders = {
        package: ROOT.joinpath(FOLDERS[package.partition(".")[0]], *package.split(".")[1:]) for package in packages
    }
    shipped = {
        file
        for package, patterns in setup["options.package_data"].items()
        for pattern in patterns.replace(",", " ").split()
        for file in folders[package].glob(pattern)
    }
    there = {
        file
        for folder in FOLDERS.values()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc")
    }
    assert shipped == there


def test_every_extra_is_one_that_the_commands_name_and_all_holds_the_trainers(setup):
    extras = setup["options.extras_require"]
    for module, extra in _EXTRA_OF.items():
        brought = {re.split(r"[\[<>=]", line)[0].replace("-", "_") for line in lines(extras[extra])}
        package = {"orbax": "orbax_checkpoint", "jaxlib": "jax"}.get(module, module)
        assert package in brought, f"the extra {extra} does not bring {module}"
    of_all = set(lines(extras["all"]))
    assert all(set(lines(extras[name])) <= of_all for name in ("jax", "smollm2", "demo"))
    assert set(lines(extras["jax"])) < set(lines(extras["cuda"]))


def test_the_lowest_versions_are_those_of_the_metadata(setup):
    bounds = lowest(["dev"])
    wanted = [*lines(setup["options"]["install_requires"]), *lines(setup["options.extras_require"]["dev"])]
    bounded = [line for line in wanted if ">=" in line or "==" in line]
    assert len(bounds) == len(bounded) > 30
    assert bounds["hydra-core"] == "1.3.2" and bounds["mcp"] == "2.0" and bounds["jax"] == "0.10.2"
    # What is without one is types only, whose version no result depends on.
    unbounded = {line for line in wanted if line not in bounded and "#" not in line}
    assert unbounded == {"types-jsonschema", "types-PyYAML", "types-tabulate", "types-tqdm"}


def test_a_system_without_locks_is_told_so_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    with pytest.raises(ImportError, match="tbx runs on Linux and macOS"):
        runpy.run_path(str(ROOT / "tbx_envs" / "__init__.py"))


def test_every_python_that_the_metadata_names_is_tried_by_the_workflow(setup):
    named = {line.rpartition(" ")[2] for line in lines(setup["metadata"]["classifiers"]) if "Python :: 3." in line}
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    assert set(jobs["test"]["strategy"]["matrix"]["python"]) == named == {"3.11", "3.12", "3.13"}
    assert ".ci/run" in [step.get("run") for step in jobs["test"]["steps"]]
    targets = jobs["check"]["strategy"]["matrix"]["target"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets == [target for target in targets if f"\n{target}: " in makefile]


def test_the_hooks_before_a_commit_are_the_commands_of_make_lint():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    lint = re.search(r"^lint: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1]
    of_make = [line.strip().removeprefix("$(BIN)/").split() for line in lint.splitlines()]
    of_hooks = [hook["entry"].removeprefix(".venv/bin/").split() for hook in hooks]
    options = {"--force-exclude", "--check", "."}
    assert [[w for w in words if w not in options] for words in of_hooks] == [
        [word for word in words if word not in options] for words in of_make
    ]


def test_the_citation_is_of_this_version_and_names_no_person():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert citation["authors"] == [{"name": "tbx developers"}]


def test_every_library_that_the_environments_import_is_required(setup):
    """Those that are imported inside functions for a user's own tokenizer are excepted."""
    distribution = {"yaml": "pyyaml", "hydra": "hydra-core", "mcp_types": "mcp"}
    distribution |= {
        "httpx2": "mcp",
        "anyio": "mcp",
        "pydantic_core": "pydantic",
        "annotated_types": "pydantic",
    }  # of these, the same ones
    required = {re.match(r"[\w-]+", line)[0] for line in lines(setup["options"]["install_requires"])}
    imported = set()
    elsewhere = ("worker", "fork_server.py", "server_clock.py")  # programs of the servers' own interpreter
    for file in (ROOT / "tbx_envs").rglob("*.py"):
        if not set(elsewhere).isdisjoint(file.relative_to(ROOT).parts):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported |= {name.partition(".")[0] for name in names}
    foreign = imported - set(sys.stdlib_module_names) - {"tbx_envs"}
    assert {distribution.get(name, name) for name in foreign} == required | {"transformers", "tokenizers"}


BARE_EPISODE = """
import importlib, json, pkgutil, tbx_envs
for module in pkgutil.walk_packages(tbx_envs.__path__, "tbx_envs."):
    if not module.name.startswith("tbx_envs.thinkingbox.grading.worker."):
        importlib.import_module(module.name)
task = tbx_envs.find_task("clinic/cancel_visit/000")
env = tbx_envs.make(task.uid)
env.reset(seed=0)
for number, call in enumerate(task.expected_calls):
    env.step(tbx_envs.Turn(calls=(tbx_envs.ToolCall(str(number), call.tool, call.arguments),)))
print(json.dumps(env.step("It is done. <DONE>")[1]))
"""


def test_every_module_of_the_environments_works_without_any_extra(tmp_path):
    done = in_python(BARE_EPISODE, without=NOT_BARE, cwd=tmp_path)
    assert json.loads(done.stdout) == 1.0


@pytest.mark.parametrize(
    ("arguments", "missing", "extra"),
    [
        (["train", "output_dir=x"], OF_THE_TRAINER, "jax"),
        (["sft", "output_dir=x"], OF_THE_TRAINER, "jax"),
        (["export", "nano", "x"], OF_THE_TRAINER, "jax"),
        (["serve-policy", "nano"], OF_THE_TRAINER, "jax"),
        (["evaluate", "policy=nano", "attempts=1", "output_dir=x"], OF_THE_TRAINER, "jax"),
        (["train", "output_dir=x"], ["optax"], "jax"),
        (["demo", "output_dir=x"], ["matplotlib"], "demo"),
    ],
    ids=lambda value: value[0] if isinstance(value, list | tuple) else value,
)
def test_a_command_whose_extra_is_missing_says_how_to_install_it(tmp_path, arguments, missing, extra):
    code = f"from tbx_envs.commands.cli import main\nsys.exit(main({arguments!r}))"
    done = in_python(code, without=missing, cwd=tmp_path, check=False)
    assert done.returncode == 2
    told = done.stderr.strip().splitlines()[-1]
    assert told.startswith(f"ConfigError: tbx {arguments[0]} needs {missing[0]}, which is not installed.")
    assert told.endswith(f"Run: pip install 'tbx-envs[{extra}]'")
    assert "Traceback" not in done.stderr


def test_without_jax_a_misspelt_agent_is_a_misspelt_agent(tmp_path):
    arguments = ["evaluate", "policy=oracel", "attempts=1", "output_dir=x"]
    code = f"from tbx_envs.commands.cli import main\nsys.exit(main({arguments!r}))"
    done = in_python(code, without=OF_THE_TRAINER, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert "policy 'oracel' is neither oracle," in done.stderr and "Did you mean 'oracle'?" in done.stderr


def test_without_jax_every_module_of_the_trainer_names_the_extra_but_those_that_name_commands(tmp_path):
    code = """
import importlib, pkgutil, tbx_jax
for name in tbx_jax.WITHOUT_JAX:
    importlib.import_module(name)
for module in pkgutil.iter_modules(tbx_jax.__path__, "tbx_jax."):
    try:
        importlib.import_module(module.name)
        print(module.name)
    except ModuleNotFoundError as error:
        assert f"{module.name} needs jax" in str(error) and "pip install 'tbx-envs[jax]'" in str(error), error
"""
    done = in_python(code, without=OF_THE_TRAINER, cwd=tmp_path)
    assert done.stdout.split() == ["tbx_jax.commands", "tbx_jax.config"]
