"""Pictures in requests: encoded between steps, cached like text, and answered with the same bits under any load."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.base.errors import LocalLLMError
from localllm.engine import MediaSpan
from localllm.generation import encodings
from localllm.generation.errors import EncoderFailed
from localllm.generation.request import Request
from localllm.generation.scheduler import Scheduler
from localllm.generation.speculation.draft import Followed
from localllm.generation.speculation.draft_model import DraftModel
from localllm.generation.speculation.drafts import Drafts
from localllm.generation.speculation.rule import DraftToken
from localllm.generation.speculation.vocabulary import Mapping
from localllm.models import MediaInput
from localllm.options import SamplingOptions, SpeculationOptions
from localllm.sampling.sampler import Sampler
from localllm.saved.prefix_files import PrefixFiles
from tests.localllm.generation.speculation.support import Free, Reckless, Told, drafting_by, eager
from tests.localllm.generation.support import Answer, Stepped, ask, scheduled, stepper_of
from tests.localllm.multimodal import Encoded, span
from tests.models.kit import KIT

GREEDY = SamplingOptions(temperature=0.0)
TEXT = [5, 6, 7, 8, 9, 10, 5, 6, 7]
# Models: pictures with rows and columns and two streams; pictures whose tokens see each other, longer than the window;
# recurrent layers and a head for drafting.
MODELS = {
    "qwen3vl-dense": MediaInput(streams=2),
    "gemma3-12": MediaInput(span=30),
    "gemma4-31b": MediaInput(span=30),
    "qwen35-mtp": MediaInput(),
}


@dataclass
class Pictures:
    """Makes pictures for a model, and counts how often each is encoded."""

    width: int
    grid: bool
    causal: bool
    encoded: list[int] = field(default_factory=list)  # the seeds, in order of encoding
    running: list[Encoded] = field(default_factory=list)

    def __call__(self, seed: int, rows: int = 4, columns: int = 5, segments: int = 3) -> MediaSpan:
        count = rows * columns
        made = 0.5 * np.random.RandomState(seed).standard_normal((count, self.width)).astype(np.float32)
        y, x = np.divmod(np.arange(count), columns)
        where = np.stack([0 * y, y, x, 0 * y], axis=1) if self.grid else None
        each = span(made, where, max(rows, columns) if self.grid else 0, self.causal)

        def encode() -> Encoded:
            self.encoded.append(seed)
            self.running.append(Encoded(made, segments))
            return self.running[-1]

        return replace(each, encode=encode)


@contextmanager
def opened(family: str, folder: Path, threads: int = 1, **options: Any) -> Iterator[tuple[localllm.Model, Pictures]]:
    path = folder / f"{family}.gguf"
    if not path.exists():
        KIT[family].write(path)
    media = MODELS[family]
    options = {"ctx_size": 256, "sequences": 4, **options}
    with localllm.load(path, backend="cpu", threads=threads, media=media, **options) as model:
        assert model.plan is not None
        yield model, Pictures(model.plan.media, model.plan.axes > 0, not media.span)


def prompt_of(pictures: Pictures, *seeds: int) -> list[int | MediaSpan]:
    found: list[int | MediaSpan] = [1, 2, 3, *TEXT]
    for seed in seeds:
        found += [pictures(seed), 11, 12]
    return [*found, *TEXT]


class Recorded:
    """A logits processor that records what a request chooses from."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray] = []
        self.tokens: list[Sequence[int]] = []

    def __call__(self, tokens: Sequence[int], logits: np.ndarray) -> np.ndarray:
        self.rows.append(logits.copy())
        self.tokens.append(tokens)
        return logits


def request(prompt: list[int | MediaSpan], processor: Any = None, most: int = 12, **further: Any) -> Request:
    return Request(prompt, GREEDY, most, ignore_eos=True, processor=processor, **further)


