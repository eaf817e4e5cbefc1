"""Pictures in sequences: llama.cpp's logits behind them, their ids, positions, forks and truncation."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from localllm.backends.base import BackendError
from localllm.base.errors import LocalLLMError
from localllm.engine import CacheSequence, Engine, MediaSpan, SequenceRows
from localllm.engine.media import LOWEST, Media, MediaIds, place, positions_on_axes, span_ends
from localllm.engine.paging import BlockPool
from localllm.gguf import open_gguf
from localllm.loading.loader import BoundModel, bind
from localllm.options import LoadOptions
from tests.localllm.multimodal import CASES, Prompt, kit, prompts, span, write_text_model
from tests.models.support import nmse

VOCABULARY = 512  # of the kit's text models, without padding
# A prompt of each case for tests of bits: a picture of several tokens, or two of them.
PROMPTS = {"gemma3": "two", "qwen2vl": "two", "qwen3vl": "two", "qwen3.5": "text97", "gemma4v-31b": "text97"}

SHORT = {"ultravox": ("short",), "qwen2.5o": ("noise64",)}  # the other prompts take long to encode

needs_kit = pytest.mark.skipif(kit() is None, reason="needs the reference kit")


@contextmanager
def opened(case: str, folder: Path, backend: str = "cpu", threads: int = 1) -> Iterator[BoundModel]:
    options = LoadOptions(backend=backend, cache_type_k="f32", cache_type_v="f32", ctx_size=2048, threads=threads)
    with open_gguf(write_text_model(case, folder)) as file:
        model = bind(file, options, media=CASES[case][0])
        yield model
        model.close()


def ids_of(engine: Engine, each: MediaSpan) -> Media:
    return engine.pool.media.of(each.key, each.tokens, each.positions, each.advance, each.causal)


def embeddings_of(each: MediaSpan) -> np.ndarray:
    encoding = each.encode()
    while not encoding.advance():
        pass
    return encoding.embeddings


def parts_of(engine: Engine, prompt: Prompt, size: int) -> Iterator[tuple[list[int], np.ndarray | None]]:
    """Yield the tokens of a prompt in parts of at most `size` tokens, with the embeddings of media tokens."""
    for chunk in prompt.chunks:
        if not isinstance(chunk, MediaSpan):
            for at in range(0, len(chunk), size):
                yield chunk[at : at + size], None
            continue
        media = ids_of(engine, chunk)  # alive until its tokens are in a sequence
        ids, rows = list(media.ids), embeddings_of(chunk)
        most = size if chunk.causal else chunk.tokens
        for at in range(0, len(ids), most):
            yield ids[at : at + most], rows[at : at + most]


def logits_of(engine: Engine, prompt: Prompt, size: int = 400, crowd: Sequence[int] = ()) -> np.ndarray:
    """Return the logits after a prompt and after each of the tokens that follow, as the kit has them.

    With a `crowd`, a second sequence gets a token of it in every step.
    """
    sequence, other, found = engine.add(), engine.add(), []
    for number, (tokens, media) in enumerate(
        chain(parts_of(engine, prompt, size), (([t], None) for t in prompt.following))
    ):
        rows = [SequenceRows(sequence, tokens, media=media)]
        if crowd:
            rows.insert(number % 2, SequenceRows(other, [crowd[number % len(crowd)]]))
        results = engine.step(rows)
        own = next(result for row, result in zip(rows, results, strict=True) if row.sequence is sequence)
        found.append(own.logits[-1].copy())
    engine.release(other)
    engine.release(sequence)
    return np.array(found[-1 - len(prompt.following) :])[:, :VOCABULARY]


@needs_kit
@pytest.mark.parametrize("case", CASES)
def test_the_logits_behind_pictures_and_sound_are_those_of_llama_cpp(case: str, tmp_path: Path) -> None:
    with opened(case, tmp_path) as model:
        for prompt in prompts(case, SHORT.get(case, ())):
            error = nmse(logits_of(model.engine, prompt), prompt.logits).max()
            assert error < CASES[case][1], (prompt.name, error)


@needs_kit
@pytest.mark.parametrize(("case", "name"), [("gemma3", "two"), ("qwen3vl", "tiny"), ("gemma4v-e2b", "text97")])
def test_the_reference_agrees(case: str, name: str, tmp_path: Path) -> None:
    with opened(case, tmp_path, "reference") as model:
        for prompt in prompts(case, [name]):
            assert nmse(logits_of(model.engine, prompt), prompt.logits).max() < CASES[case][1]


@needs_kit
@pytest.mark.parametrize("case", PROMPTS)
def test_logits_repeat_to_the_bit(case: str, tmp_path: Path) -> None:
    """Chunks, other sequences in the step, and the number of threads change nothing."""
    [prompt] = prompts(case, [PROMPTS[case]])
    found = []
    for threads in (1, 2):
        with opened(case, tmp_path, threads=threads) as model:
            found += [logits_of(model.engine, prompt, *how) for how in ((400,), (1,), (3, [5, 6, 7]))]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@needs_kit
def test_forks_and_truncated_sequences_keep_their_positions(tmp_path: Path) -> None:
    [prompt] = prompts("qwen3vl", ["two"])
    with opened("qwen3vl", tmp_path) as model:
        engine = model.engine
        sequence = engine.add()
        for tokens, media in parts_of(engine, prompt, 400):
            engine.step([SequenceRows(sequence, tokens, media=media)])
        length, media = sequence.length, sequence.media.copy()
        assert sum(each.media.advance - each.media.tokens for each in media) < 0  # positions differ from indices
        fork = engine.fork(sequence)
        after = [engine.step([SequenceRows(sequence, [token])])[0].logits.copy() for token in prompt.following]
        for token, expected in zip(prompt.following, after, strict=True):
            np.testing.assert_array_equal(engine.step([SequenceRows(fork, [token])])[0].logits, expected)
        assert engine.truncate(fork, length) == length
        np.testing.assert_array_equal(engine.step([SequenceRows(fork, prompt.following[:1])])[0].logits, after[0])
        inside = media[1].start + 2  # in the second picture, whose rows are evaluated again
        assert engine.truncate(fork, inside) == inside
        assert fork.media == media
        rest, rows = (
            sequence.tokens[inside:length],
            embeddings_of(next(c for c in prompt.chunks[::-1] if isinstance(c, MediaSpan))),
        )
        engine.step([SequenceRows(fork, rest, media=rows[2:])])
        np.testing.assert_array_equal(engine.step([SequenceRows(fork, prompt.following[:1])])[0].logits, after[0])
        engine.truncate(fork, 0)
        assert fork.media == []


@needs_kit
def test_a_picture_whose_tokens_see_each_other_is_never_cut(tmp_path: Path) -> None:
    [prompt] = prompts("gemma3", ["noise64"])
    with opened("gemma3", tmp_path) as model:
        engine, sequence = model.engine, model.engine.add()
        parts = parts_of(engine, prompt, 400)
        text = next(parts)[0]
        engine.step([SequenceRows(sequence, text)])
        ids, rows = next(parts)
        assert rows is not None
        with pytest.raises(LocalLLMError, match="cuts a picture whose tokens see each other"):
            engine.step([SequenceRows(sequence, ids[:9], media=rows[:9])])
        with pytest.raises(LocalLLMError, match="16 tokens of pictures or sound, but embeddings for 9"):
            engine.step([SequenceRows(sequence, ids, media=rows[:9])])
        assert sequence.length == len(text)
        engine.step([SequenceRows(sequence, ids, media=rows)])
        assert engine.truncate(sequence, sequence.length - 3) == len(text)
        assert sequence.media == []


def picture(seed: int, count: int, causal: bool = True) -> MediaSpan:
    return span(np.full((count, 4), seed, np.float32), causal=causal)


def media_of(ids: MediaIds, each: MediaSpan) -> Media:
    return ids.of(each.key, each.tokens, each.positions, each.advance, each.causal)


def test_two_pictures_never_share_ids_and_one_keeps_its_own() -> None:
    ids = MediaIds()
    held = [media_of(ids, picture(seed, 5 + seed)) for seed in range(20)]
    assert len({token for media in held for token in media.ids}) == sum(media.tokens for media in held)
    assert all(ids.find(token) is media for media in held for token in media.ids)
    assert media_of(ids, picture(3, 8)) is held[3]
    firsts = [media.first for media in held]
    del held[4:9]
    gc.collect()
    for seed in range(100, 300):  # the ids of pictures that are gone are not used again soon
        held.append(media_of(ids, picture(seed, 7)))
        assert held[-1].first not in firsts
    assert all(ids.find(token) is media for media in held for token in media.ids)
    assert all(token < 0 for media in held for token in media.ids)


def test_ids_are_used_again_after_the_lowest() -> None:
    ids = MediaIds()
    kept = media_of(ids, picture(1, 6))
    ids._next = LOWEST + 10
    low = media_of(ids, picture(2, 8))
    assert low.first == LOWEST + 2
    again = media_of(ids, picture(3, 5))
    assert (kept.first, again.first) == (-6, -11)  # below the picture that is still in use
    assert [ids.find(token) for token in (-6, -1, -7, LOWEST + 2)] == [kept, kept, again, low]
    with pytest.raises(BackendError, match="outside the vocabulary, and no picture"):
        ids.find(-12)


def test_positions_behind_pictures() -> None:
    ids, plain = MediaIds(), MediaIds()
    grid = np.array([[0, y, x] for y in range(2) for x in range(3)])  # t, y, x
    wide = span(np.zeros((6, 4)), grid, advance=3)
    media = media_of(ids, wide)
    tokens = [1, 2, *media.ids, 3, *media.ids, 4, 5]
    placed = place(tokens, 0, ids)
    assert [(each.start, each.stop) for each in placed] == [(2, 8), (9, 15)]
    found = positions_on_axes(placed, 0, len(tokens), 3)
    first, second = grid + 2, grid + 6
    expected = np.concatenate([[[0] * 3, [1] * 3], first, [[5] * 3], second, [[9] * 3, [10] * 3]])
    np.testing.assert_array_equal(found, expected)
    for start, stop in ((0, 1), (3, 12), (8, 17), (14, 15), (16, 17)):
        np.testing.assert_array_equal(positions_on_axes(placed, start, stop, 3), expected[start:stop])
    assert not media.plain
    assert media_of(plain, picture(1, 4)).plain
    whole = [media_of(ids, picture(9, 4, causal=False))]
    placed = place([1, *whole[0].ids, 2], 10, ids)
    np.testing.assert_array_equal(span_ends(placed, 10, 16), [10, 14, 14, 14, 14, 15])


def test_sequences_know_their_media() -> None:
    pool = BlockPool(8, 4)
    media = media_of(pool.media, picture(1, 6))
    sequence: CacheSequence = pool.new_sequence()
    ids = list(media.ids)
    for tokens in ([7, *ids[:2]], ids[2:5], [ids[5], 8]):
        sequence.append(tokens)
    assert [(each.start, each.media) for each in sequence.media] == [(1, media)]
    fork = sequence.fork()
    sequence.truncate(4)
    assert (len(sequence.media), len(fork.media)) == (1, 1)
    sequence.truncate(1)
    assert (sequence.media, len(fork.media)) == ([], 1)
    del media
    gc.collect()
    assert fork.common_prefix([7, *ids, 9]) == 7
    assert pool.media.find(ids[0]) is fork.media[0].media
