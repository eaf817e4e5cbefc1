"""Argument values in answers: JSON passes through unchanged, and models' other notations become JSON."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.output.incoming import Incoming, run_whole
from localllm.output.literal import converted, literal
from localllm.output.values import Property, Schemas, argument

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(VALUES, st.sampled_from([None, 1, 4]), st.booleans())
def test_json_goes_through_unchanged(value: Any, indent: int | None, ascii_: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_)
    assert converted(text) == text.strip()


@settings(deadline=None)
@given(VALUES)
def test_what_python_prints_is_the_same_value(value: Any) -> None:
    text = converted(repr(value))
    assert text is not None
    assert json.loads(text) == ast.literal_eval(repr(value))


@settings(deadline=None)
@given(VALUES, st.data())
def test_a_part_of_json_is_the_start_of_json(value: Any, data: st.DataObject) -> None:
    """For truncated JSON, the emitted part is a prefix of the text and never a complete value."""
    text = json.dumps({"key": value})
    cut = data.draw(st.integers(0, len(text) - 1))
    shown: list[str] = []
    whole, _ = run_whole(lambda incoming: literal(incoming, shown.append), text[:cut])
    assert not whole
    assert text.startswith("".join(shown))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{'a': 'it\\'s', 'b': [True, False, None]}", {"a": "it's", "b": [True, False, None]}),
        ('{"a": "x\ny\tz"}', {"a": "x\ny\tz"}),
        ('[1, 2, ]', [1, 2]),
        ('{"a": 1,}', {"a": 1}),
        ('"\\d+ \\u00e9"', "\\d+ é"),
        ("'\\x41'", "A"),
        ("{}", {}),
        (" [ ] ", []),
    ],
)  # fmt: skip
def test_near_json_becomes_json(text: str, value: Any) -> None:
    found = converted(text)
    assert found is not None
    assert json.loads(found) == value


@pytest.mark.parametrize(
    "text", ["", "NaN", "Infinity", "01", "1.", "+1", "{a: 1}", '{"a" 1}', "[1 2]", '"a', "[" * 101, "x"]
)
def test_what_is_no_value_is_refused(text: str) -> None:
    assert converted(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{city:<|"|>San "F"\n<|"|>,n:-1.5e3,ok:true,list:[<|"|>a<|"|>,null],in:{t:<|"|><|"|>}}',
         {"city": 'San "F"\n', "n": -1500.0, "ok": True, "list": ["a", None], "in": {"t": ""}}),
        ('{"city":<|"|>x<|"|>}', {"city": "x"}),
        ("{}", {}),
    ],
)  # fmt: skip
def test_gemma_values(text: str, value: Any) -> None:
    shown: list[str] = []
    assert run_whole(lambda incoming: literal(incoming, shown.append, '<|"|>'), text) == (True, True)
    assert json.loads("".join(shown)) == value


def test_what_follows_a_value_is_not_taken() -> None:
    incoming = Incoming()
    incoming.push('{"a": 1} rest')
    incoming.close()
    with pytest.raises(StopIteration):
        next(literal(incoming, lambda part: None))
    assert incoming.take(9) == " rest"


# -- arguments written as plain text ---------------------------------------------------------------------------------


def types(schema: Any, root: Any = None) -> frozenset[str] | None:
    return Property(schema, root or {}).types


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("12", {"type": "number"}, 12),
        ("12", None, 12),
        ("1e3", {"type": "number"}, 1000.0),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string", "nullable": True}, None),
        ("null", {"type": "string"}, "null"),
        ("123 Main St", {"type": ["integer", "string"]}, "123 Main St"),
        ("7", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 7),
        ("{'t': 'C'}", {"type": "object"}, {"t": "C"}),
        ('{"t": "C"}', {"oneOf": [{"type": "object"}, {"type": "string"}]}, {"t": "C"}),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("Rome", {"type": "integer"}, "Rome"),
        ("b", {"enum": ["a", "b"]}, "b"),
        ("2", {"enum": [1, 2]}, 2),
        ('"quoted"', {"type": "string"}, '"quoted"'),
    ],
)
def test_an_argument_has_the_type_of_its_schema(text: str, schema: Any, value: Any) -> None:
    found = json.loads(argument(text, types(schema)))
    assert (found, type(found)) == (value, type(value))


def test_references_of_schemas_are_followed() -> None:
    root = {"$defs": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/none"}}}
    whole = Property(root, root)
    assert (whole.below("a").types, whole.below("b").types, whole.below("c").types) == ({"integer"}, None, None)


def test_schemas_that_refer_to_themselves_end() -> None:
    loop = {"anyOf": [{"$ref": "#"}] * 50}
    assert types(loop, loop) is None
    assert types({"$ref": "#"}, {"$ref": "#"}) is None


@pytest.mark.parametrize(
    "tool", [{}, {"function": None}, {"function": {"name": 3}}, {"type": "web_search"}, {"name": "a"}]
)
def test_tools_of_other_forms_are_no_error(tool: Any) -> None:
    assert Schemas([tool]).of("x").below("y").types is None
