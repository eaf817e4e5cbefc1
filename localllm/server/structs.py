"""The bodies of requests as structs, which declare each field with its type, range and default.

    class EmbedBody(Body):
        input: str
        dimensions: Annotated[int, Meta(ge=1)] | None = None

    read({"input": 5}, EmbedBody)  ->  BadRequest: input: expected a text, got a number

A field that is null counts as missing (except those in `NULLS`), and 5.0 is a whole number: several clients send both.
Unknown fields are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta, inspect

from localllm.base.printable import printable
from localllm.server.errors import BadRequest
from localllm.server.turn import Json

B = TypeVar("B", bound="Body")
Kinds = tuple[inspect.Type, ...]  # the types of a union, or one type
ITEMS = 100_000  # maximum length of a list
SHORT = 1000  # maximum characters of a search text, such as a stop string
MAX_INT = 2**31 - 1
MISSING = "required, but missing"

ShortText = Annotated[str, Meta(max_length=SHORT)]
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Strings = Annotated[list[str], Meta(max_length=ITEMS)]

_PATH = re.compile(r" - at `\$((?:\.\w+|\[\d+\])+)`$")  # msgspec's path of an invalid value
_NOUNS: dict[type, str] = {
    inspect.StrType: "a text",
    inspect.BoolType: "true or false",
    inspect.IntType: "a whole number",
    inspect.FloatType: "a number",
    inspect.ListType: "a list",
    inspect.DictType: "an object",
    inspect.StructType: "an object",
}
_FOUND: dict[type, str] = {
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


class Body(msgspec.Struct):
    """A JSON object of a request. `__post_init__` may raise `Wrong` for a field."""

    NULLS: ClassVar[tuple[str, ...]] = ()  # fields whose null differs from a missing field


class Wrong(ValueError):
    """An invalid field of a struct, found in its `__post_init__`. "": the struct itself."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def read(data: Json, kind: type[B], where: str = "") -> B:
    """Return an object as a struct; raise BadRequest for an invalid field. `where` is the path of the object."""
    try:
        return msgspec.convert(_fitted(data, kind), kind)
    except msgspec.ValidationError as error:
        found = _PATH.search(str(error))
        inner = found[1] if found else ""
        name, message = _explained(error, inner, data, kind)
    raise wrong(message, (where + inner).removeprefix("."), name)


def wrong(message: str, *path: str) -> BadRequest:
    """Return the error for an invalid field."""
    place = ".".join(filter(None, path))
    return BadRequest(f"{place}: {message}", place)


def listed(value: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the texts of a field that is one text or a list of texts."""
    return (value,) if isinstance(value, str) else tuple(value or ())


# -- before the conversion -------------------------------------------------------------------------------------------


@cache
def _described(kind: type[msgspec.Struct]) -> inspect.StructType:
    """Return the description of a struct and of all structs in it, which takes up to 20 ms to make."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return info


@cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, Kinds]:
    return {field.encode_name: _kinds(field.type) for field in _described(kind).fields}


def _kinds(kind: inspect.Type) -> Kinds:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _fitted(data: Json, kind: Any) -> Json:
    """Return the fields that are not null, with whole numbers as integers."""
    known = _fields(kind)
    given = {name: value for name, value in data.items() if value is not None or name in kind.NULLS}
    return {name: _fit(value, known.get(name, ())) for name, value in given.items()}


def _fit(value: Any, kinds: Kinds) -> Any:
    for kind in kinds:
        match kind:
            case inspect.StructType() if type(value) is dict:
                return _fitted(value, kind.cls)
            case inspect.ListType() if type(value) is list:
                inner = _kinds(kind.item_type)
                structs = any(isinstance(each, inspect.StructType) for each in inner)
                return [_fit(item, inner) for item in value] if structs else value
            case inspect.IntType() if type(value) is float and value.is_integer():
                return int(value)
    return value


# -- errors ----------------------------------------------------------------------------------------------------------


def _explained(error: msgspec.ValidationError, path: str, data: Any, kind: type[Body]) -> tuple[str, str]:
    """Return the name of the invalid field in the object at `path`, or "", and the problem."""
    if isinstance(error.__cause__, Wrong):
        return error.__cause__.name, str(error.__cause__)
    missing = re.match(r"Object missing required field `(\w+)`", str(error))
    if missing:
        return missing[1], MISSING
    kinds: Kinds = (_described(kind),)
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        if name:
            kinds = next(_fields(each.cls)[name] for each in kinds if isinstance(each, inspect.StructType))
            data = data[name]
        else:
            kinds = next(_kinds(each.item_type) for each in kinds if isinstance(each, inspect.ListType))
            data = data[int(index)]
    return "", next(filter(None, (_limit(each, data) for each in kinds)), "") or _mismatch(kinds, data)


def _mismatch(kinds: Kinds, value: Any) -> str:
    nouns = dict.fromkeys(_noun(each) for each in kinds if not isinstance(each, inspect.NoneType))
    return f"expected {' or '.join(nouns)}, got {_FOUND[type(value)]}"


def _noun(kind: inspect.Type) -> str:
    return _values(kind) if isinstance(kind, inspect.LiteralType) else _NOUNS[type(kind)]


def _values(kind: inspect.LiteralType) -> str:
    values = [str(each) for each in kind.values if each]
    return f"one of {', '.join(values)}" if len(values) > 1 else repr(values[0])


def _limit(kind: inspect.Type, value: Any) -> str:
    """Return how a value of the right type is out of range."""
    match kind, value:
        case inspect.LiteralType(), str():
            return f"expected {_values(kind)}; got {printable(value)!r}"
        case inspect.StrType(), str():
            return f"a text has {len(value)} characters; the limit is {kind.max_length}"
        case inspect.ListType(), list():
            return f"has {len(value)} items; the limit is {kind.max_length}" if value else "expected at least one item"
        case ((inspect.IntType() | inspect.FloatType()), (int() | float())) if type(value) is not bool:
            if kind.ge is not None and value < kind.ge:
                return f"expected at least {kind.ge}, got {printable(str(value), 40)}"
            if kind.le is not None and value > kind.le:
                return f"expected at most {kind.le}, got {printable(str(value), 40)}"
            if isinstance(kind, inspect.FloatType):
                return "expected a finite number"
    return ""
