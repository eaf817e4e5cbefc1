"""For any drafts, good or bad, and any seed, the tokens and the random numbers are the same as without drafts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from localllm.generation.request import Request
from localllm.generation.speculation.rule import DraftToken
from localllm.options import SamplingOptions
from localllm.sampling.sampler import Sampler
from tests.localllm.generation.speculation.support import GREEDY, Guessing, Logits, Told, table_engine
from tests.localllm.generation.support import Stepped, Watched

# Every sampler has an effect. The vocabulary is small, so that drafts are often right.
ALL_ON = SamplingOptions(
    seed=5, temperature=0.9, dynatemp_range=0.3, top_k=6, top_p=0.97, min_p=0.02, typical_p=0.98, top_n_sigma=2.5,
    xtc_probability=0.5, xtc_threshold=0.15, repeat_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.1,
    dry_multiplier=0.6, dry_allowed_length=1, logit_bias={3: 0.4},
)  # fmt: skip
PLAIN = SamplingOptions(seed=5, temperature=1, top_k=0, top_p=1, min_p=0)
OPTIONS = {
    "greedy": GREEDY,
    "greedy with penalties": SamplingOptions(temperature=0, repeat_penalty=1.3, frequency_penalty=0.2),
    "plain": PLAIN,
    "temperature 0.8": SamplingOptions(seed=5, temperature=0.8),
    "all on": ALL_ON,
    "mirostat": SamplingOptions(mirostat=1, mirostat_tau=2.0, mirostat_eta=0.9, temperature=1, seed=5),
    "mirostat 2": SamplingOptions(mirostat=2, mirostat_tau=1.2, mirostat_eta=0.9, temperature=1, seed=5),
    "adaptive-p": SamplingOptions(
        samplers=("top_k", "adaptive_p"), top_k=6, adaptive_target=0.5, adaptive_decay=0.3, temperature=1, seed=5
    ),
}
V = 8
PROMPT = [1, 2, 1]


def table(seed: int, spread: float = 1.5) -> Logits:
    """Return a model whose logits (V,) depend on the last two tokens."""
    logits = np.random.RandomState(seed).standard_normal((V, V, V)).astype(np.float32) * spread
    return lambda tokens: logits[tokens[-2:][0], tokens[-1]]


def likeliest(logits: Logits) -> Guessing:
    """Return the most likely tokens, as from a draft model."""
    return lambda text, sampler: DraftToken(int(logits(text).argmax()), 0)


DRAFTERS: dict[str, Guessing] = {
    "alike": likeliest(lambda tokens: table(1)(tokens) + 0.3 * table(2)(tokens)),
    "unlike": likeliest(table(2, 3.0)),
    "hostile": likeliest(lambda tokens: -table(1, 3.0)(tokens)),
    "repeating": lambda text, sampler: DraftToken((text[-1] + text[-2]) % V, 0),
}


def plain(options: SamplingOptions, count: int) -> tuple[list[int], Sampler]:
    """Return the answer of plain decoding, one token after another, and the sampler in its final state."""
    text, sampler = list(PROMPT), Sampler(options)
    for token in PROMPT:
        sampler.accept(token)
    for _ in range(count):
        text.append(sampler.sample(table(1)(text)))
        sampler.write(text[-1])
    return text[len(PROMPT) :], sampler


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_and_random_numbers_are_those_without_drafts(options: SamplingOptions, drafter: str) -> None:
    """After a rejected draft, all state is as if the draft had not existed."""
    accepted = drafted = 0
    for seed in range(8):
        options = replace(options, seed=seed)
        expected, truth = plain(options, 40)
        with Stepped(table_engine(table(1)), Told(DRAFTERS[drafter], 3)) as it:
            one, answer = it.ask(Request(PROMPT, options, 40))
            it.finish()
        assert answer.tokens == expected
        usage = answer.result().usage
        accepted, drafted = accepted + usage.accepted, drafted + usage.drafted
        row = table(3)(PROMPT)
        assert [one.sampler.sample(row) for _ in range(5)] == [truth.sample(row) for _ in range(5)]
    assert drafted > 200
    if not options.greedy:  # greedy text soon repeats itself
        assert accepted < drafted
        assert accepted or drafter == "hostile"


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_right_drafts_all_stand(options: SamplingOptions) -> None:
    expected, _ = plain(options, 40)
    text = [*PROMPT, *expected]
    engine = Watched(table_engine(table(1)))
    right = Told(lambda seen, sampler: DraftToken(text[len(seen)] if len(seen) < len(text) else 0, 0), 7)
    with Stepped(engine, right) as it:
        _, answer = it.ask(Request(PROMPT, options, 40))
        it.finish()
    usage = answer.result().usage
    assert answer.tokens == expected
    assert usage.drafted == usage.accepted == 39 - usage.decode_passes
    assert usage.decode_passes == 5  # 39 tokens, up to 8 per forward pass


def test_a_draft_is_not_believed() -> None:
    """The tests above can fail: without verification, a different draft model gives different tokens."""
    expected, _ = plain(PLAIN, 40)
    text = list(PROMPT)
    for _ in range(40):
        text.append(DRAFTERS["unlike"](text, Sampler(PLAIN)).token)
    assert text[len(PROMPT) :] != expected
