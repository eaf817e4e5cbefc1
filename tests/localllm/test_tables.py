"""Embedding tables that stay in the GGUF: how their memory is reported, and where their rows are read."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
import localllm.loading.loader
from localllm.base.errors import LocalLLMError
from localllm.cli.main import main
from localllm.generation.request import Request
from localllm.generation.scheduler import Scheduler
from localllm.gguf import NewTensor, write_gguf
from localllm.options import SamplingOptions
from tests.localllm.generation.support import ask, stepper_of
from tests.models.kit import KIT
from tests.models.support import Driver, MemoryWeight, bind_reference, nmse, plan_of

METADATA, TENSORS = KIT["qwen4exp-8of40"].loaded()
NAME, ROWS, ROW = "per_layer_token_embd.weight", 664, 64  # tensor name, rows, bytes of a row
IDS = range(1, 60)


def new(tensors: dict[str, MemoryWeight]) -> list[NewTensor]:
    return [NewTensor(t.name, t.format, t.shape, t.rows) for t in tensors.values()]


def write(path: Path, times: int = 1) -> Path:
    """Write a model whose embedding table is repeated this many times. No hash selects the additional rows."""
    table = TENSORS[NAME]
    more = replace(table, shape=(times * ROWS, 16), rows=np.tile(table.rows, (times, 1)))
    write_gguf(path, METADATA, new(TENSORS | {NAME: more}))
    return path


def facts(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["show", str(path), "--json", "-c", "256"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_a_table_takes_no_memory_and_show_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short, long = (write(tmp_path / f"{times}.gguf", times) for times in (1, 100))
    told, more = (facts(path, capsys) for path in (short, long))
    # Six rows per token: two heads for each n-gram length.
    of_file = {"tables_in_file": ROWS * ROW, "tables_read_per_token": 6 * ROW}
    assert of_file.items() <= told["memory"].items()
    assert more["memory"] == told["memory"] | {"tables_in_file": 100 * ROWS * ROW}
    assert more["model"]["parameters"] - told["model"]["parameters"] == 99 * ROWS * 16
    with localllm.load(long, ctx_size=256) as model:
        assert model.executable.memory.weights == told["memory"]["weights"]
    assert main(["show", str(long)]) == 0
    assert re.search(r"in the file +4\.05 MiB +n-gram tables; each token reads 384 B", capsys.readouterr().out)


def test_a_server_has_the_memory_that_a_table_does_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 20 MB of free memory, a model with a table of 21 MB, other tensors of 2 MB and a KV cache of 4 MB
    still fits.
    """
    monkeypatch.setattr(localllm.loading.loader, "free_memory", lambda: 20_000_000)
    path = write(tmp_path / "model.gguf", 500)
    with localllm.load(path, backend="cpu", threads=1, ctx_size=256, sequences=2) as model:
        assert model.context == 256
    monkeypatch.setattr(localllm.loading.loader, "free_memory", lambda: 2_000_000)
    with pytest.raises(LocalLLMError, match="MiB are left by weights and encoders"):
        localllm.load(path, backend="cpu", threads=1, ctx_size=256, sequences=2)


def test_a_table_in_a_later_part_is_read_there(tmp_path: Path) -> None:
    """A step reads only the rows that it needs, even if the GGUF was deleted after opening."""
    split = {"split.count": np.uint16(2), "split.tensors.count": np.int32(len(TENSORS))}
    names = [tmp_path / f"m-{i:05d}-of-00002.gguf" for i in (1, 2)]
    others = new({name: tensor for name, tensor in TENSORS.items() if name != NAME})
    write_gguf(names[0], METADATA | split | {"split.no": np.uint16(0)}, others)
    write_gguf(names[1], split | {"split.no": np.uint16(1)}, new({NAME: TENSORS[NAME]}))
    found = []
    for path in (write(tmp_path / "whole.gguf"), names[0]):
        with localllm.load(path, backend="cpu", threads=1, ctx_size=128) as model:
            for each in model.file.paths:
                each.unlink()
            found.append(model.logits(IDS))
    np.testing.assert_array_equal(*found)
    truth = Driver(bind_reference(plan_of(METADATA, TENSORS), "f16")).step([(0, IDS)])
    assert nmse(found[0], truth).max() < 1e-9


def test_a_file_that_is_cut_fails_answers_and_no_server(tmp_path: Path) -> None:
    """Once the GGUF is restored, later answers are right again."""
    path = write(tmp_path / "model.gguf")
    whole, request = path.read_bytes(), Request([*IDS], SamplingOptions(temperature=0.0), 20)
    with (
        localllm.load(path, backend="cpu", threads=1, ctx_size=128, sequences=2) as model,
        Scheduler(stepper_of(model)) as scheduler,
    ):
        first = ask(scheduler, request)
        first.result()
        os.truncate(path, 1000)
        said = str(ask(scheduler, request).error().error)
        assert f"tensor '{NAME}': cannot be read: the file was cut at" in said
        path.write_bytes(whole)
        again = ask(scheduler, request)
        again.result()
    assert again.tokens == first.tokens
    assert len(first.tokens) == 20
