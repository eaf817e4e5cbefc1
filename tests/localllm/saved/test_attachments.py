"""Pictures and sounds of saved conversations: the model sees them again, and hostile files lose only the pictures."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.chat import Conversation
from localllm.cli.chat.journal import MOST, Journal, last
from localllm.loading.media_parts import Absent, Located, MediaParts, Medium
from localllm.media import plain
from localllm.media.decode import Decoder
from localllm.saved import attachments, prompt_cache
from localllm.saved.attachments import ContextCheck, Lost, described, left_out, restored
from tests.localllm.media_models import png, wav, write_pair

QUICK = {"temperature": 0.0, "max_tokens": 6}


def asked(path: Path, *words: str) -> list[dict[str, Any]]:
    return [*({"type": "image", "image": str(path)} for _ in "x"), *({"type": "text", "text": word} for word in words)]


def opened(path: Path) -> localllm.Model:
    return localllm.load(path, backend="cpu", threads=1, ctx_size=1024)


def talk_of(model: localllm.Model, notes: list[str]) -> Conversation:
    talk = model.conversation(**QUICK)
    talk._tell = notes.append
    return talk


@pytest.mark.parametrize("how", ["save", "journal"])
def test_a_saved_conversation_has_its_pictures(how: str, tmp_path: Path) -> None:
    """The next answer equals the unsaved conversation's, although the files are gone."""
    path, picture, notes = write_pair(tmp_path), tmp_path / "[a].png", list[str]()
    picture.write_bytes(png())
    state, file = tmp_path / "state", tmp_path / "talk.kv"
    state.mkdir()
    with opened(path) as model:
        talk = talk_of(model, notes)
        str(talk.say(asked(picture, "what?")))
        str(talk.say([*asked(picture), {"type": "image", "image": np.full((20, 30), 7, np.uint8)}]))
        Journal(state, "m").keep(*talk.located, talk.attachments)
        talk.save(file)
        expected, tokens = str(talk.say("and?")), talk.tokens
        told = talk.told
    picture.unlink()
    with opened(path) as model:
        talk = talk_of(model, notes)
        if how == "save":
            assert not talk.load(file).problem
        else:
            found = last(state)
            assert found is not None
            talk.resume(found.messages, *found.attached())
        assert talk.told == told[:4]
        reply = talk.say("and?")
        assert str(reply) == expected
        assert len(talk.tokens) == len(tokens)
        assert (reply.end.usage.reused_tokens > 60) == (how == "save")  # the pictures are not evaluated again
    assert notes == []
    assert len(list(state.glob("*.media/*"))) == 2  # the same file twice, and an array


def test_files_are_private_and_go_with_their_conversation(tmp_path: Path) -> None:
    one, other = (Located(0, 0, Medium("image", png(seed=seed), "a.png")) for seed in (1, 2))
    turn = [{"role": "user", "content": "[a.png]"}]
    journal = Journal(tmp_path, "m")
    journal.keep(turn, [one], lambda: described([one], 0))
    [file] = tmp_path.glob("*.json")
    [content] = tmp_path.glob("*.media/*")
    assert [path.stat().st_mode & 0o777 for path in (file, content.parent, content)] == [0o600, 0o700, 0o600]
    before = content.stat().st_mtime_ns
    journal.keep([*turn, *turn], [one], lambda: described([one], 0))
    assert content.stat().st_mtime_ns == before  # written once
    journal.keep(turn, [other], lambda: described([other], 0))  # the first was undone
    assert [path.name == content.name for path in content.parent.iterdir()] == [False]
    found = last(tmp_path)
    again = Journal(tmp_path, "m", found)
    again.began(turn, [other], described([other], 0).keys)
    again.keep(turn * 2, [], lambda: described([], 0))
    assert not list(tmp_path.glob("*.media"))
    again.keep([])
    assert list(tmp_path.iterdir()) == []
    for _ in range(MOST + 2):
        Journal(tmp_path, "m").keep(turn, [one], lambda: described([one], 0))
    assert len(list(tmp_path.glob("*.media"))) == MOST


