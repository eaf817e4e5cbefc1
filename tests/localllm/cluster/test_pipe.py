"""Several steps in flight: requests of the loop keep all stages busy, and their answers are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import localllm
from tests.localllm.cluster.crowd import Crowd, split
from tests.localllm.generation.speculation.support import eager
from tests.models.kit import KIT

OPTIONS: dict[str, Any] = {"ctx_size": 256}
CASES = [  # model, stages, speculation
    ("llama-gqa", 2, "off"),
    ("llama-gqa", 3, "ngram"),
    ("qwen35-mtp", 2, "mtp"),
    ("step35-mtp", 3, "mtp"),
    ("gemma3-12", 2, "ngram"),
    ("qwen35-dense", 2, "off"),
    ("kimi-linear-moe", 2, "off"),
    ("rwkv7", 3, "off"),
]


@pytest.mark.parametrize(("kit", "stages", "spec"), CASES)
def test_a_crowd_gets_the_tokens_of_one_process(kit: str, stages: int, spec: str, tmp_path: Path) -> None:
    path = KIT[kit].write(tmp_path / "model.gguf")
    with (
        localllm.load(path, threads=1, spec="off", **OPTIONS) as plain,
        split(path, stages, spec=spec, **OPTIONS) as model,
    ):
        if spec != "off":
            eager(model)
        for seed in range(2):
            crowd = Crowd(plain, model, seed, constrained=spec != "off")
            crowd.run()
            assert crowd.together == stages
            assert crowd.largest > 1
