"""What `localllm serve` makes of its options, and what it tells at the start."""

from __future__ import annotations

import localllm
from localllm.cli.commands.serve import plan_line
from localllm.scheduler.interfaces import SchedulerLimits
from localllm.scheduler.request import Request
from localllm.server.served import Served
from localllm.sizes import size
from tests.localllm.scheduler.support import ask
from tests.localllm.scheduler.test_scheduler import each_alone


def test_a_draft_model_is_used_and_its_memory_told() -> None:
    sampling = localllm.SamplingOptions(temperature=0.0)
    requests = [Request([1, 2 + number], sampling, 30, ignore_eos=True) for number in range(2)]
    with localllm.load("demo", threads=1, ctx_size=256, sequences=2, model_draft="draft", spec="draft") as model:
        expected = each_alone(model, requests)
        assert model.draft is not None
        with Served(model, SchedulerLimits(2)) as served:
            line = plan_line(served, 2)
            answers = [ask(served.scheduler, request) for request in requests]
            for answer in answers:
                answer.result()
        assert [answer.tokens for answer in answers] == expected
    own = model.draft.executable.memory
    assert f", draft model {size(own.weights + own.cache + own.scratch)};" in line
