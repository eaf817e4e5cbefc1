"""`localllm quantize` with measurements on the model: size and error targets, calibration methods, automatic
importance matrices, and a text report.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from localllm import load, quant
from localllm.cli.main import main
from localllm.evaluation import cut_windows
from localllm.gguf import open_gguf
from localllm.quant import FORMATS
from localllm.quant.mixes import MixOptions
from localllm.quantize.calibration.method import Gptq
from localllm.quantize.target import NARROW, WIDE, candidates
from tests.localllm.convert.support import HF
from tests.localllm.support import REPOSITORY, write_model

TEXT = ["-f", str(REPOSITORY / "benchmarks" / "demo" / "smalltalk.txt"), "--chunks", "2"]


def formats(path: Path) -> dict[str, str]:
    with open_gguf(path) as file:
        return {name: tensor.format for name, tensor in file.tensors.items()}


def run(*words: object) -> int:
    return main(["quantize", *map(str, words), *TEXT, "--allow-requantize"])


def test_a_size_is_kept_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_model(tmp_path / "m.gguf")
    limit = source.stat().st_size - 12_000
    assert run(source, "--fit", limit) == 0
    size = (tmp_path / "m-MIX.gguf").stat().st_size
    assert limit - 4_000 < size <= limit
    assert len(set(formats(tmp_path / "m-MIX.gguf").values())) > 2
    assert re.search(r"KL divergence 0\.\d+ on ", capsys.readouterr().out)


def test_a_file_that_fits_is_copied_and_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_model(tmp_path / "m.gguf")
    # the source is already quantized
    assert main(["quantize", str(source), str(tmp_path / "o.gguf"), "--fit", "1GB", *TEXT]) == 0
    said = capsys.readouterr()
    assert said.err == "note: m.gguf already fits, so every tensor keeps its format\n"
    assert "(unchanged)" in said.out
    assert "divergence" not in said.out
    assert formats(tmp_path / "o.gguf") == formats(source)
    with open_gguf(source) as before, open_gguf(tmp_path / "o.gguf") as after:
        assert after.metadata.get("general.file_type") == before.metadata.get("general.file_type")


@pytest.mark.parametrize("goal", [("--fit", "60KB"), ("--max-kld", "0.1")])
def test_a_quantized_file_is_refused_before_it_is_measured(
    goal: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(tmp_path / "m.gguf")
    monkeypatch.setattr("localllm.quantize.target.Trial", None)  # any measurement would raise an error
    assert main(["quantize", str(source), *goal, *TEXT]) == 1
    assert capsys.readouterr().err.endswith("start from F16, BF16 or F32, or add --allow-requantize\n")


def test_a_divergence_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_model(tmp_path / "m.gguf")
    assert run(source, tmp_path / "o.gguf", "--max-kld", "0.02", "--report") == 0
    out = capsys.readouterr().out
    assert 0 < float(re.search(r"KL divergence (0\.\d+) on ", out)[1]) <= 0.02  # type: ignore[index]
    assert (tmp_path / "o.gguf").stat().st_size < source.stat().st_size
    assert re.search(r"^perplexity on \S+, before +\d+\.\d+ ± \d", out, re.MULTILINE)
    assert "same top token" in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--fit", "10KB"], r"the smallest possible file is \d+\.\d\d KiB, and the limit is 9\.77 KiB; raise --fit"),
        (["--max-kld", "1e-9", "--token-embedding-type", "Q4_0"], "raise --max-kld"),
        (["--fit", "1MB", "Q4_K_M"], "--fit replaces TYPE; omit Q4_K_M"),
        (["--fit", "1MB", "--max-kld", "1"], "--max-kld and --fit cannot be combined"),
        (["--fit", "1MB", "--pure"], "--fit and --pure cannot be combined"),
    ],
)
def test_a_goal_that_cannot_be_reached_is_one_line(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "m.gguf")
    assert run(tmp_path / "m.gguf", *words) in (1, 2)
    said = capsys.readouterr().err
    assert re.search(line, said)
    assert said.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_what_is_asked_for_by_name_is_no_choice(tmp_path: Path) -> None:
    options = MixOptions(overrides=((re.compile("ffn_up"), "Q5_1"),), embedding="Q4_1", leave_output=True)
    with open_gguf(write_model(tmp_path / "m.gguf")) as file:
        found = candidates(file, options, imatrix=False)
    assert found["blk.0.ffn_up.weight"] == ("Q5_1",)
    assert found["token_embd.weight"] == ("Q4_1",)
    assert found["output.weight"] == ("Q8_0",)  # leave_output keeps the format
    assert found["blk.0.attn_q.weight"] == (*NARROW[:-1], "Q8_0")  # formats for rows of 64 values
    # formats no larger than Q4_K, the format in the file
    writable = tuple(name for name in WIDE[: WIDE.index("Q4_K") + 1] if FORMATS[name].quantize)
    with open_gguf(REPOSITORY / "models" / "demo" / "demo.gguf") as file:
        assert candidates(file, MixOptions(), imatrix=False)["blk.0.attn_q.weight"] == writable


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_method_changes_codes_and_no_formats(method: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "m.gguf")
    assert run(source, tmp_path / "plain.gguf", "Q4_0") == 0
    assert run(source, tmp_path / "other.gguf", "Q4_0", "--method", method) == 0
    assert formats(tmp_path / "plain.gguf") == formats(tmp_path / "other.gguf")
    assert (tmp_path / "plain.gguf").read_bytes() != (tmp_path / "other.gguf").read_bytes()


def test_an_imatrix_measured_on_the_way_is_said_in_the_file(tmp_path: Path) -> None:
    assert run(write_model(tmp_path / "m.gguf"), tmp_path / "o.gguf", "Q4_0", "--imatrix", "auto") == 0
    with open_gguf(tmp_path / "o.gguf") as file:
        keys = {k.removeprefix("quantize.imatrix."): v for k, v in file.metadata.items() if k.startswith("quantize.")}
    assert keys["entries_count"] == 7
    assert keys["chunks_count"] == 2
    assert str(keys["file"]).startswith("measured on ")


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("llama-shards", ["Q4_0", "--imatrix", "auto"]),
        ("experts", ["Q4_0", "--imatrix", "auto"]),
        ("experts", ["Q4_0", "--method", "awq"]),
        ("mxfp4", ["Q4_0", "--method", "gptq", "--report"]),
        ("gemma-pieces", ["--fit", "32KB"]),
        ("mxfp4", ["--max-kld", "0.02", "--imatrix", "auto", "--report"]),
    ],
)
def test_a_hugging_face_folder_is_measured_as_its_file_is(
    folder: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Quantizing a Hugging Face checkpoint gives the same bytes as quantizing its converted GGUF."""
    made = {}
    assert run(HF / folder, tmp_path / "copy.gguf", "COPY") == 0
    for source in (HF / folder, tmp_path / "copy.gguf"):
        capsys.readouterr()
        assert run(source, tmp_path / "o.gguf", *words, "--force") == 0
        made[source] = (tmp_path / "o.gguf").read_bytes()
        assert {p.name for p in tmp_path.iterdir()} == {"copy.gguf", "o.gguf"}  # the temporary GGUF is removed
    assert len(set(made.values())) == 1
    assert not list((HF / folder).glob("*.gguf"))
    assert ("same top token" in capsys.readouterr().out) == ("--report" in words)


