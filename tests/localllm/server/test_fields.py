"""Typed request fields: each refusal names the field and the expected type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from localllm.server.errors import BadRequest
from localllm.server.fields import Fields

GIVEN: dict[str, Any] = {
    "text": "x",
    "whole": 3,
    "point": 3.0,
    "half": 0.5,
    "huge": 10**400,
    "yes": True,
    "none": None,
    "list": [1, "a"],
    "texts": ["a", "b"],
    "numbers": [1, 2],
    "object": {"inner": 1},
    "objects": [{"a": 1}, {"a": "x"}],
}


def test_values_are_given_by_type() -> None:
    fields = Fields(GIVEN)
    assert fields.text("text") == "x"
    assert (fields.integer("whole"), fields.integer("point")) == (3, 3)
    assert type(fields.integer("point")) is int
    assert (fields.number("half"), fields.number("whole")) == (0.5, 3.0)
    assert fields.flag("yes") is True
    assert fields.choice("text", ("x", "y")) == "x"
    assert fields.list("list") == [1, "a"]
    assert fields.object("object") == {"inner": 1}
    assert fields.inner("object").integer("inner") == 1
    assert fields.texts("texts") == ("a", "b")
    assert fields.texts("text") == ("x",)
    assert fields.integers("numbers") == (1, 2)


@pytest.mark.parametrize("name", ["none", "missing"])
def test_null_counts_as_missing(name: str) -> None:
    fields = Fields(GIVEN)
    assert not fields.has(name)
    assert fields.text(name, "d") == "d"
    assert fields.integer(name, 7, least=100) == 7  # default values are not validated
    assert fields.optional_text(name) is None
    assert fields.optional_integer(name) is None
    assert fields.optional_number(name) is None
    assert fields.optional_flag(name) is None
    assert fields.optional_object(name) is None
    assert fields.texts(name) == ()
    assert list(fields.each(name)) == []
    assert fields.inner(name).data == {}


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (lambda f: f.text("missing"), "missing: required, but missing"),
        (lambda f: f.text("none"), "none: required, but missing"),
        (lambda f: f.text("whole"), "whole: expected a text, got a number"),
        (lambda f: f.integer("yes"), "yes: expected a whole number, got true or false"),
        (lambda f: f.integer("half"), "half: expected a whole number, got a number"),
        (lambda f: f.integer("text"), "text: expected a whole number, got a text"),
        (lambda f: f.integer("whole", None, 4), "whole: expected at least 4, got 3"),
        (lambda f: f.integer("whole", None, 0, 2), "whole: expected at most 2, got 3"),
        (lambda f: f.integer("huge", None, 0, 2), "huge: expected at most 2"),
        (lambda f: f.number("huge"), "huge: expected a finite number"),
        (lambda f: f.number("yes"), "yes: expected a number"),
        (lambda f: f.flag("whole"), "whole: expected true or false, got a number"),
        (lambda f: f.choice("text", ("a", "b")), "text: expected one of a, b; got 'x'"),
        (lambda f: f.list("object"), "object: expected a list, got an object"),
        (lambda f: f.list("list", None, 1), "list: has 2 items; the limit is 1"),
        (lambda f: f.object("list"), "list: expected an object, got a list"),
        (lambda f: f.texts("list"), "list[0]: expected a text, got a number"),
        (lambda f: f.integers("list"), "list[1]: expected a whole number, got a text"),
        (lambda f: list(f.each("list")), "list[0]: expected an object, got a number"),
        (lambda f: [e.integer("a") for e in f.each("objects")], "objects[1].a: expected a whole number"),
        (lambda f: f.inner("object").text("inner"), "object.inner: expected a text"),
    ],
)
def test_refusals_name_the_field(read: Callable[[Fields], Any], says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(Fields(GIVEN))
    assert says in str(caught.value)
    assert caught.value.param == says.split(":")[0]


def test_integers_are_not_flags() -> None:
    with pytest.raises(BadRequest, match=r"a\[1\]: expected a whole number, got true or false"):
        Fields({"a": [1, True]}).integers("a")
