"""Hostile GGUF files: any bytes give either a model or a one-line error that names the file and the field.

Opening takes little time and memory. The cases are built with `struct`, independently of localllm's GGUF writer.
"""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.base.errors import LocalLLMError
from localllm.base.printable import printable
from localllm.gguf import GGUFError, StringArray, open_gguf, write_gguf

U32, U64, STRING, ARRAY = 4, 10, 8, 9
HUGE = (1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def _text(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def _key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _array(name: str, kind: int, count: int, items: bytes = b"") -> bytes:
    return _key(name, ARRAY, struct.pack("<IQ", kind, count) + items)


def _tensor(name: str | bytes, sizes: tuple[int, ...], kind: int = 24, offset: int = 0, dimensions: int | None = None):
    count = len(sizes) if dimensions is None else dimensions
    return _text(name) + struct.pack(f"<I{len(sizes)}QIQ", count, *sizes, kind, offset)


def _file(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: int = 0,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
) -> bytes:
    counts = (len(tensors) if tensor_count is None else tensor_count, len(keys) if key_count is None else key_count)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data) if tensors else head


def _align(value: int) -> bytes:
    return _key("general.alignment", U32, struct.pack("<I", value))


I8 = _tensor("w", (32,))
CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "file: is empty"),
    "short magic": (b"GG", "magic: needs 4 bytes at offset 0, but the file ends at 2"),
    "other magic": (_file(magic=b"PK\3\4"), r"magic: b'PK\x03\x04' found; supported: b'GGUF'"),
    "no version": (b"GGUF\3\0", "version: needs 4 bytes at offset 4, but the file ends at 6"),
    "version 0": (_file(version=0), "version: 0 found; supported: 2 and 3"),
    "version 1": (_file(version=1), "version: 1 found; supported: 2 and 3"),
    "version 4": (_file(version=4), "version: 4 found; supported: 2 and 3"),
    "big endian": (_file(version=3 << 24), "version: 0x03000000 found: a big-endian file; supported: little-endian"),
    "no counts": (_file()[:12], "tensor count: needs 8 bytes at offset 8"),
    "tensors above limit": (_file(tensor_count=HUGE[0]), f"tensor count: {HUGE[0]} found; supported: at most 262144"),
    "keys above limit": (_file(key_count=HUGE[3]), f"key count: {HUGE[3]} found; supported: at most 65536"),
    "tensors above size": (_file(tensor_count=9), "tensor count: 9 found, which need 297 bytes at offset 16, but the"),
    "keys above size": (_file(key_count=3), "key count: 3 found, which need 42 bytes at offset 24, but the file ends"),
    "empty key": (_file((_key("", U32, bytes(9)),)), "name of key 0: length 0 found; supported: 1 to 65535 bytes"),
    "long key": (_file((_key("k" * 65536, U32, bytes(4)),)), "name of key 0: length 65536 found; supported: 1 to"),
    "key is not text": (_file((_key(b"a\xff\n", U32, bytes(4)),)), r"name of key 0: 'a\udcff\n' found, which is not"),
    "same key twice": (_file((_align(32), _align(32))), "key 'general.alignment': found twice"),
    "unknown value type": (_file((_key("a", 13, bytes(8)),)), "key 'a': value type 13 found; supported: 0 uint8, 1"),
    "unknown array type": (_file((_array("a", 77, 0),)), "key 'a': array of value type 77 found; supported: arrays of"),
    "nested array": (
        _file((_array("a", ARRAY, 1, bytes(12)),)),
        "key 'a': array of value type 9 found; supported: arr",
    ),
    "string past the end": (_file((_key("a", STRING, struct.pack("<Q", 99)),)), "key 'a': needs 99 bytes at offset 45"),
    "strings past the end": (
        _file((_array("a", STRING, 3, _text("x") + struct.pack("<Q", 9) + _text("yy")),)),
        "key 'a'[2]: does not fit: the file ends at 76",
    ),
    "scalar past the end": (_file((_key("ab", U64, bytes(7)),)), "key 'ab': needs 8 bytes at offset 38"),
    "alignment 0": (_file((_align(0),)), "key 'general.alignment': 0 found; supported: powers of two from 8"),
    "alignment 24": (_file((_align(24),)), "key 'general.alignment': 24 found; supported: powers of two from 8"),
    "alignment 4": (_file((_align(4),)), "key 'general.alignment': 4 found; supported: powers of two from 8"),
    "alignment is text": (_file((_key("general.alignment", STRING, _text("32")),)), "key 'general.alignment': str fou"),
    "alignment is uint64": (
        _file((_key("general.alignment", U64, struct.pack("<Q", 32)),)),
        "key 'general.alignment': uint64 found; supported: uint32",
    ),
    "strings above size": (_file((_array("a", STRING, 9),)), "key 'a': array length: 9 found, which need 72 bytes at"),
    "empty tensor name": (
        _file((), (_tensor("", (32, 1)),), 32),
        "name of tensor 0: length 0 found; supported: 1 to 63",
    ),
    "long tensor name": (_file((), (_tensor("n" * 64, (32,)),), 32), "name of tensor 0: length 64 found; supported: 1"),
    "same tensor twice": (_file((), (I8, _tensor("w", (32,), offset=32)), 64), "tensor 'w': found twice"),
    "no dimensions": (
        _file((), (_tensor("w", (1,), dimensions=0),), 32),
        "tensor 'w': 0 dimensions; supported: 1 to 4",
    ),
    "five dimensions": (_file((), (_tensor("w", (1,) * 5),), 32), "tensor 'w': 5 dimensions; supported: 1 to 4"),
    "no elements": (_file((), (_tensor("w", (32, 0)),), 32), "tensor 'w': shape (0, 32) has no elements"),
    "elements overflow": (
        _file((), (_tensor("w", (1 << 32, 1 << 32)),), 32),
        "tensor 'w': shape (4294967296, 42949672",
    ),
    "part of a block": (_file((), (_tensor("w", (33, 2), 2),), 99), "tensor 'w': rows of 33 values; Q4_0 needs a mult"),
    "unknown tensor type": (
        _file((), (_tensor("w", (32,), 999),), 32),
        "tensor 'w': tensor type 999 found, which is un",
    ),
    "removed tensor type": (
        _file((), (_tensor("w", (32,), 31),), 32),
        "tensor 'w': tensor type 31 found, which is uns",
    ),
    "misaligned": (
        _file((), (_tensor("w", (32,), offset=8),), 64),
        "tensor 'w': offset 8 is not a multiple of the file",
    ),
    "outside": (
        _file((), (_tensor("w", (32,), offset=64),), 64),
        "tensor 'w': 32 bytes at offset 64 of the data, which",
    ),
    "far outside": (
        _file((), (_tensor("w", (32,), offset=(1 << 64) - 32),), 64),
        "tensor 'w': 32 bytes at offset 1844",
    ),
    "overlapping": (
        _file((), (_tensor("w", (64,)), _tensor("v\x1b[2J", (32,), offset=32)), 64),
        r"tensor 'v\x1b[2J': offset 32 lies inside tensor 'w', which takes bytes 0 to 64",
    ),
    "overlapping in another order": (
        _file((), (_tensor("w", (32,), offset=32), _tensor("v", (64,))), 64),
        "tensor 'w': offset 32 lies inside tensor 'v', which takes bytes 0 to 64",
    ),
    "same place": (
        _file((), (_tensor("w", (32,)), _tensor("v", (32,))), 64),
        "tensor 'v': offset 0 lies inside tensor",
    ),
    "too large": (
        _file((), (_tensor("w", (1 << 40,)),), 64),
        "tensor 'w': 1099511627776 bytes at offset 0 of the data",
    ),
}
for _count in HUGE:
    _size = struct.pack("<Q", _count)
    CASES |= {
        f"string of {_count}": (_file((_key("a", STRING, _size),)), f"key 'a': needs {_count} bytes at offset 45"),
        f"{_count} strings": (_file((_array("a", STRING, _count),)), f"key 'a': array length: {_count} found; support"),
        f"{_count} numbers": (_file((_array("a", U64, _count),)), f"key 'a': array length: {_count} found, which need"),
        f"{_count} flags": (_file((_array("a", 7, _count),)), f"key 'a': array length: {_count} found, which need"),
        f"key of {_count}": (_file((_size + bytes(6),)), f"name of key 0: length {_count} found; supported: 1 to"),
        f"item of {_count}": (_file((_array("a", STRING, 1, _size),)), "key 'a'[0]: does not fit: the file ends at"),
        f"columns {_count}": (_file((), (_tensor("w", (_count,)),), 32), "tensor 'w': "),
    }


