"""`localllm quantize` where it runs the model: goals, methods, importance measured on the way, the report of a text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from localllm.cli.main import main
from localllm.gguf import open_gguf
from localllm.quantize.target import NARROW, WIDE, candidates
from quant import FORMATS
from quant.mixes import Options
from tests.localllm.cli_support import REPOSITORY, write_model
from tests.localllm.convert_support import HF

TEXT = ["-f", str(REPOSITORY / "models" / "demo" / "smalltalk.txt"), "--chunks", "2"]


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
        (["--fit", "10KB"], "0.0 MB are allowed; allow more"),
        (["--max-kld", "1e-9", "--token-embedding-type", "Q4_0"], "allow"),
        (["--fit", "1MB", "Q4_K_M"], "--fit: stands for TYPE; leave Q4_K_M out"),
        (["--fit", "1MB", "--max-kld", "1"], "--max-kld: cannot be had together with --fit"),
        (["--fit", "1MB", "--pure"], "--fit: cannot be had together with --pure"),
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
    options = Options(overrides=((re.compile("ffn_up"), "Q5_1"),), embedding="Q4_1", leave_output=True)
    with open_gguf(write_model(tmp_path / "m.gguf")) as file:
        found = candidates(file, options, imatrix=False)
    assert found["blk.0.ffn_up.weight"] == ("Q5_1",)
    assert found["token_embd.weight"] == ("Q4_1",)
    assert found["output.weight"] == ("Q8_0",)  # as it is
    assert found["blk.0.attn_q.weight"] == (*NARROW[:-1], "Q8_0")  # rows of 64
    writable = tuple(name for name in WIDE if FORMATS[name].quantize)
    with open_gguf(REPOSITORY / "models" / "demo" / "demo.gguf") as file:
        assert candidates(file, Options(), imatrix=False)["blk.0.attn_q.weight"] == writable


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


def test_a_hugging_face_folder_becomes_a_file(tmp_path: Path) -> None:
    """And leaves nothing behind where it had to be one in between, to be measured."""
    folder = HF / "llama-shards"
    assert main(["quantize", str(folder), str(tmp_path / "o.gguf"), "Q8_0"]) == 0
    assert set(formats(tmp_path / "o.gguf").values()) == {"F32", "Q8_0"}
    before = sorted(p.name for p in folder.iterdir())
    main(["quantize", str(folder), str(tmp_path / "p.gguf"), "Q8_0", "--imatrix", "auto", *TEXT])
    assert sorted(p.name for p in folder.iterdir()) == before
    assert {p.name for p in tmp_path.iterdir()} <= {"o.gguf", "p.gguf"}
