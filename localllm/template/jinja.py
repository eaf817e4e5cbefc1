"""Jinja as chat templates expect it, operating on `Text`, which distinguishes user text from the template's text.

This only runs in the confined child process. Jinja's sandbox denies a template access to Python's internals; the child
process's limits deny access to everything else.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from string import Formatter
from typing import Any

from jinja2 import Environment, Undefined, nodes, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from localllm.template.origin import OWN, Text, joined, least, shown


class _Words(dict[str, Text]):
    """Cache of the template's string constants, marked as OWN, by text."""

    def __missing__(self, text: str) -> Text:
        self[text] = made = Text.of(text, OWN)
        return made


class _Generator(CodeGenerator):
    """Compiles constants and the operator `~` so that marks are preserved."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(f"environment.words[{node.value!r}]")
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.tilde((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """`{% generation %}` marks text for training; in inference, the tag is ignored and its content is kept."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)  # variables set inside are local to the block


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The environment shared by all templates; it has no rendering state."""

    code_generator_class = _Generator

    def __init__(self) -> None:
        # Unoptimized, because the optimizer folds constants before they are marked.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_printed,
            extensions=[loopcontrols, _Generation],
            optimized=False,
        )
        self.words = _Words()
        self.globals.pop("lipsum")
        del self.filters["random"]  # rendering must be deterministic
        self.filters.update(join=_join, indent=_indent, tojson=_tojson, safe=shown)

    def concat(self, parts: Iterable[str]) -> Text:
        """Concatenate the output of a block, macro or template; plain strings are the text between tags."""
        return joined(parts, plain=OWN)

    def tilde(self, parts: Iterable[Any]) -> Text:
        """Implement the operator `~`."""
        return joined(map(shown, parts))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` without access to Python's internals; it marks inserted values."""
        if not isinstance(value, types.MethodType | types.BuiltinMethodType):
            return None
        form = value.__self__
        if not isinstance(form, str) or value.__name__ not in ("format", "format_map"):
            return None
        formatter = _Formatter(self)
        if value.__name__ == "format_map":
            return lambda mapping: formatter.put(form, (), mapping)
        return lambda *args, **kwargs: formatter.put(form, args, kwargs)


class _Formatter(SandboxedFormatter):
    def put(self, form: str, args: Sequence[Any], kwargs: Any) -> str:
        """Fill the fields of a format string; with nested fields, the result counts as user text."""
        parts = list(Formatter.parse(self, form))
        if any("{" in (spec or "") for _, _, spec, _ in parts):
            return str(self.vformat(form, args, kwargs))
        mark = least(form)
        pieces: list[str] = []
        automatic = 0
        for literal, field, spec, conversion in parts:
            pieces.append(Text.of(literal, mark))
            if field is None:
                continue
            if not re.match(r"[^.\[]", field):
                field, automatic = f"{automatic}{field}", automatic + 1
            value, _ = self.get_field(field, args, kwargs)
            if spec or conversion not in (None, "s"):
                pieces.append(format(self.convert_field(value, conversion), str(spec)))
            else:
                pieces.append(shown(value))
        return joined(pieces)


def _printed(value: Any) -> Text:
    return shown("" if isinstance(value, Undefined) else value)


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: Any = "", attribute: Any = None) -> Text:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return shown(d).join(map(shown, value))


def _indent(s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> Text:
    """Indent lines. Jinja's `indent` filter would lose marks. As in Jinja, a line break at the end of `s` counts."""
    gap, line_break = Text.of(width if isinstance(width, str) else " " * width, OWN), Text.of("\n", OWN)
    start, *rest = (shown(s) + line_break).splitlines()
    made = line_break.join([start, *(gap + line if line or blank else line for line in rest)])
    return gap + made if first else made


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> Text:
    """Return JSON as chat templates expect it: without Jinja's HTML escapes."""
    value = list(value) if isinstance(value, Iterator) else value
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return Text.of(text, least(value))
