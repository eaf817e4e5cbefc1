"""Metadata and tensors of a GGUF equal those read by gguf-py. Reading is fast, thread-safe, and needs
constant memory.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm import quant
from localllm.gguf import GGUFError, StringArray, open_gguf, write_gguf
from localllm.gguf.strings import scan_strings
from tests.conftest import reference

ORACLE_FILES = [  # gguf-py takes seconds to read 32,000 tokens, and half a minute for larger vocabularies
    "vocab/ggml-vocab-llama-spm.gguf",
    "models/stories260K-f32.gguf",
    "models/babyllama-969K-tok361-f32.gguf",
]


def _assert_equals_oracle(path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    oracle = gguf.GGUFReader(path)
    with open_gguf(path) as file:
        expected = {key: field for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
        assert list(file.metadata) == list(expected)
        for key, field in expected.items():
            value, stored, want = file.metadata[key], file.stored[key], field.contents()
            if isinstance(value, StringArray | np.ndarray):
                assert list(value) == want, key
            else:
                assert value == want, key
                assert type(value) is type(want), key
            if isinstance(stored, np.ndarray | np.generic) and stored.dtype != np.bool_:
                assert gguf.GGUFValueType[stored.dtype.name.upper()] == field.types[-1], key
        assert list(file.tensors) == [tensor.name for tensor in oracle.tensors]
        for want_tensor in oracle.tensors:
            tensor = file.tensors[want_tensor.name]
            assert tensor.format == want_tensor.tensor_type.name
            assert tensor.shape == tuple(want_tensor.shape.tolist()[::-1])
            assert tensor.nbytes == want_tensor.n_bytes
            assert tensor.read(0, tensor.rows).tobytes() == want_tensor.data.tobytes()


@pytest.mark.parametrize("name", ORACLE_FILES)
def test_equals_gguf_py(name: str) -> None:
    _assert_equals_oracle(reference(name))


def test_architectures_equal_gguf_py() -> None:
    paths = sorted(reference("archs").glob("*.gguf"))
    assert len(paths) >= 29
    for path in paths:
        _assert_equals_oracle(path)


def test_vocabulary_of_128k_tokens_opens_in_half_a_second() -> None:
    path = reference("vocab", "ggml-vocab-llama-bpe.gguf")
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        with open_gguf(path) as file:
            seconds.append(time.perf_counter() - begin)
    tokens, merges = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, StringArray)
    assert isinstance(merges, StringArray)
    assert (len(tokens), len(merges)) == (128256, 280147)
    assert tokens[128000] == "<|begin_of_text|>"
    assert merges[0] == "Ġ Ġ"
    assert min(seconds) < 0.5
    texts = tokens.to_list()  # a copy, which stays valid after the file is closed
    assert texts[9906] == "Hello"
    assert [tokens[i] for i in range(0, len(tokens), 1000)] == texts[::1000]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    data = np.arange(2 * 3 * 36, dtype=np.uint8)
    metadata = {
        "general.architecture": "llama",
        "text": ["a", "", "b"],
        "x": np.arange(3, dtype=np.int16),
        "y": np.array([True]),
    }
    write_gguf(path, metadata, [("w", "Q4_0", (2, 3, 64), data), ("b", "F32", (5,), bytes(range(20)))])
    return path


def test_rows_of_every_slice(small: Path) -> None:
    whole = np.arange(2 * 3 * 36, dtype=np.uint8).reshape(6, 36)
    with open_gguf(small) as file:
        tensor = file.tensors["w"]
        assert (tensor.shape, tensor.rows, tensor.row_bytes, tensor.nbytes) == ((2, 3, 64), 6, 36, 216)
        for start in range(7):
            for stop in range(start, 7):
                assert np.array_equal(tensor.read(start, stop), whole[start:stop])
        out = np.zeros((2, 4, 36), np.uint8)[1, 1:3]
        tensor.read_into(4, 6, out)
        assert np.array_equal(out, whole[4:6])
        assert file.tensors["b"].read(0, 1).tobytes() == bytes(range(20))
        assert file.size == small.stat().st_size
        assert (file.path, file.version) == (small, 3)


def test_a_value_that_is_not_finite_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.gguf.file._CHECKED_BYTES", 2 * 18)  # two rows at a time
    for row, scale in ((None, 0x3C00), (0, 0x7C00), (4, 0xFE00)):  # 1, infinity, NaN
        blocks = np.zeros((5, 18), np.uint8)
        if row is not None:
            blocks[row, :2] = np.array([scale], "<u2").view(np.uint8)
        write_gguf(tmp_path / f"{scale}.gguf", {"general.architecture": "llama"}, [("w", "Q4_0", (5, 32), blocks)])
        with open_gguf(tmp_path / f"{scale}.gguf") as file:
            if row is None:
                file.tensors["w"].check_finite()
                continue
            with pytest.raises(GGUFError, match=f"tensor 'w': row {row} has a value that is infinite or NaN"):
                file.tensors["w"].check_finite()


def test_a_read_in_many_system_calls(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.base.files.positioned._MOST", 5)  # bytes per system call; 2^30 in production
    with open_gguf(small) as file:
        assert file.tensors["w"].read(1, 4).tobytes() == bytes(range(36, 144))


def test_rows_outside_the_tensor_and_wrong_targets_are_refused(small: Path) -> None:
    with open_gguf(small) as file:
        tensor = file.tensors["w"]
        for start, stop in [(-1, 2), (0, 7), (3, 2), (2**62, 2**63)]:
            with pytest.raises(GGUFError, match=r"small.gguf: tensor 'w': rows .* requested; it has 6"):
                tensor.read(start, stop)
        for out in [np.zeros(35, np.uint8), np.zeros(9, np.float32), np.zeros((36, 2), np.uint8)[:, 0]]:
            with pytest.raises(GGUFError, match="needs a writable, contiguous uint8 array of 36 bytes"):
                tensor.read_into(0, 1, out)


def test_after_close_metadata_lives_and_reads_are_refused(small: Path) -> None:
    file = open_gguf(small)
    descriptors = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    file.close()
    file.close()
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) < descriptors
    assert list(file.metadata["text"]) == ["a", "", "b"]  # type: ignore[arg-type]
    with pytest.raises(GGUFError, match="the file was closed"):
        file.tensors["w"].read(0, 1)


def test_numbers_keep_their_type_and_cannot_be_changed(small: Path) -> None:
    with open_gguf(small) as file:
        x, y = file.metadata["x"], file.metadata["y"]
    for value, dtype in [(x, np.int16), (y, np.bool_)]:
        assert isinstance(value, np.ndarray)
        assert value.dtype == dtype
        with pytest.raises(ValueError, match="read-only"):
            value[0] = 1


def test_a_file_cut_while_open_is_an_error(small: Path) -> None:
    with open_gguf(small) as file:
        os.truncate(small, small.stat().st_size - 32)
        with pytest.raises(GGUFError, match="tensor 'b': cannot be read: the file was cut at"):
            file.tensors["b"].read(0, 1)


def test_single_rows_are_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathering single rows works with and without the system call for read-ahead hints."""
    data = np.random.default_rng(0).integers(0, 256, (2000, 34), dtype=np.uint8)
    write_gguf(tmp_path / "t.gguf", {}, [("v", "I8", (7,), bytes(7)), ("w", "Q8_0", (2000, 32), data)])
    rows = np.array([0, 3, 4, 1024, 1999])
    with open_gguf(tmp_path / "t.gguf") as file:
        np.testing.assert_array_equal(file.tensors["w"].gather(rows), data[rows])
        assert file.tensors["w"].gather(rows[:0]).shape == (0, 34)
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
        np.testing.assert_array_equal(file.tensors["w"].gather(rows), data[rows])
        for outside in ([-1, 3], [5, 2000]):
            with pytest.raises(GGUFError, match=r"tensor 'w': rows .* requested; it has 2000"):
                file.tensors["w"].gather(np.array(outside))
        os.truncate(tmp_path / "t.gguf", (tmp_path / "t.gguf").stat().st_size - 100)
        with pytest.raises(GGUFError, match="tensor 'w': cannot be read: the file was cut at"):
            file.tensors["w"].gather(rows)
    with pytest.raises(GGUFError, match="the file was closed"):
        file.tensors["w"].gather(rows)