@pytest.mark.parametrize("name", CASES)
def test_hostile_file_is_one_line_that_names_file_and_field(tmp_path: Path, name: str) -> None:
    content, message = CASES[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError) as caught:
        open_gguf(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: {message}")
    assert text == printable(text, None)
    assert isinstance(caught.value, LocalLLMError)


def test_the_cases_are_one_change_away_from_files_that_open(tmp_path: Path) -> None:
    keys = (_align(64), _key("k" * 65535, U32, bytes(4)), _array("a", STRING, 2, _text("x") + _text("yy")))
    head = _file(keys, (), tensor_count=2, version=2)
    head += _tensor("v", (32,), offset=64) + _tensor("n" * 63, (32, 1, 1, 2), 2)
    path = tmp_path / "m.gguf"
    path.write_bytes(head + bytes(-len(head) % 64) + bytes(64 + 32))
    with open_gguf(path) as file:
        assert file.version == 2
        assert {t.shape for t in file.tensors.values()} == {(2, 1, 1, 32), (32,)}


def test_what_is_not_a_readable_file_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # a plain open would wait for a writer
    for name, problem in [
        ("none", "cannot be opened: No such file or directory"),
        (".", "is not a regular file"),
        ("pipe", "is not a regular file"),
        ("nul\0l", "cannot be opened: embedded null byte"),
    ]:
        with pytest.raises(GGUFError, match=f": file: {problem}"):
            open_gguf(tmp_path / name)


def test_a_name_with_a_line_break_stays_on_one_line(tmp_path: Path) -> None:
    with pytest.raises(GGUFError) as caught:
        open_gguf(tmp_path / "a\nb\x1b.gguf")
    assert str(caught.value) == printable(str(caught.value), None)


def test_a_failed_open_gives_its_descriptors_back(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(_file(version=9))
    before = set(os.listdir("/proc/self/fd"))
    errors = []  # kept, because dropping an error would free the objects in its frames
    for _ in range(3):
        with pytest.raises(GGUFError) as caught:
            open_gguf(tmp_path / "m.gguf")
        errors.append(caught.value)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_head_without_end_is_refused_at_once(tmp_path: Path) -> None:
    """A header with huge array lengths is refused without reading it.

    A sparse file of two terabytes makes the lengths plausible without taking disk space.
    """
    path = tmp_path / "m.gguf"
    for keys, problem in [
        ((_array("a", 0, 10**12),), r".* may take at most 268435456 bytes; the file is damaged"),
        (
            (_array("b", STRING, 9, bytes(72)), _array("a", STRING, 1 << 22)),
            r"4194304 found; supported: at most 419429",
        ),
    ]:
        path.write_bytes(_file(keys))
        os.truncate(path, 2 << 40)
        begin = time.perf_counter()
        with pytest.raises(GGUFError, match=f"key 'a': array length: {problem}"):
            open_gguf(path)
        assert time.perf_counter() - begin < 1


def _valid(folder: Path) -> bytes:
    """Return the bytes of a small valid file with every value type and a few tensor formats."""
    numbers = [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.float32, np.uint64, np.int64, np.float64]
    metadata = {
        "general.alignment": 64,
        "s": "text",
        "b": True,
        "ss": ["ab", "", "c" * 300, *"defghij"],
        "bb": np.array([True, False]),
        **{f"n{i}": number(i) for i, number in enumerate(numbers)},
        **{f"a{i}": np.arange(3).astype(number) for i, number in enumerate(numbers)},
    }
    tensors = [
        ("f", "F32", (3,), bytes(12)),
        ("q", "Q4_0", (2, 3, 32), bytes(108)),
        ("k", "Q6_K", (2, 256), bytes(420)),
        ("h", "F16", (2, 2, 2, 2), bytes(32)),
    ]
    write_gguf(folder / "valid.gguf", metadata, tensors)
    return (folder / "valid.gguf").read_bytes()


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return _valid(tmp_path_factory.mktemp("valid"))


def _opens(path: Path, content: bytes) -> bool:
    """Return whether the file opens, after reading all of it. Only a one-line GGUFError is allowed."""
    path.unlink(missing_ok=True)  # on some file systems, truncating takes milliseconds
    path.write_bytes(content)
    message = ""
    try:
        with open_gguf(path) as file:
            for value in file.metadata.values():
                if isinstance(value, StringArray):
                    assert value.to_list() == [value[i] for i in range(len(value))]
            for tensor in file.tensors.values():
                assert tensor.read(0, tensor.rows).nbytes == tensor.nbytes <= len(content)
    except GGUFError as error:
        message = str(error)
    assert not message or message.startswith(f"{path}: ")
    assert message == printable(message, None)
    return not message


def test_every_truncation_is_refused(valid: bytes, tmp_path: Path) -> None:
    assert _opens(tmp_path / "m.gguf", valid)
    needed = len(valid) - 32  # the last tensor has 32 bytes; 32 bytes of padding follow, which may be missing
    for size in range(needed):
        assert not _opens(tmp_path / "m.gguf", valid[:size]), size
    assert _opens(tmp_path / "m.gguf", valid[:needed])


def test_extreme_numbers_anywhere_are_harmless(valid: bytes, tmp_path: Path) -> None:
    head = len(valid) - 64 - 128 - 448 - 64
    assert valid[head - 100 : head].strip(b"\0")  # the header ends about here
    tracemalloc.start()
    for i, number in enumerate((0xFFFFFFFF.to_bytes(4, "little"), *(value.to_bytes(8, "little") for value in HUGE))):
        for place in range(i, head, 7):
            _opens(tmp_path / "m.gguf", valid[:place] + number + valid[place + len(number) :])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


EXTREME = st.sampled_from(
    [struct.pack("<Q", value) for value in HUGE] + [b"\xff" * 4, bytes(8), b"\x09\0\0\0", b"\x08"]
)
PLACE = st.floats(0, 1, exclude_max=True)
CHANGE = st.one_of(
    st.tuples(st.just("flip"), PLACE, st.integers(1, 255).map(lambda x: bytes([x]))),
    st.tuples(st.just("write"), PLACE, EXTREME | st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("insert"), PLACE, EXTREME | st.binary(min_size=1, max_size=40)),
    st.tuples(st.just("remove"), PLACE, st.binary(min_size=1, max_size=8)),
    st.tuples(st.just("cut"), PLACE, st.just(b"")),
)


def _changed(content: bytes, change: tuple[str, float, bytes]) -> bytes:
    kind, where, data = change
    place = int(where * (len(content) if kind == "cut" else min(len(content), 1400)))  # 1400 bytes cover the header
    match kind:
        case "flip":
            return content[:place] + bytes(a ^ data[0] for a in content[place : place + 1]) + content[place + 1 :]
        case "write":
            return content[:place] + data + content[place + len(data) :]
        case "insert":
            return content[:place] + data + content[place:]
        case "remove":
            return content[:place] + content[place + len(data) :]
    return content[:place]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "m.gguf"


@settings(max_examples=600, deadline=2000)
@given(version=st.sampled_from([2, 3]), changes=st.lists(CHANGE, min_size=1, max_size=4))
def test_damaged_files_open_or_are_refused(
    valid: bytes, scratch: Path, version: int, changes: list[tuple[str, float, bytes]]
) -> None:
    content = valid[:4] + struct.pack("<I", version) + valid[8:]
    for change in changes:
        content = _changed(content, change)
    tracemalloc.start()
    _opens(scratch, content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@settings(max_examples=200, deadline=2000)
@given(content=st.binary(max_size=200))
def test_noise_after_a_good_beginning_is_refused_or_opens(scratch: Path, content: bytes) -> None:
    _opens(scratch, b"GGUF\3\0\0\0" + struct.pack("<QQ", 1, 2) + content)