MESSAGES = [{"role": "user", "content": "[a.png]what? [a.png]"}, {"role": "assistant", "content": "x[b]"}]
LOCATED = [Located(0, 0, Medium("image", b"1", "a.png")), Located(0, 13, Medium("image", b"2", "a.png"))]
KEY = described(LOCATED[:1], 0).rows[0]["files"][0]
CONTENTS = described(LOCATED, 0).contents


def read(key: str) -> bytes:
    if key not in CONTENTS:
        raise Lost("its content is missing")
    return CONTENTS[key]


def test_rows_name_their_places() -> None:
    rows = json.loads(json.dumps(described(LOCATED, 0).rows))
    found, problems = restored(MESSAGES, rows, read)
    assert [(each.message, each.start, each.medium.source) for each in found] == [(0, 0, b"1"), (0, 13, b"2")]
    assert problems == []


BAD: list[Any] = [
    None, 5, {}, [None], [[]], "x",
    *([{"message": 0, "start": 0, "kind": "image", "name": "a.png", "files": [KEY], **wrong}] for wrong in (
        {"message": -1}, {"message": 2}, {"message": True}, {"message": "0"}, {"start": -7}, {"start": 1},
        {"message": 1, "start": -3, "name": "b"},
        {"start": 1 << 70}, {"kind": "video"}, {"kind": []}, {"name": "b.png"}, {"name": ""}, {"name": 3},
        {"files": []}, {"files": None}, {"files": ["../../../etc/passwd"]}, {"files": [KEY.upper()]},
        {"files": [KEY + "\n"]},
        {"files": [KEY] * 3}, {"files": [5]},
    )),
]  # fmt: skip


@pytest.mark.parametrize("rows", BAD)
def test_hostile_rows_stay_names(rows: Any) -> None:
    found, problems = restored(MESSAGES, rows, read)
    assert found == []
    assert len(problems) == 1
    assert left_out(problems).startswith("one picture or sound is kept as a name only: ")


def test_what_cannot_be_read_now_keeps_its_row() -> None:
    """The next process may read it."""
    rows = [{"message": 0, "start": 0, "kind": "image", "name": "a.png", "files": ["0" * 64]}]
    [each], problems = restored(MESSAGES, rows, read)
    assert (each.medium.source, problems) == (Absent(("0" * 64,), "its content is missing"), [])
    assert described([each], 0).rows == rows
    media = MediaParts()
    messages, problems = media.put_back(MESSAGES, [each], lambda medium: None)
    assert problems == ["a.png: its content is missing"]
    assert media.readable(messages) == MESSAGES
    assert media.located(messages) == (MESSAGES, [each])


def reasons(located: list[Located]) -> list[str]:
    return [each.medium.source.reason for each in located if isinstance(each.medium.source, Absent)]


def test_contents_are_compared_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = described(LOCATED, 0).rows
    assert reasons(restored(MESSAGES, list(rows), lambda key: b"other")[0]) == ["its content is damaged"] * 2
    assert restored(MESSAGES, [*rows[::-1]], read)[1] == ["a row of the list of pictures and sounds is damaged"]
    monkeypatch.setattr(attachments, "MOST_BYTES", 1)
    found, problems = restored(MESSAGES, list(rows), read)
    assert (found[0].medium.source, reasons(found), problems) == (b"1", ["too large"], [])
    kept = described(LOCATED, 0)  # the newest are kept
    assert ([row["start"] for row in kept.rows], kept.problems) == ([13], ["a.png: too large to be saved"])
    many = left_out([f"{n}: x" for n in range(7)])
    assert many == "7 pictures and sounds are kept as a name only: 0: x; 1: x; 2: x; and 4 more"


