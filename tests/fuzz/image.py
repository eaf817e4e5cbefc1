"""A GGUF as editable parts, which are read from a valid file, changed, and written without any check.

The module is independent of `localllm.gguf`, because the reader under test must not generate its own test files.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

BOOL, STRING, ARRAY = 7, 8, 9
INTEGER_TYPES = {0: ("B", 8), 1: ("b", 8), 2: ("H", 16), 3: ("h", 16), 4: ("I", 32), 5: ("i", 32), 7: ("B", 8)}
INTEGER_TYPES |= {10: ("Q", 64), 11: ("q", 64)}
FLOAT_TYPES = {6: "f", 12: "d"}


class Array(NamedTuple):
    kind: int
    items: list[Any]


class Key(NamedTuple):
    name: bytes
    kind: int
    value: Any


class Entry(NamedTuple):
    """A tensor's entry in the header. `sizes` are stored innermost dimension first."""

    name: bytes
    sizes: tuple[int, ...]
    kind: int
    offset: int


@dataclass
class Image:
    keys: list[Key] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    data: bytes = b""
    version: int = 3
    counts: tuple[int, int] | None = None  # tensor and key counts to write; None: the true counts

    def copy(self) -> Image:
        return replace(self, keys=list(self.keys), entries=list(self.entries))

    def get(self, name: str) -> Any:
        return next((key.value for key in self.keys if key.name == name.encode()), None)

    def set(self, name: str, kind: int, value: Any) -> None:
        key = Key(name.encode(), kind, value)
        for at, old in enumerate(self.keys):
            if old.name == key.name:
                self.keys[at] = key
                return
        self.keys.append(key)

    def add(self, name: str, shape: tuple[int, ...], kind: int, data: bytes) -> None:
        """Append a tensor."""
        self.entries.append(Entry(name.encode(), shape[::-1], kind, len(self.data)))
        self.data += data + bytes(-len(data) % 32)

    def head(self) -> bytes:
        tensors, keys = self.counts or (len(self.entries), len(self.keys))
        parts = [b"GGUF", struct.pack("<IQQ", self.version % 2**32, tensors % 2**64, keys % 2**64)]
        for key in self.keys:
            parts += [_text(key.name), struct.pack("<I", key.kind), _value(key.kind, key.value)]
        for entry in self.entries:
            sizes = (n % 2**64 for n in entry.sizes)
            parts += [_text(entry.name), struct.pack(f"<I{len(entry.sizes)}Q", len(entry.sizes), *sizes)]
            parts.append(struct.pack("<IQ", entry.kind % 2**32, entry.offset % 2**64))
        return b"".join(parts)

    def encode(self) -> bytes:
        head = self.head()
        return head + bytes(-len(head) % 32) + self.data


def decode(data: bytes) -> Image:
    """Parse a whole file with an alignment of 32."""
    at = 24

    def take(form: str) -> Any:
        nonlocal at
        found = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return found[0] if len(found) == 1 else found

    def text() -> bytes:
        size = take("Q")
        return bytes(take(f"{size}s")) if size else b""

    def value(kind: int) -> Any:
        if kind == STRING:
            return text()
        if kind == ARRAY:
            inner, count = take("IQ")
            return Array(inner, [value(inner) for _ in range(count)])
        return take(FLOAT_TYPES[kind] if kind in FLOAT_TYPES else INTEGER_TYPES[kind][0])

    version, tensors, keys = struct.unpack_from("<IQQ", data, 4)
    image = Image(version=version)
    for _ in range(keys):
        name, kind = text(), take("I")
        image.keys.append(Key(name, kind, value(kind)))
    for _ in range(tensors):
        name, dimensions = text(), take("I")
        sizes = tuple(take("Q") for _ in range(dimensions))
        image.entries.append(Entry(name, sizes, *take("IQ")))
    image.data = data[at + -at % 32 :]
    return image


def _text(words: bytes) -> bytes:
    return struct.pack("<Q", len(words)) + words


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind == ARRAY:
        items = b"".join(_value(value.kind, item) for item in value.items)
        return struct.pack("<IQ", value.kind, len(value.items)) + items
    if kind in FLOAT_TYPES:
        try:
            return struct.pack("<" + FLOAT_TYPES[kind], value)
        except OverflowError:
            return struct.pack("<" + FLOAT_TYPES[kind], float("inf"))
    bits = INTEGER_TYPES[kind][1]
    number = (int(value) if value == value and abs(value) < 1e300 else 0) % 2**bits
    return number.to_bytes(bits // 8, "little")
