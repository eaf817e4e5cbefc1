"""Bodies as structs: each refusal names the field, the expected type or range, and the value found."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from localllm.server.errors import BadRequest
from localllm.server.structs import Body, ShortText, Wrong, read


class Inner(Body):
    name: str
    inner: list[Inner] = []

    def __post_init__(self) -> None:
        if self.name == "bad":
            raise Wrong("name", "is bad")


class Whole(Body):
    text: str = "d"
    whole: Annotated[int, Meta(ge=2, le=4)] = 3
    number: float | None = None
    flag: bool = False
    choice: Literal["", "x", "y"] = ""
    either: bool | Literal["high", "low"] | None = None
    inner: Inner | None = None
    texts: ShortText | Annotated[list[ShortText], Meta(max_length=2)] = "t"
    each: Annotated[list[Inner], Meta(min_length=1)] | None = None
    numbers: list[int] = []
    raw: dict[str, Any] = {}


def test_null_counts_as_missing_except_in_raw_values() -> None:
    nothing = read(dict.fromkeys(("text", "whole", "number", "flag", "inner", "texts", "numbers", "other")), Whole)
    assert nothing == Whole()
    found = read(
        {"raw": {"a": None, "b": 5.0}, "inner": {"name": "n", "inner": None}, "number": 3, "whole": 4.0}, Whole
    )
    assert (found.raw, found.inner, found.number) == ({"a": None, "b": 5.0}, Inner("n"), 3.0)
    assert (type(found.whole), type(found.raw["b"]), type(found.number)) == (int, float, float)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"text": 3}, "text: expected a text, got a number"),
        ({"text": "x", "whole": True}, "whole: expected a whole number, got true or false"),
        ({"whole": 2.5}, "whole: expected a whole number, got a number"),
        ({"whole": 1}, "whole: expected at least 2, got 1"),
        ({"whole": 5.0}, "whole: expected at most 4, got 5.0"),
        ({"whole": 10**400}, f"whole: expected at most 4, got 1{'0' * 39}..."),
        ({"number": "x"}, "number: expected a number, got a text"),
        ({"number": 10**400}, "number: expected a finite number"),
        ({"flag": 1}, "flag: expected true or false, got a number"),
        ({"choice": "z"}, "choice: expected one of x, y; got 'z'"),
        ({"choice": "` - at `$.text`"}, "choice: expected one of x, y; got '` - at `$.text`'"),
        ({"choice": []}, "choice: expected one of x, y, got a list"),
        ({"either": 5}, "either: expected true or false or one of high, low, got a number"),
        ({"inner": {}}, "inner.name: required, but missing"),
        ({"inner": {"name": None}}, "inner.name: required, but missing"),
        ({"inner": {"name": "bad"}}, "inner.name: is bad"),
        ({"inner": {"name": "n", "inner": [{"name": "n"}, {"name": "bad"}]}}, "inner.inner[1].name: is bad"),
        ({"texts": 5}, "texts: expected a text or a list, got a number"),
        ({"texts": ["a"] * 3}, "texts: has 3 items; the limit is 2"),
        ({"texts": ["a", "x" * 1001]}, "texts[1]: a text has 1001 characters; the limit is 1000"),
        ({"texts": ["a", None]}, "texts[1]: expected a text, got null"),
        ({"each": []}, "each: expected at least one item"),
        ({"each": [{"name": "n"}, 5]}, "each[1]: expected an object, got a number"),
        ({"numbers": [1, 5.0]}, "numbers[1]: expected a whole number, got a number"),
        ({"raw": []}, "raw: expected an object, got a list"),
    ],
)
def test_refusals_name_the_field(body: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(body, Whole)
    assert str(caught.value) == says
    assert caught.value.param == says.split(":")[0]
    with pytest.raises(BadRequest) as caught:
        read(body, Whole, "input[0]")
    assert str(caught.value) == f"input[0].{says}"