def alone(model: localllm.Model, prompt: list[int | MediaSpan]) -> tuple[list[int], list[np.ndarray]]:
    recorded = Recorded()
    with scheduled(model) as scheduler:
        answer = ask(scheduler, request(prompt, recorded))
        answer.result()
    return answer.tokens, recorded.rows


@pytest.mark.parametrize("family", MODELS)
def test_an_answer_behind_pictures_repeats_to_the_bit(family: str, tmp_path: Path) -> None:
    """Alone, together with others, from cached prefixes, after a preemption, and with drafts."""
    with opened(family, tmp_path) as (model, pictures):
        prompt = prompt_of(pictures, 1, 2)
        tokens, rows = alone(model, prompt)
        for limits in ({}, {"itl_target": 1e-9}):  # chunks as large as possible, and as small as possible
            crowd, recorded = [Recorded() for _ in range(3)], Recorded()
            with scheduled(model, parallel=4, **limits) as scheduler:
                others = [ask(scheduler, request(prompt_of(pictures, 1 + n, 7), each)) for n, each in enumerate(crowd)]
                found = ask(scheduler, request(prompt, recorded))
                again = ask(scheduler, request(prompt, crowd[0]))
                for each in (*others, found, again):
                    each.result()
            assert found.tokens == again.tokens == tokens
            np.testing.assert_array_equal(recorded.rows, rows)
        recorded = Recorded()
        with Stepped(model) as stepped:
            _, found = stepped.ask(request(prompt, recorded))
            for _ in range(3):
                stepped.turn(6)
                stepped.running.make_room(10_000)  # preempts it, and empties the cache
            stepped.finish()
            assert found.tokens == tokens
        np.testing.assert_array_equal(recorded.rows, rows)

        def guess(text: list[int], sampler: Sampler) -> DraftToken:  # two of three are right
            place = len(text) - length
            return DraftToken(tokens[place] if place < len(tokens) and place % 3 else 1, 0)

        length, recorded = len(prompt) + 38, Recorded()
        with drafting_by(model, Told(guess)), scheduled(model) as scheduler:
            found = ask(scheduler, request(prompt, recorded))
            assert found.result().usage.accepted > 4
        assert found.tokens == tokens
        np.testing.assert_array_equal(recorded.rows, rows)
    with opened(family, tmp_path, threads=2) as (model, pictures):
        assert alone(model, prompt_of(pictures, 1, 2))[0] == tokens


def test_a_known_picture_costs_no_encoding_and_no_step(tmp_path: Path) -> None:
    with opened("qwen3vl-dense", tmp_path) as (model, pictures), Stepped(model) as stepped:
        first, answer = stepped.ask(request(prompt_of(pictures, 1)))
        stepped.finish()
        evaluated = []
        submit = stepped.engine.submit
        stepped.engine.submit = lambda rows: evaluated.append(rows) or submit(rows)  # type: ignore[method-assign, func-returns-value]
        second, again = stepped.ask(request([*prompt_of(pictures, 1), 20, 21]))
        stepped.finish()
        assert pictures.encoded == [1]
        assert again.reused == first.prompt_tokens
        assert all(part.media is None for rows in evaluated for part in rows)
        assert sum(len(part.tokens) for part in evaluated[0]) == second.prompt_tokens - first.prompt_tokens
        assert answer.tokens != []


@pytest.mark.parametrize("family", ["qwen3vl-dense", "gemma3-12"])
def test_a_prompt_that_ends_with_a_known_picture_is_not_encoded_again(family: str, tmp_path: Path) -> None:
    """Its last token is evaluated again, for the logits behind it; or all of them, if they see each other."""
    with opened(family, tmp_path) as (model, pictures), Stepped(model) as stepped:
        prompt = [*TEXT, pictures(1)]
        first, answer = stepped.ask(request(prompt))
        stepped.finish()
        _, again = stepped.ask(request(prompt))
        stepped.finish()
        assert pictures.encoded == [1]
        assert again.tokens == answer.tokens
        assert again.reused == first.prompt_tokens - (20 if family == "gemma3-12" else 1)


