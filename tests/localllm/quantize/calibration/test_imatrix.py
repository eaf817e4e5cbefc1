"""Importance matrices have llama.cpp's values for the same text, separate rows per expert, and two file formats."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from localllm import LocalLLMError, load
from localllm.cli.main import main
from localllm.evaluation import Windows, cut_windows
from localllm.gguf import NewTensor, write_gguf
from localllm.plan import Experts, Linear
from localllm.quantize.calibration.imatrix import Imatrix, ImatrixEntry, measure_imatrix, read_imatrix, write_imatrix
from localllm.quantize.calibration.observe import matrix_inputs
from localllm.quantize.jobs import metadata
from tests.conftest import reference
from tests.localllm.support import REPOSITORY
from tests.models.test_grove_moe import GROUP, WIDTH
from tests.models.test_grove_moe import model as grove_moe

SMALLTALK = REPOSITORY / "benchmarks" / "demo" / "smalltalk.txt"

# Sum and column 7 of the mean squares, by llama-imatrix of 2026-10-01 with -c 128 --chunks 8 on the same files.
LLAMA_CPP = {
    "blk.0.attn_k.weight": (254.951, 0.528198),
    "blk.0.attn_output.weight": (2279.51, 3.29557),
    "blk.0.ffn_down.weight": (4658.93, 3.03074),
    "blk.0.ffn_gate.weight": (334.624, 0.453397),
    "blk.3.attn_v.weight": (392.639, 0.782107),
    "blk.3.attn_output.weight": (3075.54, 6.8273),
    "blk.3.ffn_down.weight": (53778.6, 18.7028),
    "blk.3.ffn_up.weight": (581.653, 1.1217),
}


def test_the_model_in_the_box_gives_llama_cpp_s_numbers(tmp_path: Path) -> None:
    """Importance values equal llama.cpp's up to rounding.

    Both programs quantize activations to 8 bits, so single columns may differ by a percent.
    """
    target = tmp_path / "out.gguf"
    words = ["imatrix", "demo", "-f", str(SMALLTALK), "-o", str(target), "-c", "128", "--chunks", "8"]
    assert main(words) == 0
    found = read_imatrix(target)
    assert (len(found.entries), found.chunks, found.chunk_size) == (28, 8, 128)
    assert found.datasets == (str(SMALLTALK),)
    for name, (total, seventh) in LLAMA_CPP.items():
        values = found.importance(name, 1, found.entries[name].sums.shape[1])
        assert values is not None
        assert values.sum() == pytest.approx(total, rel=3e-3), name
        assert values[0, 7] == pytest.approx(seventh, rel=2e-2), name
    assert main(words) == 1  # refuses to overwrite the file
    # --process-output has no effect, because the output matrix is tied
    assert main([*words, "--force", "--process-output"]) == 0


@pytest.mark.parametrize("arch", ["llama-moe", "gpt-oss-moe", "qwen2moe-moe"])
def test_every_expert_counts_the_rows_it_got(arch: str) -> None:
    """Counts and mean squares of every expert on the CPU backend equal the reference backend's in float64."""
    path = reference("archs", f"{arch}.gguf")
    windows = Windows(np.random.RandomState(2).randint(0, 128, (2, 20)).astype(np.int32))
    found = []
    for backend in ("cpu", "reference"):
        with load(path, backend=backend, ctx_size=32, observe=True) as model:
            found.append(measure_imatrix(model, windows, output=True))
            assert model.plan is not None
            mixtures = [op for op in model.plan.operations if isinstance(op, Experts)]
    ours, theirs = found
    assert ours.entries.keys() == theirs.entries.keys()
    for name, entry in theirs.entries.items():
        np.testing.assert_array_equal(ours.entries[name].counts, entry.counts)
        np.testing.assert_allclose(ours.entries[name].sums, entry.sums, rtol=5e-3, atol=1e-6)
    for op in mixtures:
        for stack in (op.gate, op.up, op.down):
            assert theirs.entries[stack.weight.name].counts.sum() == op.used * 40
        layer = op.gate.weight.name.split("ffn_")[0]
        seen_by_all = theirs.entries[layer + "ffn_gate_inp.weight"].sums  # the router sees each hidden state once
        np.testing.assert_allclose(
            theirs.entries[op.gate.weight.name].sums.sum(axis=0), op.used * seen_by_all[0], rtol=1e-4
        )


