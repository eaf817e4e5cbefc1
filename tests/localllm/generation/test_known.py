"""Answers continue after a fault: known tokens are verified and not sent again; the rest equals an undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

import localllm
from localllm.constrained.request import Recipe
from localllm.generation.errors import NotRepeated
from localllm.generation.request import Event, Finished, Prefilled, Request, Started, Token
from localllm.options import SamplingOptions
from localllm.options.structure import ConstraintSpec, Structure
from tests.localllm.generation.speculation.support import eager
from tests.localllm.generation.support import Answer, ask, scheduled
from tests.models.kit import KIT

PROMPT = "Once upon a time there was a little bird. The little bird"
LENGTH = 14
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"enum": ["yes", "no"]}},
    "required": ["n", "s"],
}

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k": {"top_k": 5, "temperature": 1.0},
    "penalties": {"temperature": 0.7, "repeat_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "DRY": {"temperature": 0.0, "dry_multiplier": 0.8, "dry_allowed_length": 1},
    "XTC": {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    "mirostat": {"mirostat": 1},
    "mirostat 2": {"mirostat": 2},
    "adaptive": {"adaptive_target": 0.3},
    "typical, top-n-sigma, dynamic": {"typical_p": 0.9, "top_n_sigma": 1.0, "dynatemp_range": 0.5},
    "biases": {"temperature": 0.5, "logit_bias": {300: 5.0, 12: -3.0}},
}  # fmt: skip
ASKING: dict[str, dict[str, Any]] = {
    "log-probabilities": {"logprobs": 3},
    "sampled log-probabilities": {"logprobs": 2, "sampled": True},
    "prompt log-probabilities": {"logprobs": 1, "prompt_logprobs": True},
    "a stop string": {"stops": (" a ", "was"), "max_tokens": 60},
    "no end": {"ignore_eos": True, "max_tokens": 20},
}  # fmt: skip
STRUCTURES = {
    "schema": Structure(schema=SCHEMA),
    "GBNF": Structure(gbnf='root ::= ([a-z]+ [ ,.])+'),
    "regex": Structure(regex="[a-z ]{5,40}\\."),
}  # fmt: skip


@pytest.fixture(scope="module")
def demo() -> Iterator[localllm.Model]:
    with localllm.load("demo", ctx_size=256, threads=1, spec="off") as model:
        yield model


@pytest.fixture(scope="module")
def drafting() -> Iterator[localllm.Model]:
    with localllm.load("demo", ctx_size=256, threads=1, spec="ngram") as model:
        eager(model)
        yield model


def undisturbed(model: localllm.Model, request: Request) -> list[Event]:
    with scheduled(model, parallel=2) as scheduler:
        return events(ask(scheduler, request))


def events(answer: Answer) -> list[Event]:
    answer.result()
    return list(answer.events)


def told(found: Sequence[Event]) -> tuple[list[Token], Finished]:
    """Return the tokens with their texts and log-probabilities, and the end without its times."""
    end = found[-1]
    assert isinstance(end, Finished)
    counts = replace(end.usage, **dict.fromkeys(TIMES, 0))
    return [event for event in found if isinstance(event, Token)], replace(end, usage=counts)


TIMES = (  # and counts that say how the tokens were computed
    "queued_seconds", "first_token_seconds", "prompt_seconds", "decode_seconds", "decode_steps", "decode_passes",
    "bytes_per_step", "drafting", "drafted", "accepted", "rounds", "plain_seconds", "reused_tokens",
)  # fmt: skip


def check_every_cut(model: localllm.Model, request: Request) -> None:
    """Cut an answer after every number of tokens, and continue it in another run."""
    tokens, end = told(undisturbed(model, request))
    assert len(tokens) > 3
    with scheduled(model, parallel=3) as scheduler:
        answers = [
            ask(scheduler, replace(request, known=tuple(token.token for token in tokens[:cut])))
            for cut in range(len(tokens) + 1)
        ]
        for cut, answer in enumerate(answers):
            rest, again = told(events(answer))
            assert rest == tokens[cut:], cut
            assert again == end, cut


def request_of(model: localllm.Model, given: dict[str, Any], **asking: Any) -> Request:
    sampling = model.sampling_defaults.options({"seed": 7, **given})
    return Request(model.tokenize(PROMPT), sampling, **{"max_tokens": LENGTH, **asking})


@pytest.mark.parametrize("name", SAMPLING)
def test_it_goes_on_with_every_sampler(demo: localllm.Model, name: str) -> None:
    check_every_cut(demo, request_of(demo, SAMPLING[name]))


@pytest.mark.parametrize("name", ASKING)
def test_it_goes_on_with_everything_that_is_asked_for(demo: localllm.Model, name: str) -> None:
    check_every_cut(demo, request_of(demo, {"temperature": 0.8}, **ASKING[name]))


@pytest.mark.parametrize("name", STRUCTURES)
def test_it_goes_on_within_a_grammar(demo: localllm.Model, name: str) -> None:
    recipe = Recipe(ConstraintSpec(STRUCTURES[name]))
    check_every_cut(demo, request_of(demo, {"temperature": 0.8}, constraint=recipe.made(demo), max_tokens=40))


@pytest.mark.parametrize("name", ["greedy", "mirostat 2", "penalties"])
def test_it_goes_on_with_drafts(drafting: localllm.Model, name: str) -> None:
    check_every_cut(drafting, request_of(drafting, SAMPLING[name], max_tokens=30, ignore_eos=True))


@pytest.mark.parametrize("kit", ["gpt-oss-moe", "qwen35-mtp", "granitehybrid-dense"])
def test_it_goes_on_in_windows_and_recurrent_states(kit: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = KIT[kit].write(tmp_path_factory.mktemp("known") / "m.gguf")
    with localllm.load(path, ctx_size=256, threads=1, sequences=3) as model:
        prompt = [number % model.vocabulary for number in range(3, 90)]
        check_every_cut(model, Request(prompt, SamplingOptions(temperature=0.9, seed=4), 12, ignore_eos=True))


def test_it_goes_on_at_the_end_of_the_context(demo: localllm.Model) -> None:
    prompt = demo.tokenize(PROMPT)
    check_every_cut(demo, Request((prompt * 20)[: demo.context - 8], SamplingOptions(seed=1), 99, ignore_eos=True))


def test_known_tokens_take_few_passes(demo: localllm.Model) -> None:
    request = request_of(demo, {"temperature": 0.8}, max_tokens=150, ignore_eos=True)
    tokens, _ = told(undisturbed(demo, request))
    known = tuple(token.token for token in tokens[:140])
    with scheduled(demo, parallel=2) as scheduler:
        before = demo.engine.steps
        answer = ask(scheduler, replace(request, known=known))
        answer.result()
        assert answer.tokens == [token.token for token in tokens[140:]]
        assert demo.engine.steps - before < 25  # 10 tokens, and 140 in passes of at least 16


def test_a_token_that_is_not_repeated_is_told(demo: localllm.Model) -> None:
    request = request_of(demo, {"temperature": 0.8})
    tokens, _ = told(undisturbed(demo, request))
    known = [token.token for token in tokens[:8]]
    for wrong in range(8):
        other = [*known[:wrong], known[wrong] + 1, *known[wrong + 1 :]]
        with scheduled(demo, parallel=1) as scheduler:
            answer = ask(scheduler, replace(request, known=other))
            failed = answer.error()
            assert isinstance(failed.error, NotRepeated)
            assert f"token {wrong} of the answer is {known[wrong]}" in str(failed.error)
            assert not answer.tokens


def test_an_answer_that_ended_before_its_known_tokens_is_told(demo: localllm.Model) -> None:
    request = request_of(demo, {"temperature": 0.8}, stops=("bird",), max_tokens=60)
    tokens, _ = told(undisturbed(demo, replace(request, stops=())))
    with scheduled(demo, parallel=1) as scheduler:
        answer = ask(scheduler, replace(request, known=[token.token for token in tokens]))
        assert isinstance(answer.error().error, NotRepeated)


def test_the_prompt_is_told_again(demo: localllm.Model) -> None:
    """The front drops events that its client has (`Answer.fresh` of the remote scheduler)."""
    request = request_of(demo, {"temperature": 0.8})
    tokens, _ = told(undisturbed(demo, request))
    with scheduled(demo, parallel=1) as scheduler:
        again = events(ask(scheduler, replace(request, known=[tokens[0].token])))
    assert [type(event) for event in again[:2]] == [Started, Prefilled]
