"""Fixtures of test functions: `name -> {"type": dotted path, **arguments}`, built when a test has a parameter so named.

A factory's required parameters that its arguments leave open are given by name: `x`, `judge`, or another fixture. A
fixture that is a context manager is entered, and exited after the test.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

TEST_FUNCTION = "__tb_test_fn"  # the name that test code gives to the function to call


class FixtureError(RuntimeError):
    """A fixture cannot be built: an error of the dataset or its installation."""


@contextlib.contextmanager
def built(fixtures: Mapping[str, Mapping[str, Any]], code: str, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The fixtures that the test function of `code` has parameters for, by name, during the context.

    Args:
        fixtures: name -> configuration of the fixture.
        code: test code.
        given: values that every test and every factory may have parameters for: `x` and `judge`.
    """
    wanted = [name for name in parameters(code) if name not in given]
    with contextlib.ExitStack() as stack:
        made = dict(given)
        for name, factory, arguments, asked in _in_order(wanted, fixtures, given):
            instance = _make(name, factory, {**arguments, **{need: made[need] for need in asked}})
            is_context = hasattr(instance, "__enter__") and hasattr(instance, "__exit__")
            made[name] = stack.enter_context(instance) if is_context else instance
        yield {name: made[name] for name in wanted}


def parameters(code: str) -> list[str]:
    """The names of the test function's positional parameters, in order; empty when the function is not found.

    The function is the last one that `__tb_test_fn` names, either by an assignment or by its own name.
    """
    try:
        body = ast.parse(code).body
    except SyntaxError:  # running the code gives the better message
        return []
    functions = {node.name: node.args for node in body if isinstance(node, ast.FunctionDef)}
    found = None
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == TEST_FUNCTION:
            found = TEST_FUNCTION
        elif _assigns_test_function(node) and isinstance(node.value, ast.Name):
            found = node.value.id
    arguments = functions.get(found)
    if arguments is None:
        return []
    return list(dict.fromkeys(argument.arg for argument in (*arguments.posonlyargs, *arguments.args)))


def _assigns_test_function(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(target, ast.Name) and target.id == TEST_FUNCTION for target in targets)


_Plan = tuple[str, Callable[..., Any], dict[str, Any], list[str]]  # name, factory, its arguments, what else it asks for


def _in_order(wanted: list[str], fixtures: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any]) -> list[_Plan]:
    """The fixtures to build, each after those that it needs."""
    plans: dict[str, _Plan] = {}

    def visit(name: str, chain: tuple[str, ...]) -> None:
        if name in plans:
            return
        if name in chain:
            raise FixtureError(f"fixtures need each other in a circle: {' -> '.join((*chain, name))}")
        if name not in fixtures:
            by = f"fixture '{chain[-1]}'" if chain else "the test function"
            known = ", ".join(sorted({*fixtures, *given}))
            raise FixtureError(
                f"{by} has a parameter '{name}', which is no fixture. There are: {known}. Define it under `fixtures` "
                f"in a conftest.yaml or in the scenario."
            )
        factory, arguments = _factory(name, fixtures[name])
        asked = _required(factory, arguments)
        for need in asked:
            if need not in given:
                visit(need, (*chain, name))
        plans[name] = name, factory, arguments, asked

    for name in wanted:
        visit(name, ())
    return list(plans.values())


def _factory(name: str, config: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    arguments = dict(config)
    path = arguments.pop("type", None)
    module, _, attribute = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    if not module:
        raise FixtureError(f"fixture '{name}' has type {path!r}; it must be a dotted path, package.module.name.")
    try:
        return getattr(importlib.import_module(module), attribute), arguments
    except Exception as error:  # importing runs code; an AssertionError in it is no verdict
        raise FixtureError(
            f"fixture '{name}': {path} cannot be imported ({type(error).__name__}: {error}). Install it beside tbx, or "
            f"put its folder on PYTHONPATH."
        ) from error


def _required(factory: Callable[..., Any], arguments: Mapping[str, Any]) -> list[str]:
    """The parameters without a default that `arguments` does not give; keyword-only ones are never filled."""
    try:
        signature = inspect.signature(factory)
    except (ValueError, TypeError):  # written in C, without a signature
        return []
    return [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
        and name not in arguments
        and name != "self"
    ]


def _make(name: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return factory(**arguments)
    except Exception as error:  # an AssertionError here is no verdict either: the test has not started
        raise FixtureError(f"fixture '{name}' cannot be made: {type(error).__name__}: {error}") from error