def test_a_hugging_face_folder_becomes_a_file(tmp_path: Path) -> None:
    assert main(["quantize", str(HF / "llama-shards"), str(tmp_path / "o.gguf"), "Q8_0"]) == 0
    assert set(formats(tmp_path / "o.gguf").values()) == {"F32", "Q8_0"}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["Q4_0", "--imatrix", "auto", "--method", "awq"], "--method awq measures importance on -f"),
        (["Q4_0", "--imatrix", "i.gguf", "--method", "gptq"], "--method gptq measures importance on -f"),
        (["F16", "--method", "gptq"], "--method gptq: F16 quantizes no tensor of this model; omit it"),
        (["COPY", "--imatrix", "auto"], "--imatrix auto: COPY quantizes no tensor of this model"),
        (["Q4_0", "--method", "awq", "-f", "none.txt"], "none.txt: No such file"),
        (["Q4_0", "--report", "--test", "none.txt"], "none.txt: No such file"),
        (["--fit", "40KB"], r"hf/experts: the smallest possible file is [\d.]+ KiB, .* is 39.06 KiB; raise --fit"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(HF / "experts"), str(tmp_path / "o.gguf"), *TEXT, *words]) in (1, 2)
    said = capsys.readouterr()
    assert re.search(line, said.err)
    assert (said.out, said.err.count("\n"), list(tmp_path.iterdir())) == ("", 1, [])


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_method_is_the_importance_that_coarse_formats_need(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["demo", tmp_path / "o.gguf", "F16", "--tensor-type", r"blk\.1\.attn_k\.=IQ2_XXS"]
    assert run(*words) == 1
    assert "IQ2_XXS requires an importance matrix" in capsys.readouterr().err
    assert run(*words, "--method", method) == 0
    assert formats(tmp_path / "o.gguf")["blk.1.attn_k.weight"] == "IQ2_XXS"
    assert run("demo", "Q2_K_S", "--method", method, "--dry-run") == 0
    assert "imatrix" not in capsys.readouterr().err


def test_columns_are_alike_to_an_expert_that_no_token_chose(tmp_path: Path) -> None:
    name = "blk.0.ffn_up_exps.weight"
    assert run(HF / "experts", tmp_path / "m.gguf", "COPY") == 0
    with load(tmp_path / "m.gguf", ctx_size=64, observe=True) as model:
        tensor = model.file.tensors[name]
        values = quant.dequantize(tensor.read(0, tensor.rows), tensor.format).reshape(tensor.shape)
        method = Gptq(model, cut_windows(model, Path(TEXT[1]).read_text(), 64, 2), {name: "Q4_0"})
        seen = method.store(name, values, "Q4_0")
        method._moments[name][1] = 0
        rows = method.store(name, values, "Q4_0").reshape(len(values), -1)
    alike = quant.quantize(values[1], "Q4_0", np.ones(values.shape[-1], np.float32)).reshape(-1)
    assert (rows[1] == alike).all()
    different = [i for i, row in enumerate(seen.reshape(rows.shape)) if (row != rows[i]).any()]
    assert different == [1]