def test_kept_embeddings_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("qwen3vl-dense", tmp_path) as (model, pictures), Stepped(model) as stepped:
        monkeypatch.setattr(encodings, "KEPT", 2 * 20 * pictures.width * 4)
        for seed in (1, 2, 3, 3, 2, 1):  # two are kept
            stepped.ask(request([*TEXT, pictures(seed)], most=1))
            stepped.finish()
        assert pictures.encoded == [1, 2, 3, 1]
        stepped.ask(request([*TEXT, pictures(4), 5], most=1))  # behind text, none is needed again
        stepped.finish()
        assert len(stepped.core._encodings._kept) == 2


def test_two_pictures_never_share_blocks(tmp_path: Path) -> None:
    """Neither pictures of different content, nor of one content and different layouts."""
    with opened("qwen3vl-dense", tmp_path) as (model, pictures), Stepped(model) as stepped:
        text = [*range(20, 84)]
        one = pictures(1, 4, 5)
        other = replace(one, key=b"another layout", positions=one.positions[::-1].copy())
        answers = {}
        for name, each in {"one": one, "content": pictures(2, 4, 5), "layout": other}.items():
            state, answer = stepped.ask(request([*text, each, 3, 4]))
            stepped.finish()
            answers[name] = answer.reused
            assert state.prompt_tokens == len(text) + 22
        assert answers == {"one": 0, "content": len(text), "layout": len(text)}
        blocks = [set(sequence.blocks) for sequence in stepped.running.prefixes]
        assert len(set.intersection(*blocks)) == 1  # the block of the text


def test_others_wait_for_one_segment_at_most(tmp_path: Path) -> None:
    with opened("qwen3vl-dense", tmp_path) as (model, pictures), Stepped(model) as stepped:
        _, reader = stepped.ask(request([1, 2, 3], most=40))
        stepped.turn(2)
        before = len(reader.tokens)
        state, answer = stepped.ask(request([4, pictures(1, segments=7), pictures(2, segments=2), 5]))
        for turn in range(1, 10):
            stepped.turn()
            assert sum(each.segments for each in pictures.running) == turn
            assert len(reader.tokens) == before + turn
        assert pictures.encoded == [1, 2]
        stepped.finish()
        assert len(answer.tokens) == 12
        assert [each.embeddings for each in state.media] == [None, None]


