"""A model in stages on CPUs serves like one in one process: embeddings, and prefixes of any length."""

from __future__ import annotations

import numpy as np
import pytest

import localllm
from localllm.backends.base import Backend
from localllm.backends.cpu.backend import CpuBackend
from localllm.cluster.backend import SplitBackend
from localllm.engine import SequenceRows
from localllm.loading.loaded_model import ALIGNED
from localllm.loading.splitting import Whole
from localllm.options import LoadOptions
from tests.localllm.cluster.support import local


class Here:
    """Splits a model within this process."""

    line = "here"

    def __init__(self, others: str) -> None:
        self._others = others

    def free_memory(self, options: LoadOptions) -> int:
        return 1 << 30

    def backend(self, whole: Whole, threads: int) -> Backend:
        made = local(CpuBackend(1), 2)
        return SplitBackend(made.first, made._cut, made._connect, self._others)


@pytest.mark.parametrize("others", ["cpu", "cuda"])
def test_stages_on_cpus_serve_like_one_process(others: str) -> None:
    with (
        localllm.load("demo", threads=1, ctx_size=512, sequences=2, split=Here(others)) as stages,
        localllm.load("demo", threads=1, ctx_size=512, sequences=2) as one,
    ):
        assert one.prompt_alignment == 1
        assert stages.prompt_alignment == (1 if others == "cpu" else ALIGNED)
        assert stages.facts.pools == (others == "cpu")
        if others == "cpu":
            ids = one.prompt_ids("Why is the sky blue?")
            rows = []
            for model in (stages, one):
                engine = model.engine
                sequence = engine.add()
                [result] = engine.step([SequenceRows(sequence, ids, "all", normed=True)])
                rows.append(result.normed.copy())
            np.testing.assert_array_equal(*rows)
