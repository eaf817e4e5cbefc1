"""DeepSeek 4 on a text that fills pools of 4 and of 128 positions, of which an indexer chooses 8 of 50."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.backends.base import CacheTypes
from localllm.backends.reference import ReferenceBackend
from localllm.plan import Plan, SelectPositions
from tests.backends.support import bind
from tests.models.kit import KIT
from tests.models.support import Driver, plan_of

MODEL = KIT["deepseek4-8of50"]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(*MODEL.loaded())


def driver(plan: Plan) -> Driver:
    return Driver(bind(ReferenceBackend(), plan, rows=200, blocks=8, cache=CacheTypes("f32", "f32")))


def test_an_indexer_chooses(plan: Plan) -> None:
    (chooser,) = [op for op in plan.operations if isinstance(op, SelectPositions)]
    assert (chooser.count, chooser.block) == (8, 4)


def test_cuts_and_truncations_change_nothing(plan: Plan) -> None:
    whole, cut = driver(plan), driver(plan)
    truth = whole.step([(0, MODEL.tokens[:140])])
    parts = [cut.step([(0, MODEL.tokens[a:b])]) for a, b in ((0, 3), (3, 70), (70, 127), (127, 129))]
    np.testing.assert_array_equal(np.concatenate(parts), truth[:129])
    cut.step([(0, MODEL.tokens[:9])])
    cut.lengths[0] = 126  # inside of both pools
    np.testing.assert_array_equal(cut.step([(0, MODEL.tokens[126:140])]), truth[126:])
