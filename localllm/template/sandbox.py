"""Jinja for templates that came with a file from anywhere: no access to Python, and a budget of work.

Jinja's own sandbox stops attribute access. What it does not stop, loops, growing strings, lists in lists, is metered
here: every loop step, call, filter, operator and piece of output spends from one budget, large things before they are
made. The budget is counted and not timed, so that a template that renders once renders always.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from functools import wraps
from string import Formatter
from typing import Any

from jinja2 import nodes
from jinja2.environment import Environment
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_format, do_indent, do_replace, sync_do_join
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_eval_context
from jinja2.visitor import NodeTransformer

from localllm.template.errors import TemplateLimit

BUDGET = 1 << 24  # units for a conversation of no length; a character made is one unit
_PER_CHAR = 100  # more for each character of the conversation, which is copied many times
_PER_CHAR_AND_TURN = 4  # real templates go over the whole conversation once more for every message
_STEP, _CALL, _OPERATOR, _ITEM = 16, 64, 4, 8  # units
_MAX_NUMBER = 100_000  # as an argument: widths, counts
_MAX_BITS = 4096  # of a whole number
_MAX_JSON_INDENT = 16

_UNSAFE_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")  # slow, or different every time
_NOT_READ = frozenset(  # filters that do not look into nested values, and so need not be charged for them
    (
        *("batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr"),
        *("reverse", "select", "selectattr", "slice"),
    )
)
_COMPARING_TESTS = (
    *("eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">=", "in"),
)
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_SPLITTING = frozenset({"split", "rsplit", "splitlines"})
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5})")
_WIDE_SPEC = re.compile(r"\{|\d{5}")


class Meter:
    """What is left of a budget of work."""

    @classmethod
    def of_conversation(cls, turns: int, variables: Mapping[str, Any]) -> Meter:
        """The budget that suits a conversation of so many messages, which is among `variables`."""
        return cls(BUDGET + cls(1 << 40).weigh(variables) * (_PER_CHAR + _PER_CHAR_AND_TURN * turns))

    def __init__(self, budget: int) -> None:
        self.left = budget

    def spend(self, units: int) -> None:
        """TemplateLimit where the budget is used up."""
        self.left -= units
        if self.left < 0:
            raise TemplateLimit("it does too much: an endless loop, or text that grows without end")

    def weigh(self, value: Any) -> int:
        """Spends, and returns, what it costs to read all of `value`: nested values count wherever they appear."""
        if isinstance(value, str):
            self.spend(len(value))
            return len(value)
        weight = _ITEM
        waiting = [value]
        while waiting:
            value = waiting.pop()
            inner: Collection[Any] = ()
            if isinstance(value, str):
                units = len(value)
            else:
                inner = _inner(value)
                units = _ITEM * len(inner)
            self.spend(units)
            weight += units
            waiting.extend(inner)
        return weight


def _inner(value: Any) -> Collection[Any]:
    """What is printed and compared along with a value."""
    if isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
        return value
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    if isinstance(value, Namespace):
        return _inner(value._Namespace__attrs)
    return ()


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of one rendering: everything a template does spends from `meter`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, meter: Meter) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, finalize=self._shown, extensions=[loopcontrols, _Generation]
        )
        self.meter = meter
        self.globals.pop("lipsum")
        for name in _UNSAFE_FILTERS:
            del self.filters[name]
        self.filters.update(
            join=self._join, replace=self._replace, indent=self._indent, tojson=self._tojson, format=self._format
        )
        for name, filter_ in self.filters.items():
            self.filters[name] = self._guarded(filter_, reads=name not in _NOT_READ)
        tests: Any = self.tests
        for name in _COMPARING_TESTS:
            tests[name] = self._guarded(tests[name], reads=True)
        self.filters.update(_steps=self._steps, _join_parts=self._join_parts, _read=self._read, _sliced=self._sliced)

    def guarded_tree(self, source: str) -> nodes.Template:
        """The syntax tree of `source` with loops, joining and comparing under guard."""
        tree: nodes.Template = _Guard().visit(self.parse(source))
        return tree

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.meter.spend(_CALL)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, int | float | str | list | tuple | dict):
            for value in (*args, *kwargs.values()):
                if isinstance(value, int):
                    _check_number(value)
        if isinstance(owner, str):
            self._before_text_method(owner, function.__name__, args)
        elif isinstance(function, LoopContext) and args:  # the next level of a recursive loop
            args = (self._steps(args[0]), *args[1:])
        result = super().call(context, function, *args, **kwargs)
        self.meter.spend(_size(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.meter.spend(_OPERATOR)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_BITS:
                raise TemplateLimit(f"it computes a number of more than {_MAX_BITS} bits")
        elif operator == "*":
            times = next((side for side in (left, right) if isinstance(side, int)), 1)
            self.meter.spend(max(times, 0) * (_size(left) + _size(right)))
        elif operator == "+":
            self.meter.spend(_size(left) + _size(right))
        elif isinstance(left, str):  # formatting
            _refuse(_WIDE_PERCENT, left)
            self.meter.weigh(right)
        return super().call_binop(context, operator, left, right)

    def concat(self, parts: Iterable[str]) -> str:
        """Joins the output of a macro or block."""
        parts = list(parts)
        self.meter.spend(sum(map(len, parts)))
        return "".join(parts)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapper = super().wrap_str_format(value)
        if wrapper is None:
            return None
        for _, _, spec, _ in Formatter().parse(value.__self__):
            _refuse(_WIDE_SPEC, spec or "")
        return self._guarded(wrapper, reads=True)

    def _guarded(self, function: Callable[..., Any], reads: bool) -> Callable[..., Any]:
        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.meter.spend(_CALL)
            for value in (*args, *kwargs.values()):
                if isinstance(value, int):
                    _check_number(value)
                elif reads and not isinstance(value, Context | EvalContext | Environment):
                    self.meter.weigh(value)
            result = function(*args, **kwargs)
            self.meter.spend(_size(result))
            return result

        return guarded

    def _before_text_method(self, text: str, name: str, args: tuple[Any, ...]) -> None:
        self.meter.spend(len(text) // 8)
        if name in _SPLITTING:
            self.meter.spend(len(text))
        elif name in _PADDING and args and isinstance(args[0], int):
            self.meter.spend(args[0] * (1 + text.count("\t")))
        elif name == "replace" and len(args) >= 2:
            self.meter.spend(text.count(str(args[0])) * len(str(args[1])))
        elif name == "join" and args and isinstance(args[0], list | tuple | dict | str):
            self.meter.spend(len(text) * len(args[0]))
            self.meter.weigh(args[0])

    def _shown(self, value: Any) -> Any:
        self.meter.weigh(value)
        return value

    def _steps(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.meter.spend(_STEP)
            yield value

    def _join_parts(self, parts: list[Any]) -> str:
        """The operator `~`."""
        self.meter.weigh(parts)
        return "".join(map(str, parts))

    def _read(self, value: Any) -> Any:
        """An operand of a comparison."""
        if isinstance(value, str):
            self.meter.spend(len(value) // 8)
        elif isinstance(value, list | tuple | dict):
            self.meter.weigh(value)
        return value

    def _sliced(self, value: Any) -> Any:
        self.meter.spend(_size(value))
        return value

    @pass_eval_context
    def _join(self, context: EvalContext, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
        parts = list(self._steps(value))
        self.meter.weigh(parts)
        self.meter.spend(len(d) * len(parts))
        return sync_do_join(context, parts, d, attribute)

    @pass_eval_context
    def _replace(self, context: EvalContext, s: Any, old: Any, new: Any, count: int | None = None) -> str:
        self.meter.spend(str(s).count(str(old)) * len(str(new)))
        return do_replace(context, s, old, new, count)

    def _indent(self, s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        self.meter.spend((1 + s.count("\n")) * (width if isinstance(width, int) else len(width)))
        return do_indent(s, width, first, blank)

    def _format(self, value: str, *args: Any, **kwargs: Any) -> str:
        _refuse(_WIDE_PERCENT, value)
        return do_format(value, *args, **kwargs)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As chat templates expect it, unlike Jinja's: no HTML escapes."""
        if isinstance(value, Iterator):
            value = list(self._steps(value))
            self.meter.weigh(value)
        if indent is not None:
            if not 0 <= indent <= _MAX_JSON_INDENT:
                raise TemplateLimit(f"tojson with indent {indent}; supported: 0 to {_MAX_JSON_INDENT}")
            self.meter.spend(self.meter.weigh(value) * indent)
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Guard(NodeTransformer):
    """Puts the filters that meter loops, slices, `~` and comparisons into a syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_steps")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_join_parts")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_sliced") if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _read(node.expr)
        for operand in node.ops:
            operand.expr = _read(operand.expr)
        return node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _read(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, "_read")


class _Generation(Extension):
    """`{% generation %}` marks what a model is trained on; for answering it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    return _ITEM * len(value) if isinstance(value, list | tuple | dict) else 1


def _check_number(value: int) -> None:
    if abs(value) > _MAX_NUMBER:
        raise TemplateLimit(f"number {value:.6g} as an argument; supported: up to {_MAX_NUMBER}")


def _refuse(wide: re.Pattern[str], text: str) -> None:
    if wide.search(text):
        raise TemplateLimit(f"a format of that width is not supported: {text[:40]!r}")
