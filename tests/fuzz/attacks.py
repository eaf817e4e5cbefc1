"""Attacks on template engines: expressions and blocks for mutated templates, which are harmful without limits."""

from __future__ import annotations

EXPRESSIONS = (
    *("'x' * 10000000000", "[0] * 10000000000", "2 ** 100000000", "9 ** 9 ** 9", "range(1000000000) | list | length"),
    *("'%1000000000d' % 1", "'%*d' % (1000000000, 1)", "'{:1000000000}'.format(1)", "'{:{}}'.format(1, 1000000000)"),
    *("'%999999999d' | format(1)", "'{a:1000000000}'.format_map({'a': 1})", "'x' | center(1000000000)"),
    *("'x'.ljust(1000000000)", "('\\t' * 1000).expandtabs(100000)", "(1).to_bytes(1000000000, 'big')"),
    *("'a'.encode().center(3500000000)", "'a'.encode().ljust(2000000000) | length", "'a'.encode() * 3000000000"),
    *("b.replace('x', b) | length", "b.join(b) | length", "b.encode().join([b.encode()] * 1000) | length"),
    *("b | indent(99999) | length", "[[[1]]] | tojson(indent=99999)", "b.encode('punycode')", "b.split('x') | length"),
    *("strftime_now('%1000000000Y')", "strftime_now('%c' * 4000000) | length", "[1] | batch(99999999, 'x') | list"),
    *("([[1, 2]] * 200000) | groupby(0) | length", "([b] * 1000) | sum(start=[]) | length", "b | title | length"),
    *("[b] | map('upper') | map('replace', 'x', b) | join | length", "b | wordcount", "b | list | unique | list"),
    *("''.__class__.__mro__", "'' | attr('__class__')", "strftime_now.__globals__", "cycler.__init__.__globals__"),
    *(
        "'{0.__class__.__init__.__globals__}'.format(strftime_now)",
        "self._TemplateReference__context",
        "messages.append(1)",
    ),
    *("messages[0].update({})", "namespace.__init__", "joiner.__globals__", "dict(**messages[0])", "lipsum(1000)"),
    *("(messages, messages) | tojson", "messages | map(attribute='content') | sum", "raise_exception('\\x1b[31m\\n')"),
    *("undefined.x.y", "messages[99999999999]", "messages['\\x1b']", "(1, 2)['a']", "1 / 0", "none + 1", "-messages"),
    *("x.y.z()", "'\\ud800'", "'a' < 1", "messages | sort", "messages | sort(attribute='content.x')", "loop.index"),
    *("messages | dictsort", "'9' * 5000 | int", "('9' * 5000) | int", "1e308 * 10", "[1, 2][::0]", "b[::-1][:5]"),
)
BLOCKS = (
    "{% for q in range(99999) %}{% for r in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{% set s = namespace(v='x') %}{% for i in range(60) %}{% set s.v = s.v + s.v %}{% endfor %}{{ s.v | length }}",
    "{% set s = namespace(v=['x']) %}{% for i in range(60) %}{% set s.v = [s.v, s.v] %}{% endfor %}{{ s.v }}",
    "{% set s = namespace(v={}) %}{% for i in range(60) %}{% set s.v = {'a': s.v, 'b': s.v} %}{% endfor %}"
    "{{ s.v == s.v }}",
    "{% set s = namespace(v=()) %}{% for i in range(99999) %}{% set s.v = (s.v,) %}{% endfor %}{% set d = {s.v: 1} %}",
    "{% set s = namespace(v=[]) %}{% for i in range(99999) %}{% set s.v = [s.v] %}{% endfor %}"
    "{{ s.v | tojson | length }}",
    "{% set s = namespace(v=[], w=[]) %}{% for i in range(99999) %}{% set s.v = [s.v] %}"
    "{% set s.w = [s.w] %}{% endfor %}{{ s.v == s.w }}",
    "{% set s = namespace(l=[]) %}{% for i in range(400) %}"
    "{% set s.l = s.l + ['a'.encode().center(9999999)] %}{% endfor %}",
    "{% for i in range(100000) %}{% set y = 'a'.encode().center(99999) %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "{% set a %}{% for i in range(1000) %}{{ 'x' * 99999 }}{% endfor %}{% endset %}{{ a | length }}",
    "{% filter upper %}{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}{% endfilter %}",
    "{% call(z) m2() %}{{ z }}{% endcall %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.environ }}",
    "{% extends 'x' %}",
    "{% block x %}{{ self.x() }}{% endblock %}",
    "{% generation %}{% endgeneration %}",
    "{% set messages = [] %}",
    "{% set loop = 1 %}{% set range = 1 %}{% set raise_exception = 1 %}",
    "{% raw %}{{ {% endraw %}",
    "{% if a %}x" + "{% elif b %}y" * 2000 + "{% endif %}",
    "{{ 1" + " + 1" * 5000 + " }}",
    "{{ x" + ".a" * 5000 + " }}",
    "{{ 'x'" + " | upper" * 5000 + " }}",
    "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
    "{{ " + "not " * 5000 + "1 }}",
    "{% if 1 %}" * 300 + "{% endif %}" * 300,
)
PRELUDE = "{% set b = 'x' * 60000 %}"  # defines b for some of the expressions
FILTERS = (
    *("abs", "attr('content')", "batch(3)", "capitalize", "center(99)", "default('x')", "dictsort", "escape", "first"),
    *(
        "float",
        "forceescape",
        "format(1)",
        "groupby('role')",
        "indent(9)",
        "int",
        "items",
        "join('-')",
        "last",
        "length",
    ),
    *("list", "lower", "map('upper')", "max", "min", "pprint", "random", "reject", "rejectattr('role')", "upper"),
    *("replace('a', 'bb')", "reverse", "round", "safe", "select", "selectattr('role')", "slice(3)", "sort", "string"),
    *(
        "striptags",
        "sum",
        "title",
        "tojson",
        "tojson(indent=2)",
        "trim",
        "truncate(9)",
        "unique",
        "urlencode",
        "urlize",
    ),
    *("wordcount", "wordwrap(1)", "xmlattr", "nothing", "center(10000000)", "int(base=99)", "round(-400)"),
)
METHODS = (
    *("append", "capitalize", "center", "count", "encode", "endswith", "expandtabs", "find", "format", "format_map"),
    *("get", "index", "items", "join", "keys", "ljust", "lower", "lstrip", "mro", "partition", "pop", "replace"),
    *("rindex", "rsplit", "split", "splitlines", "startswith", "strip", "swapcase", "title", "translate", "update"),
    *("upper", "values", "zfill", "__class__", "__init__", "__len__", "copy", "clear", "isdigit", "maketrans"),
)
TEXTS = (
    *("'%1000000000d'", "'{:>1000000000}'", "'{0.__class__}'", "'\\x1b[2J'", "'\\u2028'", "''", "'%s%s%s%n'", "'\\n'"),
    *("'<|im_start|>'", "'user'", "'system'", "'assistant'", "'%Y' * 1000", "'\\ud800'"),
)
NUMBERS = ("0", "-1", "1", "2", "99999", "100001", "2147483648", "1" + "0" * 30, "9" * 5000, "1e400", "0.5", "-0")
