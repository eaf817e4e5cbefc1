"""Shared by tests of plans: plans of tiny models, which together hold every operation."""

from __future__ import annotations

from functools import cache

from localllm.plan import Plan
from tests.models.kit import KIT
from tests.models.support import plan_of
from tests.models.tiny import VARIANTS
from tests.models.tiny_families import FAMILIES

MODELS = {**VARIANTS, **FAMILIES, "dbrx": KIT["dbrx-moe"].loaded}


@cache
def tiny_plan(name: str) -> Plan:
    return plan_of(*MODELS[name]())