def test_threads_read_the_same_bytes(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, (2000, 34), dtype=np.uint8)
    write_gguf(tmp_path / "t.gguf", {}, [("w", "Q8_0", (2000, 32), data)])
    with open_gguf(tmp_path / "t.gguf") as file, ThreadPoolExecutor(8) as pool:
        ranges = [(i % 1990, i % 1990 + 1 + i % 7) for i in range(0, 20000, 17)]
        for (start, stop), rows in zip(ranges, pool.map(lambda r: file.tensors["w"].read(*r), ranges), strict=True):
            assert np.array_equal(rows, data[start:stop])


def _resident_file_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile"):
            return int(line.split()[1])
    pytest.skip("the kernel does not tell RssFile")


def test_nothing_of_a_file_is_mapped(tmp_path: Path) -> None:
    chunk = np.full((1024, 4096), 7, np.uint8)
    write_gguf(tmp_path / "big.gguf", {}, [("w", "I8", (16 * 1024, 4096), lambda: (chunk for _ in range(16)))])
    with open_gguf(tmp_path / "big.gguf") as file:
        tensor = file.tensors["w"]
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
        before = _resident_file_kib()
        for start in range(0, tensor.rows, 1024):
            tensor.read_into(start, start + 1024, chunk)
        assert _resident_file_kib() - before < 4 * 1024


