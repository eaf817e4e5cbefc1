"""`localllm show` prints correct facts, even about files that cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm as api
from localllm import quant
from localllm.cli.main import main
from localllm.gguf import NewTensor, write_gguf
from localllm.models import ARCHITECTURES
from tests.conftest import reference
from tests.localllm import media_models
from tests.localllm.support import write_model
from tests.models.kit import KIT


def facts(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["show", str(path), "--json", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    told: dict[str, Any] = json.loads(out)
    return told


def test_counts_are_those_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(tmp_path / "tiny.gguf")
    told = facts(path, capsys, "--tensors")
    with api.load(path) as model:
        held = list(model.file.tensors.values())
    assert told["bytes"] == path.stat().st_size
    assert [t["name"] for t in told["tensors"]] == [t.name for t in held]
    assert told["formats"] == {
        name: {
            "tensors": sum(t.format == name for t in held),
            "bytes": sum(t.nbytes for t in held if t.format == name),
        }
        for name in ("Q8_0", "F32")
    }
    model_told = told["model"]
    assert model_told["parameters"] == sum(int(np.prod(t.shape)) for t in held)
    assert (model_told["layers"], model_told["width"], model_told["heads"]) == (1, 64, 2)
    assert told["tokenizer"]["ends"] == ["2 '</s>'", "4 '<|im_end|>'"]
    assert told["metadata"]["tokenizer.ggml.tokens"][-1] == "... 356 total"


@pytest.mark.parametrize("ctx", [0, 100, 3000])
@pytest.mark.parametrize("arch", ["", "llama-dense", "gemma3-dense", "gpt-oss-moe"])
def test_memory_plan_is_what_loading_allocates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arch: str, ctx: int
) -> None:
    path = reference("archs", f"{arch}.gguf") if arch else write_model(tmp_path / "tiny.gguf")
    told = facts(path, capsys, "-c", str(ctx))["memory"]
    with api.load(path, ctx_size=ctx) as model:
        memory = model.executable.memory
        assert told["context"] == model.context
    assert told["cache"] == memory.cache
    assert told["cache_per_token"] == memory.cache_per_token
    assert told["weights"] == memory.weights
    assert told["scratch"] == memory.scratch
    assert told["total"] == memory.weights + memory.cache + memory.scratch
    assert told["read_per_token"] == memory.weights_per_token
    assert told["window"] == memory.window


def test_what_cannot_run_is_shown_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = facts(write_model(tmp_path / "a.gguf", extra={"general.architecture": "rwkv9"}), capsys)
    assert "'rwkv9' is not supported" in told["model"]["problem"]
    assert "problem" in told["memory"]
    assert told["tokenizer"]["tokens"] == 356
    assert told["metadata"]["general.architecture"] == "rwkv9"
    assert main(["show", str(tmp_path / "a.gguf")]) == 0
    assert "'rwkv9' is not supported" in capsys.readouterr().out


def test_vocabulary_and_weights_without_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "words.gguf"
    write_gguf(path, {"tokenizer.ggml.model": "none", "general.name": "words"}, [])
    told = facts(path, capsys)
    assert told["model"]["problem"] == "a vocabulary without weights"
    assert "token ids" in told["tokenizer"]["problem"]
    assert main(["show", str(path)]) == 0


def test_next_token_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = KIT["step35-mtp"].write(tmp_path / "step.gguf")
    told = facts(path, capsys)["model"]
    assert (told["layers"], told["next_token_heads"], told["unused_tensors"]) == (4, 2, [])
    assert main(["show", str(path)]) == 0
    assert "next-token heads  2 (--spec mtp drafts with the first)" in capsys.readouterr().out
    with api.load(path, threads=2) as model:
        assert model.plan is not None
        assert [len(head.layers) for head in model.mtp_heads] == [1, 1]
        assert not model.mtp_heads[0].tensors <= model.plan.tensors


def test_next_token_heads_that_cannot_be_are_shown_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata, tensors = KIT["qwen35-mtp"].loaded()
    new = [NewTensor(t.name, t.format, t.shape, t.rows) for t in tensors.values() if "enorm" not in t.name]
    path = tmp_path / "less.gguf"
    write_gguf(path, metadata, new)
    told = facts(path, capsys)["model"]
    assert told["layers"] == 4
    assert told["next_token_heads"]["problem"].startswith("blk.4.nextn.enorm.weight: this tensor is missing")
    assert "blk.4.nextn.hnorm.weight" in told["unused_tensors"]
    assert main(["show", str(path)]) == 0
    assert "next-token heads  blk.4.nextn.enorm.weight: this" in capsys.readouterr().out


def test_no_file_can_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "evil.gguf"
    ones = NewTensor("evil\x1b[31m", "F32", (4,), np.ones(4, np.float32).tobytes())
    evil = {"general.architecture": "\x1b]0;owned\x07", "evil\x1b[2J": "\x9b2J\x7f", "list": ["\x1b[1m"]}
    write_gguf(path, evil, [ones])
    for words in ([], ["--tensors"], ["--json"]):
        assert main(["show", str(path), *words]) == 0
        out = capsys.readouterr().out
        assert not set(out) & {"\x1b", "\x07", "\x9b", "\x7f"}
        assert "owned" in out
    assert json.loads(out)["metadata"] == {**evil, "list": ["\x1b[1m"]}


def test_support_tables_need_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--formats", "--archs"]) == 0
    out = capsys.readouterr().out
    named = {line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| ")}
    assert set(ARCHITECTURES) <= named
    assert {name for name in quant.FORMATS if name not in ("I8", "I16", "I32", "I64")} <= named
    q8 = next(line for line in out.splitlines() if line.startswith("| Q8_0 "))
    assert [cell.strip() for cell in q8.split("|")[2:-1]] == ["8.5", "32 in 34 bytes", "yes", "yes", "yes"]


def test_an_mmproj_file_shows_its_encoders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt has the same number of tokens. A model shows the file that it would load."""
    encoders = media_models.write_mmproj(tmp_path / "mmproj-F16.gguf", "qwen3vl")
    found = facts(encoders, capsys)["encoders"]["image"]
    assert (found["projector"], found["width"]) == ("qwen3vl_merger", 32)
    assert found["tokens"] == {"448x448": (448 // 32) ** 2, "1024x1024": 32 * 32}
    assert found["weights"] > 0.9 * sum(part["bytes"] for part in facts(encoders, capsys)["formats"].values())
    model = write_model(tmp_path / "tiny.gguf")
    assert facts(model, capsys)["mmproj"] == [str(encoders)]
    assert main(["show", str(model)]) == 0
    assert f"encoders       {encoders}" in capsys.readouterr().out


def test_an_mmproj_file_that_cannot_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = media_models.write_mmproj(tmp_path / "mmproj.gguf", "qwen3vl", projector_type="unheard-of")
    problem = facts(path, capsys)["encoders"]["problem"]
    assert "'unheard-of' is not supported" in problem
    assert main(["show", str(path)]) == 0
    out = capsys.readouterr().out
    assert problem in out
    assert "tokenizer " not in out
    assert "\nmemory" not in out
