"""Answers at forced acceptance rates are the plain ones, from every source, with the program's own policy.

The drafts are the plain answer's tokens, each with a given probability, else wrong ones. Nothing is measured before.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request_state import RequestState
from localllm.generation.speculation import suffixes
from localllm.generation.speculation.draft_model import DraftModel
from localllm.generation.speculation.drafts import Drafts
from localllm.generation.speculation.head import HeadDrafter
from localllm.generation.speculation.policy import Costs
from localllm.generation.speculation.rule import DraftToken
from localllm.generation.speculation.suffixes import SuffixDrafter
from localllm.generation.speculation.vocabulary import Mapping
from localllm.sampling.sampler import Sampler
from tests.localllm.generation.speculation.support import drafting_by
from tests.models.kit import KIT

RATES = (0.0, 0.6, 0.95)
TOKENS = 70
EVEN = min(range(len(suffixes.PRIORS)), key=lambda trust: abs(suffixes.PRIORS[trust] - 0.5))
TRUST = {"repeats": EVEN, "draft": 4, "head": 4}  # classes of drafts of which about half are right
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "repeat_penalty": 1.1},
    "sampled": {"temperature": 0.9, "seed": 5, "top_k": 0},
    "grammar": {"temperature": 0.8, "seed": 3, "grammar": "root ::= ([a-z]+ [ ,.])+"},
}


class Oracle:
    """The texts of some answers, by their prompts, and a draft for each position."""

    def __init__(self, texts: list[list[int]], rate: float, vocabulary: int, trust: int) -> None:
        self._texts, self._vocabulary, self._trust = texts, vocabulary, trust
        self._right = np.random.default_rng(int(100 * rate)).random(2000) < rate

    def draft(self, text: list[int], position: int) -> DraftToken:
        known = next(each for each in self._texts if each[: len(text)] == text)
        token = known[position] if position < len(known) else 0
        return DraftToken(token if self._right[position] else (token + 1) % self._vocabulary, self._trust)


class Repeats(SuffixDrafter):
    """Drafts from repetitions, whose tokens the oracle replaces."""

    oracle: Oracle

    def propose(self, sampler: Sampler, most: int = 0) -> Iterator[DraftToken]:
        list(zip(super().propose(sampler, most), range(3), strict=False))
        for position in range(len(self.text), len(self.text) + 20):
            yield self.oracle.draft(self.text, position)


def forced(model: localllm.Model, source: str, oracle: Oracle) -> Drafts:
    """Return the drafter of a source, whose tokens the oracle replaces."""
    costs = Costs.unknown(16)
    drafter: DraftModel | HeadDrafter | None = None
    if source == "draft":
        assert model.draft is not None
        size = model.vocabulary
        mapping = Mapping(np.arange(size, dtype=np.int32), size, None, None)
        drafter = DraftModel(model.draft.engine, mapping, Costs.unknown(16), costs, 15)
    if source == "head":
        drafter = HeadDrafter(model.engine, Costs.unknown(16), costs, 15)
    if drafter is not None:

        def guess(one: RequestState, logits: Any) -> DraftToken:
            assert logits.shape == (model.vocabulary,)
            return oracle.draft(one.tokens, len(one.tokens) + len(one.drafts))

        drafter.guess = guess  # type: ignore[method-assign]
        drafter._seconds = lambda rows: 1e-6  # type: ignore[method-assign]
    drafts = Drafts(costs, 15, drafter, repeats=source == "repeats")

    def repeats(text: list[int], earlier: Any) -> Repeats:
        found = Repeats(text, earlier)
        found.oracle = oracle
        return found

    drafts.new_repeats = repeats  # type: ignore[assignment]
    return drafts


@pytest.fixture(scope="module", params=["repeats", "draft", "head"])
def source(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(source: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[localllm.Model]:
    """Provide the bundled model, with its draft model, or a hybrid with a head."""
    if source == "head":
        path: str | Path = KIT["qwen35-mtp"].write(tmp_path_factory.mktemp("m") / "m.gguf")
        given: dict[str, Any] = {"spec": "mtp"}
    else:
        path, given = "demo", {"model_draft": "draft", "spec": "draft"} if source == "draft" else {"spec": "off"}
    with localllm.load(path, ctx_size=256, threads=1, sequences=4, **given) as model:
        model.draft_with(None)
        yield model


def prompts(model: localllm.Model) -> list[list[int]]:
    return [np.random.default_rng(count).integers(3, model.vocabulary, count).tolist() for count in (12, 31, 50)]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("rate", RATES)
def test_answers_are_the_plain_ones(model: localllm.Model, source: str, rate: float, options: dict[str, Any]) -> None:
    if "grammar" in options and source == "head":
        pytest.skip("the hybrid's vocabulary has no words")
    given = {"max_tokens": TOKENS, "ignore_eos": True, **options}
    asked = prompts(model)
    plain = [model.generate(prompt, **given).tokens for prompt in asked]
    oracle = Oracle([a + b for a, b in zip(asked, plain, strict=True)], rate, model.vocabulary, TRUST[source])
    with drafting_by(model, forced(model, source, oracle)):
        model.new_core(SchedulerLimits())
        replies = []
        for prompt in asked:  # one after the other
            replies.append(model.generate(prompt, **given))
            replies[-1].wait()
        assert [reply.tokens for reply in replies] == plain
        if rate or "grammar" not in options:  # a grammar forbids most wrong drafts
            assert sum(reply.usage.drafted for reply in replies) > 0
        if rate > 0.9 and "grammar" not in options:
            assert sum(reply.usage.accepted for reply in replies) > 0  # how many depends on the measured times
        model.new_core(SchedulerLimits())
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(lambda prompt: model.generate(prompt, **given).tokens, asked)) == plain
    model.new_core(SchedulerLimits())