def test_rows_are_counted_with_those_of_absent_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with more rows would lose all of them."""
    monkeypatch.setattr(attachments, "MOST_ROWS", 1)
    absent = [Located(0, start, Medium("image", Absent(("0" * 64,), "gone"), "a.png")) for start in (0, 13)]
    kept = described(absent, 0)
    assert [row["start"] for row in kept.rows] == [13]
    assert kept.problems == ["a.png: more than 1 pictures and sounds cannot be saved"]
    assert len(restored(MESSAGES, list(kept.rows), read)[0]) == 1


def test_a_failed_picture_does_not_stop_saving_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder of the pictures is a link: nothing in its target is written or deleted."""
    one, other = (Located(0, 0, Medium("image", png(seed=seed), "a.png")) for seed in (1, 2))
    turn = [{"role": "user", "content": "[a.png]"}]
    journal = Journal(tmp_path, "m")
    journal.keep(turn, [one], lambda: described([one], 0))
    [folder] = tmp_path.glob("*.media")
    elsewhere = folder.rename(tmp_path / "elsewhere")
    before = list(elsewhere.iterdir())
    folder.symlink_to(elsewhere)
    for count in (2, 3):
        journal.keep(turn * count, [other], lambda: described([other], 0))
        found = last(tmp_path)
        assert found is not None
        assert len(found.messages) == count
    assert list(elsewhere.iterdir()) == before
    [note] = capsys.readouterr().err.splitlines()
    assert "note: the pictures and sounds of the conversation cannot be saved: " in note
    folder.unlink()
    journal.keep(turn, [other], lambda: described([other], 0))
    assert len(list(folder.iterdir())) == 1  # tried again