def test_every_known_format_is_sized_by_the_format_table(tmp_path: Path) -> None:
    tensors = [
        (fmt.name, fmt.name, (3, 2 * fmt.block_values), bytes(6 * fmt.block_bytes)) for fmt in quant.FORMATS.values()
    ]
    write_gguf(tmp_path / "all.gguf", {}, tensors)
    with open_gguf(tmp_path / "all.gguf") as file:
        for name, tensor in file.tensors.items():
            assert tensor.format == name
            assert tensor.read(1, 3).shape == (2, 2 * quant.FORMATS[name].block_bytes)


def _stored(strings: list[bytes]) -> bytes:
    return b"".join(len(s).to_bytes(8, "little") + s for s in strings)


STRINGS = st.one_of(
    st.binary(max_size=12), st.sampled_from([b"", bytes(20), b"a" * 256, b"\xff\xfe", bytes(300), b"xy"])
)


@settings(max_examples=80, deadline=None)
@given(
    head=st.lists(STRINGS, max_size=20),
    repeat=st.sampled_from([1, 2, 150]),
    tail=st.lists(STRINGS, max_size=5),
    before=st.binary(max_size=9),
    after=st.binary(max_size=20),
)
def test_strings_of_any_bytes_are_found_and_decoded(
    head: list[bytes], repeat: int, tail: list[bytes], before: bytes, after: bytes
) -> None:
    strings = head * repeat + tail
    stored = _stored(strings)
    data = before + stored + after
    bounds = scan_strings(data, len(before), len(data), len(strings))
    assert isinstance(bounds, np.ndarray)
    array = StringArray(data, bounds)
    want = [s.decode("utf-8", "surrogateescape") for s in strings]
    assert array.to_list() == want
    assert array[:] == want
    assert array.stored() == stored
    for cut in range(min(len(stored), 12)):  # for every truncation, the scan returns the index of the cut string
        end = len(before) + len(stored) - 1 - cut
        last = scan_strings(data, len(before), end, len(strings))
        sizes = np.cumsum([8 + len(s) for s in strings])
        assert last == int(np.searchsorted(sizes, end - len(before), side="right"))


def test_string_array_is_a_sequence(small: Path) -> None:
    with open_gguf(small) as file:
        text = file.metadata["text"]
    assert isinstance(text, StringArray)
    assert (text[0], text[-1], text[1:], len(text), "b" in text) == ("a", "b", ["", "b"], 3, True)
    with pytest.raises(IndexError):
        text[3]
