"""Values that break programs (limits of integer types, odd floats, hostile texts), and random changes to
bytes and JSON.
"""

from __future__ import annotations

import json
import re
import struct
from random import Random
from typing import Any

INTEGERS = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 80, 96, 100, 127, 128, 129, 255, 256, 257, 1000),
    *(1024, 4096, 65535, 65536, 2**20 - 1, 2**20, 2**24, 2**24 + 1, 2**30, 2**31 - 1, 2**31, 2**32 - 1, 2**32),
    *(2**63 - 1, 2**64 - 1, -1, -2, -(2**31), -(2**63)),
)
FLOATS = (
    *(0.0, -0.0, 0.5, 1.0, -1.0, 1.001, 2.0, 1e-45, 1e-38, 1e-6, 1e6, 1e30, 3.4e38, 5e-324, 1e308, 10000.0),
    *(float("inf"), float("-inf"), float("nan")),
)
TEXTS = (
    *("", "\x1b[2J", "\x1b]0;title\x07", "\0", "a\nb", "\r", "\u2028", "\u202e", "\ud800", "x" * 5000, " " * 100),
    *("yarn", "longrope", "none", "linear", "gpt2", "llama", "default", "qwen2", "<|im_start|>", "<0x41>", "é", "🙂"),
    *("../../etc/passwd", "/dev/zero", "%s%n", "{0}", "[red]", "[/]"),
)


def integer(random: Random, old: int = 0) -> int:
    """Return a limit of an integer type, or a number near `old`."""
    if random.random() < 0.7:
        return random.choice(INTEGERS)
    return random.choice((old + 1, old - 1, old * 2, old * 3, old // 2, old + 64, -old))


def real(random: Random) -> float:
    return random.choice(FLOATS) if random.random() < 0.8 else random.uniform(-1e3, 1e3)


def text(random: Random) -> str:
    if random.random() < 0.8:
        return random.choice(TEXTS)
    return "".join(chr(random.randrange(0x250)) for _ in range(random.randrange(9)))


def stored(words: str) -> bytes:
    """Return UTF-8, which is invalid if the text requires it."""
    return words.encode("utf-8", "surrogatepass")


def damage(random: Random, data: bytes, head: int | None = None) -> bytes:
    """Change, insert, remove or truncate bytes, within the first `head` bytes if given."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        if len(changed) < 2:
            break
        at, how = random.randrange(min(head or len(changed), len(changed))), random.random()
        if how < 0.35:
            changed[at] = random.randrange(256)
        elif how < 0.75:
            size, value = random.choice((("<I", 2**32), ("<Q", 2**64), ("<H", 2**16)))
            new = struct.pack(size, random.choice(INTEGERS) % value)
            changed[at : at + len(new)] = new
        elif how < 0.85:
            del changed[at : at + random.choice((1, 4, 8, 100))]
        elif how < 0.95:
            changed[at:at] = changed[at : at + random.choice((1, 4, 8, 100))]
        else:
            del changed[at:]
    return bytes(changed)


def odd_json(random: Random) -> Any:
    """Return a value of any JSON type."""
    return random.choice(
        (
            lambda: integer(random),
            lambda: real(random),
            lambda: text(random),
            lambda: random.choice((None, True, False, [], {}, [1], [[]], {"type": "x"}, [None, "a"], "1", 1.5)),
            lambda: nested(random.choice((3, 50, 200))),
        )
    )()


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def change_json(random: Random, root: Any) -> str:
    """Change one place in a tree of dicts and lists. Return its path."""
    place, path = root, ""
    if not isinstance(root, dict | list):
        return "the whole is one value"
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return f"{path or '/'} was empty"
        key = random.choice(keys)
        child = place[key]
        if isinstance(child, dict | list) and child and random.random() < 0.85:
            place, path = child, f"{path}/{key}"
            continue
        how = random.random()
        if how < 0.2:
            del place[key]
            return f"{path}/{key} removed"
        if how < 0.3 and isinstance(place, dict):
            place[text(random)] = place.pop(key)
            return f"{path}/{key} renamed"
        if how < 0.4 and isinstance(place, list):
            place[key:key] = [child] * random.choice((1, 2, 1000))
            return f"{path}/{key} repeated"
        other = place[random.choice(keys)]
        same_type = type(child) is int and how < 0.7
        place[key] = integer(random, child) if same_type else other if how < 0.5 else odd_json(random)
        return f"{path}/{key} = {repr(place[key])[:60]}"


def json_text(random: Random, root: Any) -> bytes:
    """Return the tree as JSON. Sometimes add what a Python tree cannot hold: deep nesting, huge numbers,
    duplicate keys.
    """
    text = json.dumps(root)
    if random.random() < 0.9:
        return text.encode()
    places = [found.span() for found in re.finditer(r'"[^"\\]*"|-?\d+', text)]
    if not places:
        return text.encode()
    start, stop = random.choice(places)
    depth = random.choice((500, 100_000))
    new = random.choice(("[" * depth + "]" * depth, "1" * 5000, "1e999", "NaN", '"\\ud800"', '"a": 1, "a"', "{"))
    return (text[:start] + new + text[stop:]).encode()