def chunks_of(stepped: Stepped, prompt: list[int | MediaSpan], others: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Answer a prompt while other requests decode. Return the chunks of its prefill (start, tokens), and how many steps
    the others waited for each of their tokens.
    """
    readers = [stepped.ask(request([3 + n], most=60))[1] for n in range(others)]
    stepped.turn(others + 1)
    found: list[tuple[int, int]] = []
    submit = stepped.engine.submit

    def watching(rows: Any) -> Any:
        found.extend((part.sequence.length, len(part.tokens)) for part in rows if part.sequence is state.sequence)
        return submit(rows)

    stepped.engine.submit = watching  # type: ignore[method-assign]
    state, _ = stepped.ask(request(prompt, most=1))
    waited, before = [], [len(reader.tokens) for reader in readers]
    while not state.done:
        stepped.turn()
        now = [len(reader.tokens) for reader in readers]
        waited.append(sum(now) - sum(before))
        before = now
    stepped.engine.submit = submit  # type: ignore[method-assign]
    return found, waited


def test_chunks_on_a_graphics_card_depend_on_the_prompt_alone(tmp_path: Path) -> None:
    """They end at multiples of 32 tokens, and at pictures whose tokens see each other, however slow the encoder is."""
    for family, expected in (("gemma3-12", [12, 32, 62, 82, 95]), ("qwen3vl-dense", [32, 64, 95])):
        with opened(family, tmp_path) as (model, pictures):
            model.engine.interruptible = None  # on a graphics card, a picture is one step
            for others, segments in ((0, 1), (0, 9), (3, 1), (3, 20)):
                prompt = [
                    1,
                    2,
                    3,
                    *TEXT,
                    pictures(1, segments=segments),
                    11,
                    12,
                    *range(28),
                    pictures(2, 4, 5, segments),
                ]
                prompt += [9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1, 1]
                with Stepped(model, parallel=4, aligned=32) as stepped:
                    found, _ = chunks_of(stepped, prompt, others)
                ends = [start + count for start, count in found]
                assert ends == expected, (family, others, segments)


def test_without_slices_a_picture_that_leaves_no_room_gets_every_second_step(tmp_path: Path) -> None:
    with opened("gemma3-12", tmp_path) as (model, pictures):
        model.engine.limits = replace(model.engine.limits, rows=32)
        model.engine.interruptible = None
        with Stepped(model, parallel=8) as stepped:
            prompt = [1, *(pictures(seed, 5, 6) for seed in range(4)), 2]
            found, waited = chunks_of(stepped, prompt, 5)
        assert [count for _, count in found][1:5] == [30] * 4
        assert waited.count(0) == 4  # the steps of the pictures; in all others, every reader gets its token
        assert all(one or other for one, other in pairwise(waited))


def test_a_cancelled_request_frees_the_encoder(tmp_path: Path) -> None:
    with opened("qwen3vl-dense", tmp_path) as (model, pictures), Stepped(model) as stepped:
        _, answer = stepped.ask(request([4, pictures(1, segments=50), 5]))
        stepped.turn(3)
        encoding = weakref.ref(pictures.running.pop())
        assert encoding() is not None
        assert answer.ticket is not None
        answer.ticket.cancel()
        stepped.running.drop_cancelled()
        gc.collect()
        assert encoding() is None
        _, following = stepped.ask(request([4, pictures(2), 5]))
        stepped.finish()
        assert pictures.encoded == [1, 2]
        assert len(following.tokens) == 12


def test_many_pictures_of_one_request_do_not_delay_one_of_another(tmp_path: Path) -> None:
    with opened("qwen3vl-dense", tmp_path) as (model, pictures), Stepped(model) as stepped:
        stepped.ask(request([4, *(each for seed in (1, 2, 3, 4) for each in (pictures(seed), 5))]))
        stepped.turn()
        _, answer = stepped.ask(request([6, pictures(5), 5]))
        stepped.ask(request([7, pictures(6), 5], priority=1))
        stepped.finish()
        assert pictures.encoded == [1, 6, 5, 2, 3, 4]
        assert len(answer.tokens) == 12


def test_pictures_far_ahead_are_not_encoded_yet(tmp_path: Path) -> None:
    """Embeddings take much memory, and small chunks take them up slowly."""
    held = []
    for ahead in (30, 10_000):
        with pytest.MonkeyPatch.context() as patch, opened("qwen3vl-dense", tmp_path) as (model, pictures):
            patch.setattr("localllm.generation.request_state.AHEAD", ahead)
            with Stepped(model, itl_target=1e-9) as stepped:
                stepped.ask(request([1], most=100))
                stepped.turn(2)
                state, _ = stepped.ask(request([1, *(pictures(seed, 4, 7, segments=1) for seed in range(8)), 2]))
                most = 0
                while not state.done:
                    stepped.turn()
                    most = max(most, sum(each.embeddings is not None for each in state.media))
                assert pictures.encoded == list(range(8))
            held.append(most)
    assert held[0] <= 2 < held[1]


def test_an_encoder_that_fails_fails_its_request_only(tmp_path: Path) -> None:
    class Broken(Encoded):
        def advance(self, seconds: float = 0.0) -> bool:
            raise LocalLLMError("the picture has no pixels")

    with opened("gemma3-12", tmp_path) as (model, pictures), scheduled(model) as scheduler:
        broken = replace(pictures(1), encode=lambda: Broken(np.zeros((20, 128))))
        narrow = replace(pictures(2), encode=lambda: Encoded(np.zeros((20, 7)), 1))
        answers = [ask(scheduler, request([1, each, 2])) for each in (broken, narrow, pictures(3))]
        assert str(answers[0].error().error) == "the picture has no pixels"
        assert "embeddings of shape (20, 7), not (20, 128)" in str(answers[1].error().error)
        answers[2].result()
        assert len(answers[2].tokens) == 12


def test_ids_of_pictures_stay_in_the_cache(tmp_path: Path) -> None:
    """Penalties, processors, drafters and usage see the text; drafts still come from its repetitions."""
    with opened("qwen3vl-dense", tmp_path) as (model, pictures):
        model.use_speculation(SpeculationOptions(spec="ngram"))
        sampling = SamplingOptions(temperature=0.0, repeat_penalty=1.3, repeat_last_n=256, dry_multiplier=0.8)
        recorded, prompt, accepted = Recorded(), prompt_of(pictures, 1), list[int]()
        with Stepped(model, model.drafts()) as stepped, pytest.MonkeyPatch.context() as patch:
            accept = Sampler.accept
            patch.setattr(Sampler, "accept", lambda self, token: accepted.append(token) or accept(self, token))
            state, answer = stepped.ask(replace(request(prompt, recorded), sampling=sampling))
            while not answer.tokens:
                stepped.turn()
            assert state.drafter is not None
            assert min(state.drafter.text) >= 0
            assert min(state.tokens) < 0
            stepped.finish()
            usage = answer.result().usage
        assert usage.prompt_tokens == len(prompt) - 1 + 20
        assert accepted[: len(prompt) - 1] == [token for token in prompt if isinstance(token, int)]
        assert all(min(tokens) >= 0 for tokens in recorded.tokens)
        assert [len(tokens) for tokens in recorded.tokens] == [len(prompt) - 1 + n for n in range(12)]


def test_a_head_drafts_behind_pictures(tmp_path: Path) -> None:
    """It reads nothing in their place; answers are the same."""
    with opened("qwen35-mtp", tmp_path) as (model, pictures):
        tokens, _ = alone(model, prompt_of(pictures, 1, 2))
    with opened("qwen35-mtp", tmp_path, spec="mtp") as (model, pictures):
        eager(model)
        with scheduled(model) as scheduler:
            answers = [ask(scheduler, request(prompt_of(pictures, 1, seed))) for seed in (2, 3, 2)]
            usages = [answer.result().usage for answer in answers]
        assert answers[0].tokens == answers[2].tokens == tokens
        assert sum(usage.drafted for usage in usages) > 0


def test_a_draft_model_does_not_see_pictures(tmp_path: Path) -> None:
    with (
        opened("gemma3-12", tmp_path) as (model, pictures),
        localllm.load(tmp_path / "gemma3-12.gguf", backend="cpu", threads=1, ctx_size=256, sequences=4) as draft,
    ):
        prompt = prompt_of(pictures, 1, 2)
        tokens, _ = alone(model, prompt)
        size = model.vocabulary
        mapping = Mapping(np.arange(size, dtype=np.int32), size, None, None)
        drafter = DraftModel(draft.engine, mapping, Free(1e-6), Free(), 7)
        drafter._judge = judge = Reckless()
        drafter.acceptance = judge.acceptance
        followed = []
        took = Followed.took
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Followed, "took", lambda self, new, ends: followed.extend(new) or took(self, new, ends))
            with drafting_by(model, Drafts(Free(), 7, drafter, repeats=False)), scheduled(model) as scheduler:
                answer = ask(scheduler, request(prompt))
                assert answer.result().usage.drafted > 0
        assert answer.tokens == tokens
        assert min(followed) >= 0
        assert followed[: len(prompt) - 2] == [token for token in prompt if isinstance(token, int)]


@pytest.mark.parametrize("family", ["qwen3vl-dense", "gemma3-12", "qwen35-mtp"])
def test_pictures_come_back_after_a_restart(family: str, tmp_path: Path) -> None:
    def run() -> tuple[Answer, list[int]]:
        with opened(family, tmp_path, ctx_size=512) as (model, pictures):
            store = PrefixFiles(tmp_path / "cache", model)
            pictures(9)
            held = [
                model.engine.pool.media.of(b"%d" % n, 3, np.arange(3), 3, True)
                for n in range(len(list(tmp_path.glob("cache/*"))))
            ]
            prompt = [*range(50), pictures(1), *(7 * n % 100 for n in range(200)), pictures(2), *range(20, 60)]
            with Scheduler(stepper_of(model, store=store)) as scheduler:
                answer = ask(scheduler, request(prompt))
                answer.result()
            assert len(held) < 9
            return answer, pictures.encoded

    first, encoded = run()
    second, again = run()
    assert first.tokens == second.tokens
    assert (first.reused, encoded) == (0, [1, 2])
    assert second.reused >= 256
    assert again in ([], [2])


def test_what_a_model_cannot_take_is_refused(tmp_path: Path) -> None:
    with opened("gemma3-12", tmp_path) as (model, pictures), scheduled(model) as scheduler:
        with pytest.raises(LocalLLMError, match="no log-probabilities"):
            scheduler.submit(request([1, pictures(1)], prompt_logprobs=True), Answer())
        with pytest.raises(LocalLLMError, match="one position per token"):
            scheduler.submit(request([1, Pictures(128, True, True)(1)]), Answer())
        with pytest.raises(LocalLLMError, match="the prompt has 401 tokens"):
            scheduler.submit(request([1, pictures(1, 20, 20)]), Answer())
    with localllm.load(KIT["gemma3-12"].write(tmp_path / "x.gguf"), backend="cpu", threads=1, ctx_size=256) as model:
        with pytest.raises(LocalLLMError, match="takes no pictures or sound; load it with its mmproj file"):
            model.generate([1, Pictures(128, False, True)(1), 2])
        with pytest.raises(LocalLLMError, match="token -4 is outside the vocabulary"):
            model.generate([1, -4])
    with pytest.raises(LocalLLMError, match="a picture takes up to 300 tokens, but the context holds 256"):
        localllm.load(tmp_path / "x.gguf", backend="cpu", threads=1, ctx_size=256, media=MediaInput(span=300))


class Broken(Encoded):
    """An encoding with a bug."""

    def advance(self, seconds: float = 0.0) -> bool:
        if self.left == 1:
            raise ValueError("a bug")
        return super().advance(seconds)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_bug_of_an_encoder_ends_one_request(
    at_once: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another stream continues, and later pictures are encoded. The log has the traceback."""

    def encode() -> Broken:
        if at_once:
            raise ValueError("a bug")
        return Broken(np.zeros((20, pictures.width), np.float32))

    with opened("qwen3vl-dense", tmp_path) as (model, pictures), scheduled(model, parallel=4) as scheduler:
        stream = ask(scheduler, request(TEXT, most=200))
        broken = replace(pictures(1), encode=encode)
        error = ask(scheduler, request([*TEXT, broken, 5])).error().error
        assert isinstance(error, EncoderFailed)
        assert str(error) == "the encoder failed because of a bug; the log has the details"
        after = ask(scheduler, request(prompt_of(pictures, 2)))
        assert stream.result().usage.answer_tokens == 200
        assert after.result().usage.answer_tokens == 12
    assert capsys.readouterr().err.count("ValueError: a bug") == 1


def test_a_model_generates_from_tokens_and_pictures(tmp_path: Path) -> None:
    with opened("gemma4-31b", tmp_path, sequences=0) as (model, pictures):
        prompt = prompt_of(pictures, 1)
        reply = model.generate(prompt, temperature=0, max_tokens=5, ignore_eos=True)
        assert reply.tokens == alone(model, prompt)[0][:5]
        assert reply.usage.prompt_tokens == len(prompt) + 19
