"""Each malicious template gives one clear error, quickly and with little memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

import pytest

from localllm.sandbox import Confined, ResourceLimits
from localllm.template import ChatTemplate, TemplateError, TemplateLimit, renderer

GROW = "{%% set ns = namespace(s=%s) %%}{%% for i in range(60) %%}{%% set ns.s = %s %%}{%% endfor %%}"
TWICE = GROW % ("['x']", "[ns.s, ns.s]")
BOTH = TWICE + TWICE.replace("ns", "mm")

BOMBS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursion as a tree": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "recursive loops": "{% set l = range(999) %}{% for i in l recursive %}{{ loop(l) if loop.depth < 9 }}{% endfor %}",
    "long output": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "long block": "{% set a %}{% for i in range(1000) %}{{ 'x' * 99999 }}{% endfor %}{% endset %}",
    "long macro": "{% macro m(s) %}{% for i in range(99999) %}{{ s }}{% endfor %}{% endmacro %}{{ m('x'*99999) }}",
    "text times number": "{{ 'x' * 10000000000 }}",
    "list times number": "{{ [0] * 10000000000 }}",
    "number times text": "{{ 10000000000 * 'x' }}",
    "doubled by +": GROW % ("'x'", "ns.s + ns.s"),
    "doubled by ~": GROW % ("'x'", "ns.s ~ ns.s"),
    "doubled list": GROW % ("[1]", "ns.s + ns.s"),
    "doubled by join": GROW % ("'x'", "[ns.s, ns.s]|join"),
    "doubled by format": GROW % ("'x'", "'{}{}'.format(ns.s, ns.s)"),
    "doubled by percent": GROW % ("'x'", "'%s%s' % (ns.s, ns.s)"),
    "lists in lists shown": TWICE + "{{ ns.s }}",
    "lists in lists as text": TWICE + "{{ ns.s | string | length }}",
    "lists in lists as JSON": TWICE + "{{ ns.s | tojson | length }}",
    "lists in lists joined": TWICE + "{{ 'a' ~ ns.s }}",
    "lists in lists compared": BOTH + "{{ ns.s == mm.s }}",
    "lists in lists tested": BOTH + "{{ ns.s is eq(mm.s) }}",
    "lists in lists searched": BOTH + "{{ ns.s in [mm.s] }}",
    "lists in lists formatted": TWICE + "{{ '%s' % (ns.s,) }}",
    "dicts in dicts": GROW % ("{}", "{'a': ns.s, 'b': ns.s}") + "{{ ns.s }}",
    "sum of lists": "{% set b = [0] * 10000 %}{{ ([b] * 10000) | sum(start=[]) | length }}",
    "power": "{{ 2 ** 100000000 }}",
    "squares": GROW % ("3", "ns.s * ns.s"),
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent filter": "{{ '%1000000000d' | format(1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format nested": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "center": "{{ 'x' | center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "expandtabs": "{{ ('\t' * 1000).expandtabs(100000) }}",
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "replace method": "{% set s = 'x' * 100000 %}{{ s.replace('x', s) | length }}",
    "replace filter": "{% set s = 'x' * 100000 %}{{ s | replace('x', s) | length }}",
    "join method": "{% set s = 'x' * 100000 %}{{ s.join(s) | length }}",
    "join filter": "{% set s = 'x' * 100000 %}{{ range(99999) | map('string') | join(s) | length }}",
    "indent": "{% set s = '\n' * 1000000 %}{{ s | indent(99999) | length }}",
    "JSON indent": "{{ [[[1]]] | tojson(indent=99999999) }}",
    "slices": "{% set s = [0] * 99999 %}{% for i in range(99999) %}{% set x = s[1:] %}{% endfor %}",
    "splits": "{% set s = 'a ' * 99999 %}{% for i in range(99999) %}{% set x = s.split(' ') %}{% endfor %}",
    "searches": "{% set s = 'a' * 999999 %}{% for i in range(99999) %}{% set x = 'b' in s %}{% endfor %}",
    "finds": "{% set s = 'a' * 999999 %}{% for i in range(99999) %}{% set x = s.find('b') %}{% endfor %}",
}


DEEP = "{% set ns = namespace(t=()) %}" + "{% for i in range(400) %}{% for j in range(1000) %}{% set ns.t = (ns.t,) %}"
DEEP += "{% endfor %}{% endfor %}"
KILLERS = {  # templates that crash the process that renders them
    "nested tuple hashed": DEEP + "{% set d = {ns.t: 1} %}",
    "nested tuple in a set": DEEP + "{{ [ns.t] | unique | list | length }}",
}


@pytest.fixture(scope="module")
def quick() -> Iterator[Confined]:
    """A renderer with a small fraction of the usual time limit."""
    with renderer(ResourceLimits(seconds=0.3)) as confined:
        yield confined


@pytest.fixture(scope="module")
def usual() -> Iterator[Confined]:
    with renderer(ResourceLimits(seconds=2)) as confined:
        yield confined


@pytest.fixture(scope="module")
def patient() -> Iterator[Confined]:
    """A renderer with a long time limit, so that only the crash ends the process, even on a busy machine."""
    with renderer(ResourceLimits(seconds=120)) as confined:
        yield confined


def run(source: str, confined: Confined) -> str:
    return ChatTemplate(source, "", "", confined=confined).render([{"role": "user", "content": "hi"}]).text


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_end_in_one_clear_error(name: str, quick: Confined) -> None:
    with pytest.raises(TemplateError, match="the chat template") as error:
        run(BOMBS[name], quick)
    assert "\n" not in str(error.value)
    assert run("{{ messages[0].content }}", quick) == "hi"


@pytest.mark.parametrize("name", KILLERS)
def test_what_kills_its_process_is_an_error_and_the_next_template_works(name: str, patient: Confined) -> None:
    with pytest.raises(TemplateLimit, match="it crashes its process"):
        run(KILLERS[name], patient)
    assert run("{{ messages[0].content }}", patient) == "hi"


@pytest.mark.parametrize("name", ["recursion as a tree", "doubled by ~"])
def test_the_limits_are_seconds_and_none_of_our_memory(name: str, usual: Confined) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with pytest.raises(TemplateError):
        run(BOMBS[name], usual)
    assert time.process_time() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20e3  # ru_maxrss in KiB


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'].__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% set _ = messages.append(1) %}",
        "{% set _ = messages[0].update({}) %}",
        "{{ range(1000000000) }}",
        "{{ lipsum() }}",
        "{{ open('/etc/passwd') }}",
        "{% import 'os' as os %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_there_is_no_way_out(source: str, usual: Confined) -> None:
    with pytest.raises(TemplateError, match="the chat template failed in line 1"):
        run(source, usual)


@pytest.mark.parametrize(
    "source",
    ["{{ messages|attr('__class__') }}", "{{ raise_exception.__globals__ }}", "{{ messages.__class__.__init__ }}"],
)
def test_what_is_forbidden_is_not_there(source: str, usual: Confined) -> None:
    assert run(source, usual) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ 1" + "+1" * 20000 + " }}",
        "{% if a %}" * 3000 + "{% endif %}" * 3000,
        "x" * ((1 << 20) + 1),
        "{{",
        "{% for %}",
        "{% generation %}",
        "{% endfor %}",
    ],
)
def test_a_source_that_is_not_a_template_is_an_error(source: str, usual: Confined) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source, "", "", confined=usual)


def test_names_beyond_ascii_are_compiled(usual: Confined) -> None:
    """Python normalizes non-ASCII names with a module that it loads on first use.

    A confined child cannot load it, so the renderer does so beforehand.
    """
    assert run("{% set é = 'a' %}{{ é }}{{ messages[0].content }}", usual) == "ahi"
