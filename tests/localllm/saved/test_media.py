"""Pictures in saved sequences: files hold their keys, and every process gives them new ids."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.engine import Placed
from localllm.engine.media import MediaIds
from localllm.saved import prompt_cache
from localllm.saved.prompt_cache import CacheFileError, read_prompt_cache, restore, save
from localllm.saved.saved_media import content_name, header_of, with_ids
from localllm.saved.slot_files import SlotFiles
from tests.localllm.generation.support import Stepped
from tests.localllm.generation.test_media import Pictures, Recorded, opened, prompt_of, request
from tests.localllm.media_models import png, write_absolute


def answered(model: localllm.Model, prompt: list[Any]) -> Any:
    """Answer a prompt, and return its cached sequence."""
    with Stepped(model) as stepped:
        stepped.ask(request(prompt))
        stepped.finish()
        [sequence] = stepped.running.prefixes
        return stepped.engine.fork(sequence)


@pytest.mark.parametrize("family", ["qwen3vl-dense", "gemma3-12"])
def test_what_is_behind_the_last_block_is_evaluated_again(family: str, tmp_path: Path) -> None:
    """A picture there is left to the next prompt. One whose tokens see each other is never cut."""
    with opened(family, tmp_path) as (model, pictures):
        files = SlotFiles(tmp_path, model)
        text = [7 * n % 100 for n in range(50)]
        for name, prompt, kept in (
            ("text", [1, pictures(1), *text], 84),  # 71 tokens and 13 of the answer: all of them
            ("cut", [1, *text, pictures(1), 3, 4], 64 if pictures.causal else 51),
            ("later", [1, *text, *text[:20], pictures(1), 3], 64),
        ):
            sequence = answered(model, prompt)
            length = len(sequence.tokens)
            files.save(name, sequence)
            again, _ = files.load(name)
            assert again.length == (length if name == "text" else kept), name
            assert again.tokens == sequence.tokens[: again.length]
            assert again.media == [each for each in sequence.media if each.start < again.length]
            model.engine.release(again)
            model.engine.release(sequence)


def test_files_hold_keys_and_not_ids(tmp_path: Path) -> None:
    with opened("qwen3vl-dense", tmp_path) as (model, pictures):
        sequence = answered(model, prompt_of(pictures, 1, 2))
        save(tmp_path / "x", model, sequence, [])
        named = content_name(sequence.tokens, sequence.media)
        keys, first = [each.media.key for each in sequence.media], sequence.media[0].media.first
    with opened("qwen3vl-dense", tmp_path) as (model, pictures):
        held = model.engine.pool.media.of(b"another", 50, np.arange(50, dtype=np.int32), 50, True)
        kept = read_prompt_cache(tmp_path / "x", model)
        assert kept.media[0].media.first != first
        assert min(kept.tokens) >= held.first - 40
        assert content_name(kept.tokens, kept.media) == named
        sequence = model.engine.add()
        restore(kept, model, sequence)
        assert [each.media.key for each in sequence.media] == keys
        model.engine.release(sequence)


GOOD: dict[str, Any] = header_of(
    Placed(2, MediaIds().of(b"k", 3, np.array([[0, 0], [0, 1], [1, 0]], np.int32), 2, True))
)
TOKENS = [5, 6, -1, -1, -1, 7]


def test_headers_describe_the_media_of_a_file() -> None:
    ids = MediaIds()
    tokens, [placed] = with_ids(TOKENS, [GOOD], ids, 32)
    assert tokens == [5, 6, *placed.media.ids, 7]
    assert (placed.start, placed.media.key, placed.media.advance, placed.media.causal) == (2, b"k", 2, True)
    np.testing.assert_array_equal(placed.media.positions, [[0, 0], [0, 1], [1, 0]])
    cut, _ = with_ids(TOKENS[:4], [GOOD], ids, 32)  # the last picture may be cut
    assert cut == tokens[:4]


BAD: dict[str, list[Any]] = {
    "start": [-1, 3, 6, 1.0, None, "2"],
    "tokens": [0, -3, 2, 4, 1 << 40, None],
    "key": [b"k", "zz", "00" * 300, None],
    "advance": [-1, 30, 1 << 29, 1 << 40, None],
    "causal": [1, None],
    "axes": [0, 1, 3, 99, None],
    "positions": ["", "!", "AAAA", GOOD["positions"][:12], None, 5],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_damaged_headers_are_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"its (header|media)"):
        with_ids(TOKENS, [{**GOOD, name: value}], MediaIds(), 32)


def test_media_and_tokens_must_agree(tmp_path: Path) -> None:
    for tokens, headers in (
        (TOKENS, []),
        ([*TOKENS, -1], [GOOD]),
        (TOKENS, [GOOD, GOOD]),
        ([5, 6, 7, 8, 9, 10], [GOOD]),
        (TOKENS[:4], [GOOD, {**GOOD, "start": 3}]),
    ):
        with pytest.raises(ValueError, match=r"its (header|media)"):
            with_ids(tokens, headers, MediaIds(), 32)


def test_a_forged_layout_does_not_answer_for_a_picture() -> None:
    ids, shape = MediaIds(), np.array([[0, 0], [0, 1], [1, 0]], np.int32)
    _, [forged] = with_ids(TOKENS, [GOOD], ids, 32)
    for tokens, positions, advance, causal in (
        (3, shape[::-1], 2, True), (3, shape, 3, True), (3, shape, 2, False), (5, np.arange(5), 5, True),
    ):  # fmt: skip
        found = ids.of(b"k", tokens, positions, advance, causal)
        assert set(found.ids).isdisjoint(forged.media.ids)
        np.testing.assert_array_equal(found.positions, positions.reshape(tokens, -1))
    assert ids.of(b"k", 3, shape, 2, True) is forged.media


def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("gemma3-12", tmp_path) as (model, pictures):
        sequence = answered(model, prompt_of(pictures, 1))
        dumps = json.dumps

        def wrong(header: dict[str, Any], **how: Any) -> str:
            header["media"][0]["axes"] = 7
            return dumps(header, **how)

        monkeypatch.setattr(prompt_cache.json, "dumps", wrong)
        save(tmp_path / "x", model, sequence, [])
        with pytest.raises(CacheFileError, match="x: is damaged: its media have no usable 'positions'"):
            read_prompt_cache(tmp_path / "x", model)


def test_positions_on_too_few_axes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("qwen3vl-dense", tmp_path) as (model, pictures):
        sequence = answered(model, prompt_of(pictures, 1))
        dumps, [(start, real)] = json.dumps, sequence.media
        forged = MediaIds().of(real.key, real.tokens, real.positions[:, :2], real.advance, True)

        def wrong(header: dict[str, Any], **how: Any) -> str:
            return dumps(header | {"media": [header_of(Placed(start, forged))]}, **how)

        monkeypatch.setattr(prompt_cache.json, "dumps", wrong)
        save(tmp_path / "x", model, sequence, [])
        with pytest.raises(CacheFileError, match="x: is damaged: its media have no usable 'positions'"):
            read_prompt_cache(tmp_path / "x", model)


def test_pictures_of_different_requests_have_different_files() -> None:
    ids = MediaIds()
    one, other = (ids.of(key, 3, np.arange(3, dtype=np.int32), 3, True) for key in (b"1", b"2"))
    names = [content_name([5, *media.ids], [Placed(1, media)]) for media in (one, other, one)]
    assert names[0] == names[2] != names[1]
    assert isinstance(Pictures, type)


@pytest.mark.parametrize("case", ["hunyuanvl", "deepseek4v"])
def test_pictures_that_depend_on_their_place_are_restored(case: str, tmp_path: Path) -> None:
    """The second answer, behind a restored slot, has the bits of one without, and encodes no picture again."""
    path, files = write_absolute(tmp_path, case), tmp_path / "slots"
    files.mkdir()
    rows: dict[str, Any] = {}
    for process in ("first", "restored", "alone"):
        with localllm.load(path, backend="cpu", threads=1, ctx_size=1024) as model:
            held = model.engine.pool.media.of(b"other", 9, np.arange(9, dtype=np.int32), 9, True)
            chunks = model.media(
                "Look at this: <__media__> and <__media__> " + "again " * 12, [png(96, 64), png(64, 96)]
            )
            prompt: list[Any] = [each for chunk in chunks for each in chunk.prompt]
            pictures = [each for each in prompt if not isinstance(each, int)]
            assert (case == "hunyuanvl") == any(each.positions.min() < 0 for each in pictures)
            slots = SlotFiles(files, model)
            with Stepped(model) as stepped:
                if process == "restored":
                    stepped.running.slots.take_up(partial(slots.load, "x"))
                recorded = Recorded()
                _, answer = stepped.ask(request(prompt, recorded))
                stepped.finish()
                rows[process] = recorded.rows
                if process == "first":
                    [sequence] = stepped.running.prefixes
                    slots.save("x", sequence)
                else:
                    last = prompt.index(pictures[1])
                    behind = sum(1 if isinstance(each, int) else each.tokens for each in prompt[: last + 1])
                    assert (answer.reused > behind) == (process == "restored")
            assert held.first < 0
    np.testing.assert_array_equal(rows["restored"], rows["alone"])
    np.testing.assert_array_equal(rows["first"], rows["alone"])
