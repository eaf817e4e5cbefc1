"""Chat templates derived from real ones: truncated, spliced, nested, with huge numbers, other filters, and attacks.

Only `render` calls localllm.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from localllm.sandbox import Confined, ResourceLimits
from localllm.template import FAMILIES, ChatTemplate, TemplateError, TemplateLimit
from tests.conftest import SHARED_DATA
from tests.fuzz import attacks
from tests.fuzz.case import OURS, Case, Wrong
from tests.fuzz.children import PerProcess
from tests.localllm.support import CHATML

_MOST = 64 << 20  # largest rendered text in characters
_PARTS = re.compile(r"(\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\})", re.DOTALL)
_OPENED = re.compile(r"\{%[-+]?\s*(?:(?:for|if|macro|call|filter|block|generation)\b|set\s+\w+\s*[-+]?%\})")
_CLOSED = re.compile(r"\{%[-+]?\s*end")
_INSIDE = re.compile(r"\{%[-+]?\s*(?:end|else|elif)")
_NUMBER, _TEXT = re.compile(r"\b\d+\b"), re.compile(r"'[^'\n]*'|\"[^\"\n]*\"")
_FILTER, _METHOD = re.compile(r"\|\s*[a-z]+(?:\([^()]*\))?"), re.compile(r"\.[a-z_]+\(")

_OWN = (
    CHATML,
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% endfor %}",
    "{%- macro part(x, n=1) -%}{{ x | tojson(indent=2) if x is mapping else x }}{%- endmacro -%}"
    "{%- set ns = namespace(last=-1, text='') -%}{%- for m in messages[::-1] -%}{%- set ns.last = loop.index0 -%}"
    "{%- set ns.text = ns.text ~ part(m) -%}{%- endfor -%}{{- ns.text -}}"
    "{%- if tools -%}{{ tools | length }}{%- endif -%}"
    "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content.split('x')[-1].strip() }}{% endfor %}",
)

Messages = list[dict[str, Any]]
_CONVERSATIONS: tuple[Messages, ...] = (
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>so</think> two"},
        {"role": "user", "content": "three \x1b[2J {{ 1 }} '\"\\"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "sun"},
    ],
    [{"role": "user", "content": "\U0001f642é" * 500}],
)


def render(source: str, messages: Messages, confined: Confined) -> str:
    """Render a conversation with the template and return the text."""
    try:
        return ChatTemplate(source, "<s>", "</s>", confined=confined).render(messages).text
    except TemplateError as error:
        if "without an answer" in str(error):
            raise Wrong(f"the confined child ended by an error of ours: {error}") from None
        raise


class Kind:
    together: ClassVar[int] = 200
    seconds: ClassVar[float] = 20.0

    def __init__(self, home: Path) -> None:
        folder = SHARED_DATA / "templates"
        found = [path.read_text() for path in sorted(folder.glob("*.jinja"))] if folder.exists() else []
        self._sources = [*found, *_OWN, *(family.source for family in FAMILIES)]
        self._child = PerProcess("localllm.template.render", ResourceLimits(seconds=0.3))  # less than the default

    def make(self, random: Random, folder: Path) -> Case:
        at = random.randrange(len(self._sources))
        parts, changes = _PARTS.split(self._sources[at]), [f"template {at}"]
        for _ in range(random.choice((1, 1, 2, 3, 5))):
            change = random.choice(_CHANGES)
            changes.append(change.__name__.removeprefix("_"))
            change(random, parts, self._sources)
        source, messages = "".join(parts), random.choice(_CONVERSATIONS)
        (folder / "template.jinja").write_text(source, errors="surrogatepass")
        return Case(tuple(changes), lambda: use(self._child.get(), source, messages, random.random() < 0.1))


def use(confined: Confined, source: str, messages: Messages, twice: bool) -> str:
    before = repr(messages)
    text = render(source, messages, confined)
    if not isinstance(text, str) or len(text) > _MOST:
        raise Wrong(f"{len(text)} characters were rendered")
    if repr(messages) != before:
        raise Wrong("the template changed the conversation")
    if twice:
        try:
            again = render(source, messages, confined)
        except TemplateLimit:  # the first rendering was close to the limit
            return "rendered"
        except OURS as error:
            raise Wrong(f"rendered once and then refused: {error}") from None
        if again != text and "strftime_now" not in source and " at 0x" not in text:
            raise Wrong("rendered twice, it gave two texts")
    return "rendered"


# -- changes -------------------------------------------------------------------------------------------------------

_Change = Callable[[Random, list[str], list[str]], None]


def _unit(random: Random, parts: list[str]) -> slice:
    """Return a part, or a whole block if the part opens one. Sometimes return arbitrary parts, which break blocks."""
    start = _place(random, parts)
    if random.random() < 0.1:
        return slice(start, start + random.choice((1, 3, 10)))
    while start < len(parts) and _INSIDE.match(parts[start]):
        start += 1
    depth, stop = 0, start
    while stop < len(parts):
        depth += bool(_OPENED.match(parts[stop])) - bool(_CLOSED.match(parts[stop]))
        stop += 1
        if depth <= 0:
            break
    return slice(start, stop)


def _place(random: Random, parts: list[str]) -> int:
    return random.randrange(len(parts) + 1)


def _code(random: Random, parts: list[str]) -> int | None:
    """Return the index of a random code part, or None."""
    found = [i for i, part in enumerate(parts) if part.startswith(("{{", "{%"))]
    return random.choice(found) if found else None


def _repeat(random: Random, parts: list[str], sources: list[str]) -> None:
    some = _unit(random, parts)
    parts[some.start : some.start] = parts[some] * random.choice((1, 2, 50))


def _splice(random: Random, parts: list[str], sources: list[str]) -> None:
    other = _PARTS.split(random.choice(sources))
    at = _place(random, parts)
    parts[at:at] = other[_unit(random, other)] + other[_unit(random, other)]


def _remove(random: Random, parts: list[str], sources: list[str]) -> None:
    del parts[_unit(random, parts)]


def _swap(random: Random, parts: list[str], sources: list[str]) -> None:
    """Move one part or block to another place."""
    some = _unit(random, parts)
    moved = parts[some]
    del parts[some]
    at = _place(random, parts)
    parts[at:at] = moved


def _replaced(random: Random, parts: list[str], pattern: re.Pattern[str], new: Callable[[], str]) -> None:
    """Replace one match of a pattern in code."""
    found = [(i, m.span()) for i, part in enumerate(parts) if part[:2] in ("{{", "{%") for m in pattern.finditer(part)]
    if found:
        at, (start, stop) = random.choice(found)
        parts[at] = parts[at][:start] + new() + parts[at][stop:]


def _number(random: Random, parts: list[str], sources: list[str]) -> None:
    _replaced(random, parts, _NUMBER, lambda: random.choice(attacks.NUMBERS))


def _text(random: Random, parts: list[str], sources: list[str]) -> None:
    others = _TEXT.findall(random.choice(sources))
    _replaced(random, parts, _TEXT, lambda: random.choice((*attacks.TEXTS, *others)))


def _filter(random: Random, parts: list[str], sources: list[str]) -> None:
    _replaced(random, parts, _FILTER, lambda: f"| {random.choice(attacks.FILTERS)} ")


def _method(random: Random, parts: list[str], sources: list[str]) -> None:
    _replaced(random, parts, _METHOD, lambda: f".{random.choice(attacks.METHODS)}(")


def _wrap(random: Random, parts: list[str], sources: list[str]) -> None:
    """Put an expression inside another."""
    at = _code(random, parts)
    if at is None or not parts[at].startswith("{{"):
        return
    inside = parts[at][2:-2].strip("-+ \n")
    around = ("({}) * 100000", "[{}] * 99999", "({}) | tojson", "({}) ~ ({})", "[[{}]] | string", "({}).encode()")
    chosen = (*around, f"({{}}) | {random.choice(attacks.FILTERS)}", f"({{}}).{random.choice(attacks.METHODS)}()")
    parts[at] = "{{ " + random.choice(chosen).replace("{}", inside) + " }}"


def _nest(random: Random, parts: list[str], sources: list[str]) -> None:
    """Put some parts inside a loop, macro, block or filter."""
    start = _place(random, parts)
    stop = min(len(parts), start + random.choice((1, 3, 10)))
    opened, closed = random.choice(
        (
            ("{% for q in range(300) %}", "{% endfor %}"),
            ("{% for q in messages %}" * 5, "{% endfor %}" * 5),
            ("{% macro z() %}", "{{ z() }}{% endmacro %}{{ z() }}"),
            ("{% set z %}", "{% endset %}{{ z * 1000 }}"),
            ("{% filter upper | title %}", "{% endfilter %}"),
            ("{% if true %}" * 50, "{% endif %}" * 50),
        )
    )
    parts[stop:stop] = [closed]
    parts[start:start] = [opened]


def _attack_expression(random: Random, parts: list[str], sources: list[str]) -> None:
    attack = random.choice(attacks.EXPRESSIONS)
    new = (
        random.choice(("{{ %s }}", "{%% set z = %s %%}", "{%% if %s %%}x{%% endif %%}", "{{ (%s) | length }}")) % attack
    )
    parts.insert(_place(random, parts), attacks.PRELUDE + new)


def _attack_block(random: Random, parts: list[str], sources: list[str]) -> None:
    parts.insert(_place(random, parts), random.choice(attacks.BLOCKS))


def _characters(random: Random, parts: list[str], sources: list[str]) -> None:
    """Change single characters at random."""
    for _ in range(random.choice((1, 2, 5))):
        at = _code(random, parts)
        if at is not None:
            place = random.randrange(len(parts[at]) + 1)
            parts[at] = parts[at][:place] + random.choice("{}%|().[]'\"\\\n\0\x1b~+*-:,=<é") + parts[at][place:]


_CHANGES: tuple[_Change, ...] = (
    *(_repeat, _splice, _splice, _remove, _swap, _number, _number, _text, _filter, _filter, _method, _wrap, _wrap),
    *(_nest, _attack_expression, _attack_block, _characters),
)