def test_an_expert_that_others_share_counts_the_rows_of_each(tmp_path: Path) -> None:
    """Grove MoE runs an adjugate expert for each expert of its group.

    The adjugate expert's counts are the sums over the group.
    """
    metadata, tensors = grove_moe()
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata, [NewTensor(t.name, t.format, t.shape, t.rows) for t in tensors.values()])
    windows = Windows(np.random.RandomState(2).randint(0, 29, (2, 20)).astype(np.int32))
    with load(path, ctx_size=32, observe=True) as model:
        entries = measure_imatrix(model, windows).entries
    own, shared = (entries[f"blk.0.ffn_{part}.weight"] for part in ("gate_exps", "gate_chexps"))
    np.testing.assert_array_equal(shared.counts, own.counts.reshape(-1, GROUP).sum(axis=1))
    np.testing.assert_allclose(shared.sums, own.sums.reshape(-1, GROUP, WIDTH).sum(axis=1), rtol=1e-5)


def test_rows_of_a_matrix_that_is_read_in_parts_count_once() -> None:
    """phi3 stores Q, K and V as one matrix, which the plan splits. Each hidden state still counts once."""
    path = reference("archs", "phi3-dense.gguf")
    windows = Windows(np.random.RandomState(2).randint(0, 128, (2, 20)).astype(np.int32))
    with load(path, ctx_size=32, observe=True) as model:
        entries = measure_imatrix(model, windows, output=True).entries
        assert model.plan is not None
        parts = {op.weight.name for op in model.plan.operations if isinstance(op, Linear)}
    assert any("[" in name for name in parts)
    assert {int(e.counts[0]) for e in entries.values()} == {40}
    assert not any("[" in name for name in entries)


def test_windows_begin_with_bos(tmp_path: Path) -> None:
    """The first token of every window is replaced by BOS, if the vocabulary adds BOS."""
    path = reference("models", "stories260K-f32.gguf")
    with load(path, ctx_size=16, observe=True) as model:
        windows = cut_windows(model, "Once upon a time there was a big dog and a little cat. " * 4, 16)
        embedded = {tuple(np.round(inputs[0].x[0], 6)) for inputs in matrix_inputs(model, windows)}
    assert len(windows.tokens) > 3
    assert len(embedded) == 1


# -- files ---------------------------------------------------------------------------------------------------------

DENSE = ImatrixEntry(np.array([[2.0, 4.0, 8.0, 0.0]], np.float32), np.array([4]))
MIXED = ImatrixEntry(np.array([[1.0, 2.0], [0.0, 0.0]], np.float32), np.array([1, 0]))
BOTH = Imatrix({"blk.0.a.weight": DENSE, "blk.0.b.weight": MIXED}, 2, 2, ("wiki.txt",))


@pytest.mark.parametrize("name", ["a.gguf", "a.dat"])
def test_what_was_written_is_read(tmp_path: Path, name: str) -> None:
    write_imatrix(tmp_path / name, BOTH)
    found = read_imatrix(tmp_path / name)
    assert found.chunks == 2
    assert found.datasets == ("wiki.txt",)
    dense, mixed = found.importance("blk.0.a.weight", 1, 4), found.importance("blk.0.b.weight", 2, 2)
    assert dense is not None
    assert mixed is not None
    assert dense.tolist() == [[0.5, 1.0, 2.0, 0.0]]
    assert mixed.tolist() == [[1.0, 2.0], [1.0, 1.0]]  # without data, all columns weigh the same
    assert found.importance("blk.9.a.weight", 1, 4) is None


def test_the_older_format_by_hand(tmp_path: Path) -> None:
    """The .dat format by hand: entries with name, chunk count and values, then the total chunk count and the text's
    name. The total count and the name may be missing.
    """
    path = tmp_path / "a.dat"
    entry = struct.pack("<i", 1) + struct.pack("<i", 1) + b"x" + struct.pack("<ii2f", 4, 2, 8.0, 2.0)
    path.write_bytes(entry)
    values = read_imatrix(path).importance("x", 1, 2)
    assert values is not None
    assert values.tolist() == [[2.0, 0.5]]
    path.write_bytes(entry + struct.pack("<ii", 4, 3) + b"abc")
    assert (read_imatrix(path).chunks, read_imatrix(path).datasets) == (4, ("abc",))
    path.write_bytes(b"")
    with pytest.raises(LocalLLMError, match="not an importance matrix"):
        read_imatrix(path)


