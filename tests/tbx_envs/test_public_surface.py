"""What `tbx_envs` exports: every name is there, is listed in all places alike, and is imported only when it is used."""

import ast
import importlib
import inspect
import subprocess
import sys

import pytest

import tbx_envs

EAGER = {"__version__"}  # imported with the package
# What an `import tbx_envs` must not wait for: databases, protocols, configuration, statistics, models.
HEAVY = (
    *("sqlalchemy", "mcp", "pydantic", "jsonschema", "httpx", "starlette", "uvicorn", "bm25s", "yaml", "jinja2"),
    *(
        "hydra",
        "omegaconf",
        "tqdm",
        "tabulate",
        "scipy",
        "jax",
        "flax",
        "optax",
        "orbax",
        "transformers",
        "tokenizers",
        "torch",
    ),
)


def for_type_checkers():
    """Name -> module of the imports under TYPE_CHECKING, read from the source."""
    (block,) = [
        node
        for node in ast.parse(inspect.getsource(tbx_envs)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {alias.name: node.module for node in block.body for alias in node.names}


@pytest.mark.parametrize("name", tbx_envs.__all__)
def test_every_exported_name_can_be_imported(name):
    value = getattr(tbx_envs, name)
    if name not in EAGER:
        assert value is getattr(importlib.import_module(for_type_checkers()[name]), name)


def test_the_exported_names_are_sorted_and_listed_in_all_places_alike():
    assert list(tbx_envs.__all__) == sorted(set(tbx_envs.__all__))
    assert for_type_checkers().keys() | EAGER == set(tbx_envs.__all__)
    assert for_type_checkers() == tbx_envs._MODULE_OF
    assert dir(tbx_envs) == sorted(tbx_envs.__all__)


def test_a_name_that_is_not_exported_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'ToolEnvironment'"):
        tbx_envs.ToolEnvironment  # noqa: B018


def fresh(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_package_imports_nothing_heavy():
    loaded = fresh("import sys, tbx_envs; print(*sys.modules)").split()
    assert not set(HEAVY) & {module.partition(".")[0] for module in loaded}


def test_a_name_is_imported_when_it_is_first_used():
    code = "import sys, tbx_envs; before = 'tbx_envs.env' in sys.modules; tbx_envs.ToolEnv; print(before, *sys.modules)"
    before, *loaded = fresh(code).split()
    assert before == "False" and "tbx_envs.env" in loaded
    assert not {"jax", "transformers", "torch"} & {module.partition(".")[0] for module in loaded}
