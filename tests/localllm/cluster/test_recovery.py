"""A stage is lost at every message: answers go on with the same tokens, as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm.backends.base import Backend
from localllm.cluster.ring import Connect
from tests.localllm.cluster.crowd import Crowd, split
from tests.localllm.cluster.faults import Faults
from tests.localllm.generation.speculation.support import eager
from tests.models.kit import KIT

OPTIONS: dict[str, Any] = {"ctx_size": 256}


@contextmanager
def faulty(path: Path, stages: int, spec: str) -> Iterator[tuple[localllm.Model, Faults]]:
    """Open a model in stages whose ring fails as `Faults` says."""
    found: list[Faults] = []

    def connecting(backend: Backend, stages: int) -> Connect:
        found.append(Faults(backend))
        return found[0].connect

    with split(path, stages, connecting, spec=spec, **OPTIONS) as model:
        if spec != "off":
            eager(model)
        found[0].first = [model.executable._first]  # type: ignore[attr-defined]
        yield model, found[0]
    found[0].close()


@pytest.mark.parametrize(
    ("kit", "stages", "spec", "stride"),
    [("llama-gqa", 2, "off", 1), ("qwen35-mtp", 3, "mtp", 7), ("gemma3-12", 2, "ngram", 7)],
)
def test_a_stage_is_lost_at_every_message(kit: str, stages: int, spec: str, stride: int, tmp_path: Path) -> None:
    """Prompts, decoding, drafts, copies, grammars and reused prefixes. Some messages still arrive, and some do not."""
    path = KIT[kit].write(tmp_path / "model.gguf")
    with (
        localllm.load(path, threads=1, spec="off", **OPTIONS) as plain,
        faulty(path, stages, spec) as (model, faults),
    ):
        at, lost = 0, 0
        while True:
            faults.messages, faults.fatal, before = 0, {at}, faults.connections
            crowd = Crowd(plain, model, 3, parallel=3, longest=70, constrained=spec != "off")
            crowd.run(requests=6)
            if faults.messages <= at:
                break
            assert faults.connections == before + 1
            lost, at = lost + 1, at + stride
        assert lost > 60 / stride