@pytest.mark.parametrize("how", ["load", "resume"])
def test_ctrl_c_while_pictures_are_put_back_loses_nothing(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, picture, file, state = write_pair(tmp_path), tmp_path / "a.png", tmp_path / "talk.kv", tmp_path / "state"
    picture.write_bytes(png())
    state.mkdir()
    with opened(path) as model:
        talk = talk_of(model, [])
        str(talk.say(asked(picture, "what?")))
        talk.save(file)
        other = talk_of(model, [])
        picture.write_bytes(png(seed=3))
        str(other.say(asked(picture, "and this?")))
        journal = Journal(state, "m")
        journal.keep(*other.located, other.attachments)
        written = {each: each.read_bytes() for each in state.rglob("*") if each.is_file()}
        told, tokens = other.located, list(other.tokens)

        def interrupted(*_: Any) -> list[Any]:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(model.encoders, "parts", interrupted)
            with pytest.raises(KeyboardInterrupt):
                other.load(file) if how == "load" else other.resume(*talk.located)
        assert (other.located, other.tokens) == (told, tokens)
        journal.keep(*other.located, other.attachments)
        assert {each: each.read_bytes() for each in state.rglob("*") if each.is_file()} == written
        assert str(other.again())


def test_pictures_beyond_the_context_stay_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not decoded, neither are those after several that cannot be decoded."""
    path, notes, decoded = write_pair(tmp_path), list[str](), list[bytes]()
    with opened(path) as model:
        talk, decode = talk_of(model, notes), Decoder.picture

        def counted(decoder: Decoder, source: Any, name: str = "") -> Any:
            decoded.append(source)
            return decode(decoder, source, name)

        monkeypatch.setattr(Decoder, "picture", counted)
        pictures = [png(seed=seed) for seed in range(9)]
        each = sum(
            part.tokens for part in model.encoders.parts(Medium("image", pictures[0])) if not isinstance(part, str)
        )
        decoded.clear()
        monkeypatch.setattr(talk, "_context", 2 * each + 1)
        steps = list[tuple[int, int]]()
        messages = [{"role": "user", "content": "[a.png]"}] * 9
        located = [Located(n, 0, Medium("image", data, "a.png")) for n, data in enumerate(pictures)]
        talk.resume(messages, located, progress=lambda what, done, total: steps.append((done, total)))
        assert steps == [(done, 9) for done in range(9)]
        assert decoded == pictures[:5:-1]
        assert [talk._media.readable(talk.messages)[n]["content"] == "[a.png]" for n in range(9)] == [True] * 7 + [
            False
        ] * 2
        assert len(talk.located[1]) == 9
        assert notes[0].startswith(
            "7 pictures and sounds are kept as a name only: a.png: newer pictures and sounds fill"
        )
        monkeypatch.setattr(talk, "_context", each)
        talk.resume(messages[:1], [Located(0, 0, Medium("image", pictures[0], "a.png"))])
        assert notes.pop().endswith(f"a.png: has {each} tokens, and the context has {each}")
        decoded.clear()
        bad = [Located(n, 0, Medium("image", b"\x89PNG\r\n\x1a\nhostile%d" % n, "a.png")) for n in range(9)]
        talk.resume(messages, bad)
        assert len(decoded) == 4
        assert "a.png: not decoded, because 4 others failed; a.png: " in notes[1]


def test_a_picture_larger_than_the_context_leaves_room_for_others() -> None:
    """Few are decoded if all are too large."""
    sizes, decoded = {"huge": 1000, "small": 30}, list[str]()

    def tokens(medium: Medium) -> int:
        decoded.append(medium.what)
        return sizes[medium.what]

    def refused(*names: str) -> list[str]:
        decoded.clear()
        check, found = ContextCheck(tokens, 100, len(names)), []
        for name in names:  # the newest first
            try:
                check(Medium("image", b"", name))
            except localllm.LocalLLMError as error:
                found.append(str(error))
        return found

    assert refused("huge", "small", "small") == ["huge: has 1000 tokens, and the context has 100"]
    full = "small: newer pictures and sounds fill the context of 100 tokens"
    assert refused("small", "huge", *["small"] * 4) == ["huge: has 1000 tokens, and the context has 100", full, full]
    assert len(decoded) == 5
    assert len(refused(*["huge"] * 9)) == 9
    assert len(decoded) == 4


def test_only_those_that_are_decoded_are_counted(tmp_path: Path) -> None:
    steps, located = list[tuple[int, int]](), list[Located]()
    for n, source in enumerate([png(), Absent(("0" * 64,), "its content is missing"), png(seed=1)]):
        located.append(Located(n, 0, Medium("image", source, "a.png")))
    with opened(write_pair(tmp_path)) as model:
        talk = talk_of(model, [])
        messages = [{"role": "user", "content": "[a.png]"}] * 3
        talk.resume(messages, located, progress=lambda what, done, total: steps.append((done, total)))
    assert steps == [(0, 2), (1, 2)]


def test_frames_are_counted_before_they_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(write_pair(tmp_path)) as model:
        monkeypatch.setattr(Decoder, "picture", lambda *_: pytest.fail("decoded"))
        with pytest.raises(localllm.LocalLLMError, match="expected 1 to 1 frames of equal size, got 2"):
            model.encoders.parts(Medium("image", [png()] * 2))


def test_the_contents_of_a_journal_are_not_followed_elsewhere(tmp_path: Path) -> None:
    turn, one = [{"role": "user", "content": "[a.png]"}], Located(0, 0, Medium("image", png(), "a.png"))
    Journal(tmp_path, "m").keep(turn, [one], lambda: described([one], 0))
    [content] = tmp_path.glob("*.media/*")
    data = content.read_bytes()
    (tmp_path / "secret").write_bytes(data)

    def problem() -> str:
        found = last(tmp_path)
        assert found is not None
        assert found.messages == turn
        located, _ = found.attached()
        return (*reasons(located), "")[0]

    assert problem() == ""
    content.write_bytes(data[:-1])
    assert problem() == "its content is damaged"
    content.unlink()
    assert problem() == "its content is missing"
    content.symlink_to(tmp_path / "secret")
    assert problem() == "its content cannot be read: is a link, which is not followed"
    content.unlink()
    with content.open("wb") as file:
        file.truncate(1 << 40)
    assert "its content cannot be read: " in problem()
    content.unlink()
    content.parent.rmdir()
    content.parent.symlink_to(tmp_path)
    (tmp_path / content.name).write_bytes(data)
    assert problem() == "its folder is a link, which is not followed"


def test_a_model_that_does_not_read_them_gets_the_names(tmp_path: Path) -> None:
    """The pictures stay in the conversation, for a model that does."""
    path, picture, file, notes = write_pair(tmp_path), tmp_path / "a.png", tmp_path / "talk.kv", list[str]()
    picture.write_bytes(png())
    with opened(path) as model:
        talk = talk_of(model, notes)
        str(talk.say(asked(picture, "what?")))
        talk.save(file)
    with localllm.load(path, backend="cpu", threads=1, ctx_size=1024, mmproj="off") as model:
        talk = talk_of(model, notes)
        assert "loaded without" in talk.load(file).problem
        [note] = notes
        assert note.startswith("one picture or sound is kept as a name only: ")
        assert "\n" not in note
        str(talk.say("and?"))
        talk.save(file, force=True)
    with opened(path) as model:
        talk = talk_of(model, notes)
        talk.load(file)
        assert len(notes) == 1
        assert len(talk.located[1]) == 1
        assert min(talk._prompt(talk.messages)) < 0


def test_a_picture_that_cannot_be_decoded_stays_a_name(tmp_path: Path) -> None:
    path, notes = write_pair(tmp_path), list[str]()
    with opened(path) as model:
        talk = talk_of(model, notes)
        bad = Located(0, 0, Medium("image", b"\x89PNG\r\n\x1a\nhostile", "a.png"))
        talk.resume([{"role": "user", "content": "[a.png]what?"}, {"role": "assistant", "content": "x"}], [bad])
        assert len(notes) == 1
        assert "a.png: " in notes[0]
        assert str(talk.say("and?"))


def test_files_without_pictures_have_the_format_of_before(tmp_path: Path) -> None:
    path, picture = write_pair(tmp_path), tmp_path / "a.png"
    picture.write_bytes(png())
    with opened(path) as model:
        talk = talk_of(model, [])
        str(talk.say("what?"))
        talk.save(tmp_path / "text.kv")
        str(talk.say(asked(picture, "what?")))
        talk.save(tmp_path / "picture.kv")
        versions = [struct.unpack_from("<8sI", (tmp_path / name).read_bytes())[1] for name in ("text.kv", "picture.kv")]
        assert versions == [prompt_cache.VERSION, prompt_cache.WITH_CONTENTS]
        data = (tmp_path / "picture.kv").read_bytes()
        talk.load(tmp_path / "picture.kv")
        changed = data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]  # in the picture
        for damaged, problem in ((data[:-40], "truncated or damaged"), (changed, "does not match its digest")):
            (tmp_path / "damaged.kv").write_bytes(damaged)
            with pytest.raises(prompt_cache.CacheFileError, match=problem):
                talk.load(tmp_path / "damaged.kv")


@pytest.mark.parametrize("source", [
    (np.linspace(-1, 1, 5000), 22050), (np.arange(-400, 400, dtype=np.int16).reshape(400, 2), 44100),
    (np.arange(256, dtype=np.uint8), 8000),
])  # fmt: skip
def test_sounds_in_memory_become_files_of_the_same_samples(source: Any) -> None:
    with Decoder() as decoder:
        [file] = Medium("audio", source).files(16000)
        np.testing.assert_array_equal(decoder.sound(file, 16000), decoder.sound(source, 16000))
        assert Medium("audio", wav()).files(16000) == (wav(),)


def test_pictures_in_memory_become_files_of_the_same_pixels() -> None:
    random = np.random.default_rng(0)
    frames = [random.integers(0, 256, shape, np.uint8) for shape in ((5, 7, 4), (5, 7, 3))]
    with Decoder() as decoder:
        files = Medium("image", frames).files(0)
        for file, frame in zip(files, frames, strict=True):
            np.testing.assert_array_equal(decoder.picture(file), frame[..., :3])


@pytest.mark.parametrize("pillow", [True, False])
def test_large_pictures_in_memory_become_png_once(pillow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PPM, 24 megapixels exceed the largest file that is saved."""
    if not pillow:
        monkeypatch.setattr(plain, "find_spec", lambda name: None)
    medium = Medium("image", np.full((4000, 6000), 7, np.uint8))
    [file] = medium.files(0)
    assert (len(file) < attachments.MOST_FILE) == pillow
    assert medium.files(0)[0] is file
