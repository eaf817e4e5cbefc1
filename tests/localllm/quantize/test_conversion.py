"""`localllm quantize`: files equal llama-quantize's byte for byte, with any number of threads, and are never
partial.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pytest

from localllm import quant
from localllm.cli.main import main
from localllm.gguf import GGUFError, NewTensor, open_gguf, write_gguf
from localllm.quant.mixes import MixOptions, find
from localllm.quantize import conversion as module
from localllm.quantize.calibration.imatrix import Imatrix, ImatrixEntry, write_imatrix
from localllm.quantize.conversion import ConversionSettings, Error, conversion
from localllm.quantize.jobs import QuantizeError, given_jobs, metadata, plan_jobs
from localllm.quantize.source import default_target, geometry_of
from tests.localllm.support import REPOSITORY, default_signals

# SHA-256 of the files that llama-quantize of 2026-10-01 writes for models/demo/demo.gguf, with --allow-requantize TYPE.
LLAMA_QUANTIZE = {
    "Q2_K": "83084587ef8d9e6d",
    "Q3_K_M": "fb70567c0e6171b1",
    "Q4_K_M": "93b63f0d4aa84616",
    "Q5_K_S": "b59b1bf5ad33ff54",
}
PURE = {  # with --pure
    "Q4_0": "ce98d3ef953f2982",
    "Q5_1": "2e79d6ef830c8143",
    "TQ2_0": "8b53f09b066cafdb",
    "F32": "ebf1d33bb0569774",
    "BF16": "2dea7327de1c3410",
    "MXFP4_MOE": "12126a029c840b31",
    "COPY": "93b63f0d4aa84616",
}
ROWS, COLUMNS = 1100, 512  # more rows than two processing chunks


def write_source(path: Path, **tensors: np.ndarray) -> Path:
    values = tensors or {"blk.0.ffn_up.weight": np.random.RandomState(3).standard_normal((ROWS, COLUMNS))}
    new = []
    for name, value in values.items():
        rows = np.atleast_2d(value.reshape(-1, value.shape[-1])).astype(np.float32)
        new.append(NewTensor(name, "F32", value.shape, quant.quantize(rows, "F32")))
    keys = {"general.architecture": "llama", "llama.block_count": 1, "llama.attention.head_count": 8}
    write_gguf(path, keys, new)
    return path


def run(source: Path, target: Path, formats: dict[str, str], **how: object) -> None:
    with open_gguf(source) as file:
        jobs = given_jobs(file, formats)
        with conversion(jobs, file.tensors, ConversionSettings(**({"threads": 2} | how))) as tensors:  # type: ignore[arg-type]
            write_gguf(target, metadata(file.stored, None, None, ""), tensors)


# -- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*LLAMA_QUANTIZE, *PURE])
def test_whole_files_are_those_of_llama_quantize(kind: str, tmp_path: Path) -> None:
    """Whole files equal llama-quantize's for the demo model: metadata, tensor order, padding, and every block."""
    target = tmp_path / "out.gguf"
    pure = ["--pure"] if kind in PURE else []
    assert main(["quantize", "demo", str(target), kind.lower(), "--allow-requantize", *pure]) == 0
    assert hashlib.sha256(target.read_bytes()).hexdigest()[:16] == {**LLAMA_QUANTIZE, **PURE}[kind]


