"""Request bodies: accepted JSON, and one-line refusals."""

from __future__ import annotations

import json

import pytest

from localllm.server.body import parse
from localllm.server.errors import BadRequest, TooLarge
from localllm.server.limits import ServerLimits

LIMITS = ServerLimits(depth=10, items=100)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 1}',
        b"\xef\xbb\xbf{}",
        b' \n{"a": [1, 2.5e3, "\\u00e9\\ud83d\\ude00", null, true]} ',
        '{"é": "日本"}'.encode(),
        b'{"a": {"a": {"a": 1}}, "b": {"a": 2}}',
    ],
)
def test_json_is_read_as_python_reads_it(body: bytes) -> None:
    assert parse(body, LIMITS) == json.loads(body.decode("utf-8-sig"))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body is empty"),
        (b" \n", "the body is empty"),
        (b"[]", "must be a JSON object"),
        (b"1", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"a": 1', "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a": 01}', "not valid JSON"),
        (b'{"a": "\n"}', "not valid JSON"),
        (b'{"a": "\\x"}', "not valid JSON"),
        (b'{"a": 1} x', "not valid JSON"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": [-Infinity]}', "-Infinity is not JSON"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": -1e400}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "5000 digits"),
        (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' occurs twice"),
        (b'{"x": {"a": 1, "a": 1}}', "the key 'a' occurs twice"),
        (b'{"a": "\\ud800"}', "an unpaired surrogate"),
        (b'{"\\udfff": 1}', "an unpaired surrogate"),
        (b'{"a": "\\ude00\\ud83d"}', "an unpaired surrogate"),
        (b'{"a": "\xff"}', "not UTF-8 (byte 7)"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        (b'{"a": ' + b"[" * 9 + b"[]" + b"]" * 9 + b"}", "nested more than 10 levels"),
        (b'{"a":' * 11 + b"1" + b"}" * 11, "nested more than 10 levels"),
        (b"[" * 50_000, "more than 100 values"),
    ],
)
def test_everything_else_is_refused(body: bytes, says: str) -> None:
    with pytest.raises((BadRequest, TooLarge)) as caught:
        parse(body, LIMITS)
    assert says in str(caught.value)


def test_deep_json_within_the_number_of_values_is_refused() -> None:
    with pytest.raises(BadRequest, match="nested more than 100 levels"):
        parse(b'{"a":' * 100_000, ServerLimits(items=10**6, objects=10**6))


def test_values_are_counted_without_the_commas_of_texts() -> None:
    text = ",[{:" * 1000
    assert parse(json.dumps({"a": text}).encode(), LIMITS) == {"a": text}
    assert parse(json.dumps({"a": '"' + "\\" + text + '\\"'}).encode(), LIMITS)["a"].startswith('"\\')
    with pytest.raises(TooLarge, match="more than 100 values"):
        parse(json.dumps({"a": [1] * 101}).encode(), LIMITS)


def test_objects_are_counted_without_the_braces_of_texts() -> None:
    limits = ServerLimits(objects=100)
    assert parse(json.dumps({"a": "{" * 1000}).encode(), limits) == {"a": "{" * 1000}
    assert len(parse(json.dumps({"a": [{}] * 99}).encode(), limits)["a"]) == 99
    with pytest.raises(TooLarge, match="more than 100 objects"):
        parse(json.dumps({"a": [{}] * 100}).encode(), limits)


@pytest.mark.parametrize(
    "unit", [b'"\\"', b'"', b'\\"', b'"\\\\"', b'{"a":', b"[", b'["', b",", b'{"a":1,', b'"\\u', b"\\ud800"]
)
@pytest.mark.parametrize("start", [b'{"a": "', b'{"a": ', b""])
def test_a_megabyte_of_anything_is_refused(unit: bytes, start: bytes) -> None:
    """Parsing takes linear time. A quadratic parser would need an hour for a megabyte of repeated bytes."""
    with pytest.raises((BadRequest, TooLarge)):
        parse(start + unit * (1_000_000 // len(unit)), ServerLimits(items=1000))