@pytest.mark.parametrize("name", ["a.gguf", "a.dat"])
def test_names_are_bytes(tmp_path: Path, name: str) -> None:
    """Dataset names may be invalid UTF-8, because they are file names."""
    write_imatrix(tmp_path / name, Imatrix({"x": DENSE}, 1, 1, ("wiki\udcff.txt",)))
    assert read_imatrix(tmp_path / name).datasets == ("wiki\udcff.txt",)


def test_a_number_of_windows_that_no_file_can_say_is_none(tmp_path: Path) -> None:
    """A chunk count that does not fit a uint32 is ignored, because quantize writes a uint32."""
    for chunks in (np.uint64(1 << 40), np.int32(-1)):
        write_gguf(tmp_path / "a.gguf", {"imatrix.chunk_count": chunks}, _tensors("x"), overwrite=True)
        found = read_imatrix(tmp_path / "a.gguf")
        assert found.chunks == 0
        assert "quantize.imatrix.chunks_count" not in metadata({}, None, found, "a.gguf")


def test_a_hostile_name_is_harmless_in_a_message(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", {}, _tensors("x\x1b[2J")[:1])
    with pytest.raises(LocalLLMError, match=r"x\\x1b\[2J needs in_sum2 and counts"):
        read_imatrix(tmp_path / "a.gguf")
    with pytest.raises(LocalLLMError, match=r"numbers for x\\x1b\[2J, which"):
        Imatrix({"x\x1b[2J": DENSE}, 1, 1).importance("x\x1b[2J", 1, 5)


def _tensors(name: str) -> list[NewTensor]:
    return [NewTensor(name + part, "F32", (1,), np.ones(1, "<f4").tobytes()) for part in (".in_sum2", ".counts")]


@pytest.mark.parametrize("cut_off", [3, 7, 9, 14, 20])
def test_a_cut_file_is_refused(tmp_path: Path, cut_off: int) -> None:
    path = tmp_path / "a.dat"
    write_imatrix(path, BOTH)
    path.write_bytes(path.read_bytes()[:-cut_off])
    with pytest.raises(LocalLLMError, match="truncated"):
        read_imatrix(path)


def test_what_is_no_importance_is_refused(tmp_path: Path) -> None:
    for sums in (np.array([[np.nan]], np.float32), np.array([[-1.0]], np.float32)):
        write_imatrix(tmp_path / "a.gguf", Imatrix({"x": ImatrixEntry(sums, np.array([1]))}, 1, 1), overwrite=True)
        with pytest.raises(LocalLLMError, match="negative numbers, NaN"):
            read_imatrix(tmp_path / "a.gguf")
    with pytest.raises(LocalLLMError, match="not an importance matrix"):
        read_imatrix(REPOSITORY / "models" / "demo" / "draft.gguf")
    with pytest.raises(LocalLLMError, match="made for another model"):
        BOTH.importance("blk.0.a.weight", 1, 5)


@pytest.mark.parametrize("count", [1e19, 3e38, -1e30, np.inf, np.nan])
@pytest.mark.filterwarnings("error")
def test_a_count_that_is_no_number_of_tokens_is_one_error(tmp_path: Path, count: float) -> None:
    """Token counts that do not fit an integer give one error, and no NumPy warning on stderr."""
    numbers = {"in_sum2": np.ones((1, 4), np.float32), "counts": np.full((1, 1), count, np.float32)}
    tensors = [NewTensor(f"x.weight.{name}", "F32", value.shape, value.tobytes()) for name, value in numbers.items()]
    write_gguf(tmp_path / "a.gguf", {"general.type": "imatrix"}, tensors)
    with pytest.raises(LocalLLMError, match="not a number of tokens"):
        read_imatrix(tmp_path / "a.gguf")