def test_a_type_may_be_said_by_its_number(tmp_path: Path) -> None:
    assert main(["quantize", str(write_source(tmp_path / "a.gguf")), "7"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a-Q8_0.gguf", "a.gguf"]


def test_the_digest_that_is_printed_is_that_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.gguf"
    assert main(["quantize", "demo", str(target), "F16", "--allow-requantize"]) == 0
    out = capsys.readouterr().out
    assert f"sha256 {hashlib.sha256(target.read_bytes()).hexdigest()}\n" in out
    assert "6.73 MiB -> 21.02 MiB, 16.01 bits per weight (F16)" in out


@pytest.mark.parametrize("threads", [1, 3])
def test_every_row_is_there_once_whatever_the_threads(threads: int, tmp_path: Path) -> None:
    source, target = write_source(tmp_path / "a.gguf"), tmp_path / "b.gguf"
    assert ROWS * COLUMNS > 2 * module.CHUNK
    run(source, target, {"blk.0.ffn_up.weight": "Q5_0"}, threads=threads)
    with open_gguf(source) as before, open_gguf(target) as after:
        tensor = after.tensors["blk.0.ffn_up.weight"]
        values = before.tensors["blk.0.ffn_up.weight"].read(0, ROWS).view("<f4")
        np.testing.assert_array_equal(tensor.read(0, ROWS), quant.quantize(values, "Q5_0"))


def test_every_expert_is_quantized_by_its_own_importance(tmp_path: Path) -> None:
    random = np.random.RandomState(5)
    name, stack = "blk.0.ffn_up_exps.weight", random.standard_normal((3, 8, 64)).astype(np.float32)
    weights = random.random_sample((3, 64)).astype(np.float32)
    imatrix = Imatrix({name: ImatrixEntry(weights, np.ones(3, np.int64))}, 1, 1)
    source, target = write_source(tmp_path / "a.gguf", **{name: stack}), tmp_path / "b.gguf"
    run(source, target, {name: "Q4_0"}, imatrix=imatrix)
    with open_gguf(target) as file:
        rows = file.tensors[name].read(0, 24).reshape(3, 8, -1)
    for expert in range(3):
        np.testing.assert_array_equal(rows[expert], quant.quantize(stack[expert], "Q4_0", weights[expert]))
    assert (rows[0] != quant.quantize(stack[0], "Q4_0", weights[1])).any()


def test_a_split_model_becomes_one_file(tmp_path: Path) -> None:
    for part, name in enumerate(("output_norm.weight", "blk.0.ffn_up.weight")):
        keys = {"split.no": np.uint16(part), "split.count": np.uint16(2), "split.tensors.count": np.int32(2)}
        values = np.full((4, 64), part, np.float32) if part else np.ones((1, 64), np.float32)
        shape = values.shape if part else (64,)
        new = [NewTensor(name, "F32", shape, values.view(np.uint8))]
        write_gguf(tmp_path / f"m-0000{part + 1}-of-00002.gguf", {"general.architecture": "llama", **keys}, new)
    assert main(["quantize", str(tmp_path / "m-00001-of-00002.gguf"), "Q8_0"]) == 0
    with open_gguf(tmp_path / "m-Q8_0.gguf") as file:
        assert {name: tensor.format for name, tensor in file.tensors.items()} == {
            "output_norm.weight": "F32",
            "blk.0.ffn_up.weight": "Q8_0",
        }
        assert list(file.metadata) == ["general.architecture", "general.quantization_version", "general.file_type"]


def test_metadata_says_what_was_done_in_llama_quantize_s_order() -> None:
    stored = {"general.file_type": np.uint32(1), "general.name": "x", "quantize.imatrix.file": "old"}
    imatrix = Imatrix({"a": ImatrixEntry(np.ones((1, 2), np.float32), np.ones(1, np.int64))}, 7, 512, ("text", "other"))
    found = metadata(stored, 15, imatrix, "é" * 100)
    assert list(found.items()) == [
        ("general.name", "x"),
        ("general.quantization_version", 2),
        ("general.file_type", 15),
        ("quantize.imatrix.file", "é" * 63),  # truncated to 127 bytes, at a character boundary
        ("quantize.imatrix.dataset", "text"),
        ("quantize.imatrix.entries_count", 1),
        ("quantize.imatrix.chunks_count", 7),
    ]


def test_errors_are_measured_against_what_was_read(tmp_path: Path) -> None:
    name, random = "blk.0.ffn_up.weight", np.random.RandomState(5)
    x = random.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    weights = random.random_sample(COLUMNS).astype(np.float32)
    errors: dict[str, Error] = {}
    imatrix = Imatrix({name: ImatrixEntry(weights[None], np.ones(1, np.int64))}, 1, 1)
    run(
        write_source(tmp_path / "a.gguf", **{name: x}),
        tmp_path / "b.gguf",
        {name: "Q4_0"},
        imatrix=imatrix,
        errors=errors,
    )
    missed = quant.dequantize(quant.quantize(x, "Q4_0", weights), "Q4_0") - x
    found = errors[name]
    assert found.rmse == pytest.approx(np.sqrt(np.mean(missed.astype(np.float64) ** 2)), rel=1e-6)
    assert found.relative == pytest.approx(np.linalg.norm(missed) / np.linalg.norm(x), rel=1e-5)
    assert found.weighted == pytest.approx(np.sqrt((missed**2 @ weights).sum() / (x**2 @ weights).sum()), rel=1e-5)
    assert found.largest == np.abs(missed).max()


def test_a_file_s_own_numbers_decide_what_the_rules_look_at() -> None:
    stored = {
        "general.architecture": "lfm2",
        "lfm2.block_count": np.uint32(9),
        "lfm2.attention.head_count": np.uint32(8),
        "lfm2.attention.head_count_kv": np.array([0, 0, 2], np.int32),
    }
    found = geometry_of(stored)
    assert (found.layers, found.heads, found.kv_heads, found.experts, found.group) == (9, 8, 0, 0, 0)


def test_the_default_name_has_the_new_type_for_the_old_one(tmp_path: Path) -> None:
    for name in ("m-F16.gguf", "m.bf16.gguf", "m-q4_k_m.gguf", "m.gguf", "m", "m-F32-00001-of-00003.gguf"):
        assert default_target(tmp_path / name, "Q6_K") == tmp_path / "m-Q6_K.gguf"


# -- failures ---------------------------------------------------------------------------------------------------------


def fails(words: list[object], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one-line error of a command that fails."""
    assert main(["quantize", *map(str, words)]) in (1, 2)
    said = capsys.readouterr()
    assert (said.out, said.err[:7], said.err.count("\n")) == ("", "error: ", 1)
    return said.err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["a.gguf"], "expected IN [OUT] TYPE: a model"),
        (["a.gguf", "b", "c", "Q8_0"], "expected IN [OUT] TYPE: a model"),
        (["a.gguf", "Q9_K"], "unknown type 'Q9_K'; known: F32"),
        (["a.gguf", "99"], "unknown type '99'; known: F32"),
        (["none.gguf", "Q8_0"], "No such file: none.gguf; did you mean old.gguf?"),
        (["a.gguf", "a.gguf", "Q8_0", "--force"], "a.gguf: this file is being read; give the output another name"),
        (["a.gguf", "old.gguf", "Q8_0"], "old.gguf: exists; give another name, or --force"),
        (["a.gguf", "no/folder.gguf", "Q8_0"], "no such folder: no; create it first"),
        (["a.gguf", "Q8_0", "--tensor-type", "ffn"], "'ffn' is not of the form REGEX=FORMAT"),
        (["a.gguf", "Q8_0", "--tensor-type", "(=Q8_0"], "'(' is not a regular expression"),
        (["a.gguf", "Q8_0", "--tensor-type", "x=Q4_K_M"], "unknown format 'Q4_K_M'; formats are F32,"),
        (["a.gguf", "Q8_0", "--output-tensor-type", "I8"], "--output-tensor-type: unknown format 'I8'"),
        (["a.gguf", "Q8_0", "--imatrix", "none.dat"], "none.dat: No such file"),
        (["a.gguf", "Q8_0", "--imatrix", "a.gguf"], "a.gguf: not an importance matrix"),
        (["a.gguf", "Q8_0", "--imatrix", "auto"], "--imatrix auto needs a text to measure on; give one with -f FILE"),
        (["a.gguf", "Q8_0", "--method", "gptq"], "--method gptq needs a text to measure on"),
        (["a.gguf", "Q8_0", "--method", "magic"], "'magic' is not one of awq, gptq"),
        (["a.gguf", "--fit", "6 apples"], "'6 apples' is not a size like 6GB"),
        (["a.gguf", "--max-kld", "-1"], "'-1' is not a number above 0"),
        (["a.gguf", "IQ2_XS"], "blk.0.ffn_up.weight: IQ2_XS requires an importance matrix"),
        (["a.gguf", "Q1_0"], "blk.0.odd.weight': rows of 96 values do not fill blocks of 128, and Q1_0"),
        (["demo", "x.gguf", "Q4_0"], "already quantized (Q4_K), and quantizing twice loses more"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    words: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_source(
        tmp_path / "a.gguf", **{"blk.0.ffn_up.weight": np.ones((4, 256)), "blk.0.odd.weight": np.ones((4, 96))}
    )
    (tmp_path / "old.gguf").write_text("mine")
    assert line in fails(list(words), capsys)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gguf", "old.gguf"]
    assert (tmp_path / "old.gguf").read_text() == "mine"


@pytest.mark.parametrize(
    ("bad", "kind", "line"),
    [
        (np.nan, "Q8_0", r"blk.0.ffn_up.weight, from row 1024 on: Q8_0: row 66 holds NaN or infinity"),
        (np.inf, "F16", "blk.0.ffn_up.weight: row 1090 holds NaN or infinity"),
        (1e6, "F16", "blk.0.ffn_up.weight: row 1090 holds numbers above F16's range; use BF16 or F32"),
    ],
)
def test_numbers_that_cannot_be_stored_leave_no_file(
    bad: float, kind: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.ones((ROWS, COLUMNS))
    x[1090, 7] = bad
    source = write_source(tmp_path / "a.gguf", **{"blk.0.ffn_up.weight": x})
    assert line in fails([source, kind], capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


def test_ctrl_c_leaves_no_file(tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    source = write_source(tmp_path / "a.gguf")
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "b.gguf", {"blk.0.ffn_up.weight": "Q8_0"}, progress=interrupt)
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


def test_being_told_to_end_leaves_no_file(tmp_path: Path) -> None:
    """SIGTERM during a write leaves no file. The source is a large sparse file, so that writing takes a while."""
    source, out = tmp_path / "a.gguf", tmp_path / "out"
    out.mkdir()
    shape = (1 << 18, 4096)
    zeros = np.zeros((1 << 8, 4096), np.uint16).view(np.uint8)
    write_gguf(source, {"general.architecture": "llama"}, [NewTensor("x.weight", "F16", (1 << 8, 4096), zeros)])
    head = bytearray(source.read_bytes()[: source.stat().st_size - zeros.nbytes])
    at = head.index((1 << 8).to_bytes(8, "little"), head.index(b"x.weight") + 12)
    head[at : at + 8] = shape[0].to_bytes(8, "little")
    source.write_bytes(head)
    os.truncate(source, len(head) + 2 * shape[0] * shape[1])
    words = [sys.executable, "-m", "localllm", "quantize", str(source), str(out / "b.gguf"), "Q5_0"]
    end = monotonic() + 60
    with subprocess.Popen(words, stderr=subprocess.PIPE, cwd=REPOSITORY, preexec_fn=default_signals) as process:
        while process.poll() is None and not list(out.iterdir()) and monotonic() < end:
            sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert list(out.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_no_file(tmp_path: Path) -> None:
    """A file size limit simulates a full disk."""
    source = write_source(tmp_path / "a.gguf")
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))\n"
        "from localllm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", code, "quantize", str(source), "Q8_0"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=REPOSITORY, timeout=60)
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path / 'a-Q8_0.gguf'}: cannot be written: File too large\n"
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


def test_an_imatrix_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "blk.0.ffn_up.weight"
    write_imatrix(
        tmp_path / "i.gguf", Imatrix({name: ImatrixEntry(np.ones((1, 100), np.float32), np.ones(1, np.int64))}, 1, 1)
    )
    source = write_source(tmp_path / "a.gguf")
    said = fails([source, "Q4_0", "--imatrix", tmp_path / "i.gguf"], capsys)
    assert f"1 x 100 numbers for {name}, which needs 1 x {COLUMNS}; it was made for another model" in said


# -- options -------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_be_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_source(
        tmp_path / "a.gguf", **{"blk.0.ffn_up.weight": np.ones((4, 288)), "output_norm.weight": np.ones(288)}
    )
    assert main(["quantize", str(source), "IQ2_XS", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "| blk.0.ffn_up.weight | 4 x 288 | F32  | IQ4_NL (rows do not fit IQ2_XS) |" in said.out
    assert "5.62 KiB -> 1.76 KiB, 10.00 bits per weight (IQ4_NL)" in said.out
    assert "imatrix" not in said.err
    assert main(["quantize", "demo", "Q4_0", "--dry-run"]) == 0
    assert capsys.readouterr().err.endswith("or add --allow-requantize\n")  # the command line's spelling, not Python's
    assert main(["quantize", "demo", "Q2_K_S", "--dry-run"]) == 0
    assert "note: this type needs --imatrix FILE, or --imatrix auto" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


def test_formats_asked_for_by_name_are_what_is_written(tmp_path: Path) -> None:
    target = tmp_path / "b.gguf"
    words = ["--tensor-type", r"ffn_(up|gate)=q5_1", "--tensor-type", "blk.0=Q8_0", "--token-embedding-type", "bf16"]
    assert main(["quantize", "demo", str(target), "Q4_0", "--allow-requantize", *words]) == 0
    with open_gguf(target) as file:
        found = {name: file.tensors[name].format for name in file.tensors}
    assert found["token_embd.weight"] == "BF16"
    assert found["blk.0.ffn_up.weight"] == found["blk.3.ffn_gate.weight"] == "Q5_1"
    assert (found["blk.0.attn_q.weight"], found["blk.1.attn_q.weight"]) == ("Q8_0", "Q4_0")


def test_a_report_lists_the_error_of_every_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(write_source(tmp_path / "a.gguf")), "Q8_0", "--report"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "ffn_up" in line).split("|")
    # relative error of 8-bit formats in percent, for normally distributed weights
    assert float(row[4].strip(" %")) == pytest.approx(0.55, rel=0.1)


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "v.gguf", {"general.architecture": "llama"}, [])
    with (
        open_gguf(tmp_path / "v.gguf") as file,
        pytest.raises(QuantizeError, match="has a vocabulary but no weights"),
    ):
        plan_jobs(file, find("Q8_0"), MixOptions())


def test_a_file_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    source = write_source(tmp_path / "a.gguf")
    with open_gguf(source) as file:
        jobs = given_jobs(file, {"blk.0.ffn_up.weight": "Q8_0"})
        os.truncate(source, 1 << 20)
        with (
            pytest.raises(GGUFError, match="was cut"),
            conversion(jobs, file.tensors, ConversionSettings(1)) as tensors,
        ):
            write_gguf(tmp_path / "b.gguf", {}, tensors)
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]
