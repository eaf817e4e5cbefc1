"""Helpers for tests of plans: plans of tiny models, and plans with operations that no tiny model has."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from localllm.plan import Plan, Recorder
from tests.models.kit import KIT
from tests.models.support import MemoryWeight, plan_of
from tests.models.tiny import VARIANTS
from tests.models.tiny_families import FAMILIES

OF_KIT = (
    "dbrx-moe", "deepseek2-groups", "gemma3n-e2b", "gemma4-e2b", "apertus", "qwen35-mtp", "jamba-dense", "rwkv7",
    "kimi-k3-moe", "deepseek32-8of40", "minimax-m3-3of10", "hy_v4-8of40", "glm5-next-8of40",
    "qwen4exp-8of40", "deepseek4-8of50",
)  # fmt: skip
MODELS = {**VARIANTS, **FAMILIES, **{name: KIT[name].loaded for name in OF_KIT}}


def _columns() -> Plan:
    r = Recorder()
    x = r.embed(MemoryWeight.of("table", np.arange(37.0 * 24).reshape(37, 24)))
    return r.finish(r.concat(r.slice(x, 1, 5, 3), x, 3))


def _connect() -> Plan:
    r = Recorder()
    x = r.embed(MemoryWeight.of("table", np.arange(37.0 * 24).reshape(37, 24) / 888))
    scale, bias = MemoryWeight.of("scale", np.ones(3)), MemoryWeight.of("bias", np.zeros(24))
    return r.finish(r.hyper_connection(x, 4, scale, bias, 1e-6, iterations=2))


def _pool() -> Plan:
    r = Recorder()
    x = r.embed(MemoryWeight.of("table", np.arange(37.0 * 24).reshape(37, 24) / 888))
    return r.finish(r.pool(x, r.scale(x, 2.0), MemoryWeight.of("bias", np.ones((2, 24)))))


def _media() -> Plan:
    r = Recorder()
    media, x = r.embed_media(2 * 6), r.embed(MemoryWeight.of("embedding", np.ones((8, 6))))
    return r.finish(r.select_rows(r.splice(r.splice(x, media), media, 6, add=True)))


def _ngrams() -> Plan:
    r = Recorder()
    table = MemoryWeight.of("table", np.arange(37.0 * 24).reshape(37, 24))
    return r.finish(r.add(r.embed(table), r.embed_ngrams(replace(table, name="n-grams"), (3, 5), (37,), (0,), 2)))


RECORDED = {"columns": _columns, "connect": _connect, "pool": _pool, "media": _media, "ngrams": _ngrams}


@cache
def tiny_plan(name: str) -> Plan:
    return RECORDED[name]() if name in RECORDED else plan_of(*MODELS[name]())
