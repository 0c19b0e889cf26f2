"""A dry run of a chat template that counts what it does, so that one that never ends is refused before it is rendered.

A template is a program out of any model folder. The sandbox it runs in keeps it from files and attributes, but
not from nested loops, and `{{ 'x' * 3000000000 }}` is one expression. So the template is first rendered on a few
messages, in a sandbox of the same kind where every turn of a loop and every character costs. Counting makes the answer
the same on every machine. What a template does only on other messages is not found this way.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tbx_envs.chat.detection import PROBE_TOOLS
from tbx_envs.messages import Message, Text, ToolCall, ToolResult, Turn, to_chat

# Turns of loops and characters of one rendering; the templates of Qwen and Llama spend up to 3,737.
BUDGET = 500_000
_LARGE_NUMBER = re.compile(r"\d{7,}")
_CONVERSATIONS: tuple[list[Message], ...] = (
    [Text("user", "a")],
    [
        Text("system", "a"),
        Text("user", "b"),
        Turn(calls=(ToolCall("call_0", "find", {"name": "c", "limit": 3}),), reasoning="d"),
        ToolResult("call_0", "find", "e"),
        Turn(text="f"),
        Text("user", "g"),
    ],
)


class _Exceeded(Exception):
    """The template has spent its budget."""


@functools.lru_cache(maxsize=64)
def excess(source: str) -> str | None:
    """What is excessive about a template, None when nothing is; a template with other errors is not judged here."""
    for messages in _CONVERSATIONS:
        for tools in (None, list(PROBE_TOOLS)):
            try:
                # A sandbox for each rendering: each has a budget of its own.
                template = _CountingSandbox().from_string(source)
                values = {"messages": to_chat(messages), "tools": tools, "bos_token": "<s>", "eos_token": "</s>"}
                for _ in template.generate(**values, documents=None, add_generation_prompt=True):
                    pass
            except _Exceeded:
                return f"takes more than {BUDGET:,} steps and characters to render {len(messages)} short message(s)"
            except MemoryError:
                return "takes more memory than there is"
            except RecursionError:
                return "calls itself without an end"
            except Exception:
                continue
    return None


class _GenerationBlock(Extension):
    """`{% generation %}`, with which some templates mark what is trained; it changes no text."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CountingSandbox(ImmutableSandboxedEnvironment):
    """The sandbox of transformers, with a budget."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        self._left = BUDGET
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"],
            finalize=self._paid,
        )
        self.filters = {name: self._priced(function) for name, function in self.filters.items()}
        self.filters |= {"tojson": self._priced(_tojson), "counted_": self._counted, "paid_": self._paid}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": lambda written: written}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            words = sum(len(text.data) for text in loop.find_all(nodes.TemplateData))
            loop.iter = _filtered(loop.iter, "counted_", nodes.Const(1 + words))
        for joined in list(tree.find_all(nodes.Concat)):
            joined.nodes = [_filtered(part, "paid_") for part in joined.nodes]
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) if isinstance(side, (str, list, tuple)) else None for side in (left, right)]
        if operator == "*":
            number = next((side for side in (left, right) if isinstance(side, int)), 1)
            self._spend(abs(number) * max((size for size in sizes if size is not None), default=0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._spend(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            self._refuse_wide_format(left)
        return self._paid(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(function, "__name__", "") in ("format", "format_map"):
            # The sandbox puts a function of its own around these methods.
            self._refuse_wide_format(str(getattr(getattr(function, "__wrapped__", function), "__self__", "")))
        self._refuse_large(*args, *kwargs.values())
        return self._paid(super().call(context, function, *args, **kwargs))

    def _priced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter whose numbers are bounded and whose text is paid for."""

        @functools.wraps(function)
        def priced(*args: Any, **kwargs: Any) -> Any:
            self._refuse_large(*args[1:], *kwargs.values())
            return self._paid(function(*args, **kwargs))

        return priced

    def _counted(self, values: Iterable[Any], price: int) -> Iterator[Any]:
        for value in values:
            self._spend(price)
            yield value

    def _paid(self, value: Any) -> Any:
        if isinstance(value, (str, list, tuple)):
            self._spend(len(value))
        return value

    def _refuse_large(self, *values: Any) -> None:
        """Widths and counts are sizes of what a function makes, so they are refused before it is called."""
        if any(isinstance(value, int) and abs(value) > BUDGET for value in values):
            raise _Exceeded

    def _refuse_wide_format(self, text: str) -> None:
        if _LARGE_NUMBER.search(text):
            raise _Exceeded

    def _spend(self, price: int) -> None:
        self._left -= price
        if self._left < 0:
            raise _Exceeded


def _filtered(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Expr:
    assert isinstance(node, nodes.Expr)  # what is looped over
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno, environment=node.environment)


def _tojson(value: Any, **options: Any) -> str:
    options = {name: options[name] for name in ("ensure_ascii", "indent", "separators", "sort_keys") if name in options}
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)
