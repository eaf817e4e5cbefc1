"""Conversations in prompt cache files continue with the same bits after loading, and no file can destroy user data."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm as api
from localllm.backends.base import BackendError
from localllm.base.files.outputs import OutputError
from localllm.chat import Conversation, template_of
from localllm.engine import SLACK
from localllm.generation.interfaces import SchedulerLimits
from localllm.gguf import open_gguf
from localllm.gguf.identity import identity
from localllm.options import AnswerOptions
from localllm.plan import BLOCK
from localllm.saved import prompt_cache
from localllm.saved.prefix_files import PrefixFiles
from localllm.saved.prompt_cache import CacheFileError, packed, read_prompt_cache, restore, save, unpacked
from localllm.saved.slot_files import SlotFiles
from tests.conftest import full_disk
from tests.localllm.support import localllm, write_model
from tests.models.kit import KIT

GREEDY = api.SamplingOptions(temperature=0.0, frequency_penalty=0.5, repeat_last_n=1000)
IDS = [1, *range(270, 350), *range(300, 350), *range(280, 290)]  # two KV cache blocks and a part of one
MESSAGES = [{"role": "user", "content": "é\u2028\x00"}, {"role": "assistant", "content": ""}]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture(scope="module")
def model(file: Path) -> Iterator[api.Model]:
    with api.load(file, threads=1) as opened:
        yield opened


@pytest.fixture
def session(model: api.Model) -> Iterator[api.Session]:
    opened = model.session()
    yield opened
    opened.close()
    model.new_core(SchedulerLimits())  # empties the prefix cache
    assert model.pool.free_blocks == model.pool.blocks


@pytest.fixture
def kept(model: api.Model, session: api.Session, tmp_path: Path) -> Path:
    """Return a prompt cache file of IDS and MESSAGES."""
    session.evaluate(IDS, logits=False)
    save(tmp_path / "kept", model, session.sequence, MESSAGES)
    return tmp_path / "kept"


def test_what_was_kept_goes_on_with_the_same_bits(file: Path, model: api.Model, kept: Path) -> None:
    """A process with one thread writes the file. A process with two threads reads the file into other KV
    cache blocks.
    """
    truth = model.logits([*IDS, 300, 301])[-2:]
    with api.load(file, threads=2) as other:
        before, session = other.session(), other.session()
        before.evaluate([1, 2], logits=False)
        found = read_prompt_cache(kept, other)
        assert (found.tokens, found.messages, found.problem) == (IDS, MESSAGES, "")
        restore(found, other, session.sequence)
        assert session.tokens == IDS
        assert (session.evaluate([300, 301], logits=True) == truth).all()


def test_it_is_not_evaluated_again(model: api.Model, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, rows = model.session(), []
    step = model.executable.step
    monkeypatch.setattr(model.executable, "step", lambda batch: (rows.append(len(batch.tokens)), step(batch))[1])
    restore(read_prompt_cache(kept, model), model, session.sequence)
    assert rows == [len(IDS) % BLOCK]
    session.close()


def test_blocks_that_were_given_up_are_not_saved(tmp_path: Path) -> None:
    """A sequence cut from a longer one may lack blocks of its window. In their place, others' blocks would be saved."""
    (tmp_path / "slots").mkdir()
    with api.load(KIT["gemma3-12"].write(tmp_path / "m.gguf"), ctx_size=2048, threads=1) as model:
        session = model.session()
        for first in range(0, 900, 300):
            session.evaluate([number % 100 + 1 for number in range(first, first + 300)], logits=False)
        table = session.sequence._tables[-1]
        while table.unneeded:
            table.give_up()
        least = next(length for length in range(1, 900) if session.sequence.reach(length) == length)
        cut = session.sequence.fork()
        cut.truncate(least)
        for attempt in (
            lambda: packed(model, cut),
            lambda: save(tmp_path / "kept", model, cut, []),
            lambda: SlotFiles(tmp_path / "slots", model).save("a", cut),
        ):
            with pytest.raises(CacheFileError, match=f"{least} tokens cannot be saved: the cache no longer has all bl"):
                attempt()
        PrefixFiles(tmp_path / "prefixes", model).save(cut)
        assert not [path for path in tmp_path.glob("*/*") if path.is_file()]
        cut.free()
        cut = session.sequence.fork()
        cut.truncate(least + SLACK // 2 + BLOCK)
        assert unpacked(packed(model, cut), model).tokens == session.tokens[: cut.length]
        PrefixFiles(tmp_path / "prefixes", model).save(cut)
        assert len(list((tmp_path / "prefixes").iterdir())) == 1
        cut.free()
        session.close()


def test_many_pieces_are_as_one(model: api.Model, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_cache, "_CHUNK", 100)
    session = model.session()
    restore(read_prompt_cache(kept, model), model, session.sequence)
    again = kept.with_name("again")
    save(again, model, session.sequence, MESSAGES)
    assert again.read_bytes() == kept.read_bytes()
    session.close()


def test_a_turn_after_loading_is_the_turn_after_saving(file: Path, model: api.Model, tmp_path: Path) -> None:
    def talk(opened: api.Model) -> Conversation:
        return Conversation(opened, template_of(opened)[0], GREEDY, pytest.fail, AnswerOptions(40, "Be brief."))

    first = talk(model)
    first.say("one").wait()
    first.save(tmp_path / "c")
    truth = first.say("two").wait()
    with api.load(file) as other:
        second = talk(other)
        second.say("something else").wait()
        second.load(tmp_path / "c")
        found = second.say("two").wait()
        assert (found.tokens, found.text) == (truth.tokens, truth.text)
        assert second.messages == first.messages
        assert found.usage.reused_tokens == truth.usage.reused_tokens
        assert truth.usage.reused_tokens > 40  # includes the tokens of the first answer


def test_what_was_taken_back_is_not_in_the_file(model: api.Model, tmp_path: Path) -> None:
    conversation = Conversation(model, template_of(model)[0], GREEDY, pytest.fail, AnswerOptions(max_tokens=40))
    conversation.say("one").wait()
    conversation.say("secret").wait()
    conversation.undo()
    conversation.save(tmp_path / "c")
    kept = read_prompt_cache(tmp_path / "c", model)
    assert "secret" not in model.detokenize(kept.tokens)
    assert "one" in model.detokenize(kept.tokens)
    conversation.clear()
    with pytest.raises(OutputError, match="exists"):
        conversation.save(tmp_path / "c")
    conversation.save(tmp_path / "c", force=True)
    assert read_prompt_cache(tmp_path / "c", model).tokens == [1]  # BOS


# -- invalid files
# ------------------------------------------------------------------------------------------------------


def test_every_way_of_cutting_it_short_is_noticed(model: api.Model, kept: Path, session: api.Session) -> None:
    whole = kept.read_bytes()
    for size in [*range(0, 700, 7), *range(700, len(whole), 997), len(whole) - 1]:
        kept.write_bytes(whole[:size])
        with pytest.raises(CacheFileError, match=str(kept)):
            read_prompt_cache(kept, model)
    kept.write_bytes(whole + b"\0")
    with pytest.raises(CacheFileError, match="truncated or damaged"):
        read_prompt_cache(kept, model)
    assert session.tokens == IDS


def test_every_changed_byte_is_noticed(model: api.Model, kept: Path) -> None:
    whole = bytearray(kept.read_bytes())
    for at in [*range(0, 700, 3), *range(700, len(whole), 487), len(whole) - 1]:
        changed = whole.copy()
        changed[at] ^= 0x10
        kept.write_bytes(changed)
        with pytest.raises(CacheFileError, match=str(kept)):
            read_prompt_cache(kept, model)


def forge(path: Path, change: Callable[[dict[str, Any]], object], body: bytes | None = None, version: int = 1) -> None:
    """Replace the header of the prompt cache file, and update the digest to match."""
    whole = path.read_bytes()
    length = struct.unpack("<I", whole[12:16])[0]
    header = json.loads(whole[16 : 16 + length])
    changed = change(header)
    text = json.dumps(header if changed is None else changed).encode()
    data = struct.pack("<8sII", b"LOCALLLM", version, len(text)) + text + (body or whole[16 + length : -32])
    path.write_bytes(data + hashlib.blake2b(data, digest_size=32).digest())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.pop("tokens"), "truncated|no usable"),
        (lambda h: h.update(tokens=-1), "no usable 'tokens'"),
        (lambda h: h.update(tokens=True), "no usable 'tokens'"),
        (lambda h: h.update(tokens=2**31), "no usable 'tokens'"),
        (lambda h: h.update(tokens=2**29), "should have"),
        (lambda h: h.update(tokens=1e9), "no usable 'tokens'"),
        (lambda h: h.update(block_bytes=[-5]), "no usable 'block_bytes'"),
        (lambda h: h.update(block_bytes=[2**62] * 4), "no usable 'block_bytes'"),
        (lambda h: h.update(block_bytes=[1] * 5000), "no usable 'block_bytes'"),
        (lambda h: h.update(block_bytes=7), "no usable 'block_bytes'"),
        (lambda h: h.update(messages=[{"role": "user"}]), "no usable 'messages'"),
        (lambda h: h.update(messages=[{"role": "root", "content": ""}]), "no usable 'messages'"),
        (lambda h: h.update(messages=[{"role": "user", "content": 5}]), "no usable 'messages'"),
        (lambda h: h.update(messages="x"), "no usable 'messages'"),
        (lambda h: h.update(model=None), "no usable 'model'"),
        (lambda h: [], "no usable"),
        (lambda h: "x", "no usable"),
        (lambda h: h.update(identity="0" * 32, model="\x1b[2J"), "another model.*u001b"),
    ],
)
def test_a_header_that_lies_is_refused(model: api.Model, kept: Path, change: Any, message: str) -> None:
    forge(kept, lambda header: None if isinstance(out := change(header), int | None) else out)
    with pytest.raises(CacheFileError, match=message):
        read_prompt_cache(kept, model)


@pytest.mark.parametrize("nested", [b"[" * 100_000, b'{"tokens":' + b"9" * 10_000 + b"}", b"\xff" * 50, b"NaN"])
def test_json_that_is_made_to_hurt_is_refused(model: api.Model, kept: Path, nested: bytes) -> None:
    data = struct.pack("<8sII", b"LOCALLLM", 1, len(nested)) + nested
    kept.write_bytes(data + hashlib.blake2b(data, digest_size=32).digest())
    with pytest.raises(CacheFileError, match="header"):
        read_prompt_cache(kept, model)
    kept.write_bytes(struct.pack("<8sII", b"LOCALLLM", 1, 0xFFFFFFFF) + bytes(64))
    with pytest.raises(CacheFileError, match="a header of 4294967295 bytes"):
        read_prompt_cache(kept, model)


def test_another_format_another_model_too_small_a_context(file: Path, model: api.Model, kept: Path) -> None:
    whole = kept.read_bytes()
    forge(kept, lambda header: None, version=3)
    with pytest.raises(CacheFileError, match="has format 3, this program reads up to 2"):
        read_prompt_cache(kept, model)
    kept.write_bytes(whole)
    with (
        api.load(file, ctx_size=100) as small,
        pytest.raises(CacheFileError, match="141 tokens, but the context is 100"),
    ):
        read_prompt_cache(kept, small)
    with api.load("demo") as demo, pytest.raises(CacheFileError, match=r'with another model.*\("tiny"\)'):
        read_prompt_cache(kept, demo)
    tokens = np.array(IDS, "<i4")
    for bad in (-1, 5000):
        tokens[70] = bad
        length = struct.unpack("<I", whole[12:16])[0]
        kept.write_bytes(whole)
        forge(kept, lambda header: None, tokens.tobytes() + whole[16 + length + tokens.nbytes : -32])
        with pytest.raises(CacheFileError, match="tokens outside the vocabulary"):
            read_prompt_cache(kept, model)


def test_numbers_that_would_spoil_the_cache_are_refused(model: api.Model, kept: Path, session: api.Session) -> None:
    """NaN is never restored as a key, even with a matching digest, and the current conversation stays usable."""
    whole = kept.read_bytes()
    length = struct.unpack("<I", whole[12:16])[0]
    body = bytearray(whole[16 + length : -32])
    body[-2:] = b"\x00\x7e"
    forge(kept, lambda header: None, bytes(body))
    with pytest.raises(CacheFileError, match="not finite"):
        restore(read_prompt_cache(kept, model), model, session.sequence)
    assert session.tokens == []
    truth = model.logits(IDS)[-1]
    assert (session.evaluate(IDS, logits=False)[-1] == truth).all()


@pytest.mark.parametrize("field", ["program", "layout", "block_bytes"])
def test_a_cache_of_another_kind_leaves_the_text(
    model: api.Model, kept: Path, session: api.Session, field: str
) -> None:
    """If the version, backend or cache type differs, the saved tokens are evaluated again."""
    whole = kept.read_bytes()
    if field == "block_bytes":
        length = struct.unpack("<I", whole[12:16])[0]
        forge(kept, lambda header: header.update(block_bytes=[2]), whole[16 + length :][: 4 * len(IDS)] + bytes(4))
    else:
        forge(kept, lambda header: header.update({field: "other"}))
    found = read_prompt_cache(kept, model)
    assert found.messages == MESSAGES
    assert found.problem.startswith("its cache")
    restore(found, model, session.sequence)
    assert session.tokens == []


def test_a_file_that_cannot_be_written_leaves_what_was_there(
    model: api.Model, kept: Path, session: api.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kept.read_bytes()

    for room in (len(before) // 2, 100):
        with full_disk(room), pytest.raises(OutputError, match="cannot be written: File too large"):
            save(kept, model, session.sequence, [], overwrite=True)
    with monkeypatch.context() as patch:
        patch.setattr(model.executable, "read_blocks", lambda *_: (_ for _ in ()).throw(BackendError("gone")))
        with pytest.raises(BackendError):
            save(kept, model, session.sequence, [], overwrite=True)
    assert [path.name for path in kept.parent.iterdir()] == ["kept"]
    assert kept.read_bytes() == before
    with pytest.raises(OutputError, match="no such folder"):
        save(kept.parent / "no" / "where", model, session.sequence, [])


def test_a_file_of_something_else_is_not_written_over(model: api.Model, session: api.Session, tmp_path: Path) -> None:
    letter = tmp_path / "letter.txt"
    letter.write_text("Dear all")
    for path in (letter, tmp_path):
        with pytest.raises(CacheFileError, match="exists and is not a localllm conversation file"):
            save(path, model, session.sequence, [])
    with pytest.raises(CacheFileError, match="not a localllm conversation file"):
        read_prompt_cache(letter, model)
    with pytest.raises(CacheFileError, match="cannot be read"):
        read_prompt_cache(tmp_path, model)
    assert letter.read_text() == "Dear all"


# -- model identity
# -----------------------------------------------------------------------------------------------------


def test_a_model_is_known_by_its_content_and_not_by_its_name(file: Path, tmp_path: Path) -> None:
    def of(path: Path) -> str:
        with open_gguf(path) as opened:
            return identity(opened)

    whole = file.read_bytes()
    copy = tmp_path / "other.gguf"
    copy.write_bytes(whole)
    assert of(copy) == of(file)
    assert of(write_model(tmp_path / "m.gguf", extra={"general.name": "tinx"})) != of(file)
    with open_gguf(file) as opened:
        places = [(t._offset, t._offset + t.nbytes) for t in opened.tensors.values()]
    for start, stop in places:
        for at in (start, (start + stop) // 2, stop - 1):
            changed = bytearray(whole)
            changed[at] ^= 1
            copy.write_bytes(changed)
            assert of(copy) != of(file)


# -- the program -----------------------------------------------------------------------------------------------------


def test_run_keeps_the_prompt_or_all(file: Path, tmp_path: Path) -> None:
    cache, prompt = tmp_path / "c", "one two three " * 8
    first = localllm("run", file, prompt, "-n", 6, "--temp", 0, "-v", "--prompt-cache", cache)
    assert first.returncode == 0
    assert "reused" not in first.stderr
    written = cache.stat().st_mtime_ns
    again = localllm("run", file, prompt, "-n", 6, "--temp", 0, "-v", "--prompt-cache", cache)
    assert again.stdout == first.stdout
    assert "prompt 1 (+ 134 reused)" in again.stderr
    assert cache.stat().st_mtime_ns == written
    other = localllm("run", file, prompt + "x", "-n", 6, "-v", "--prompt-cache", cache, "--prompt-cache-ro")
    assert "reused" in other.stderr
    assert cache.stat().st_mtime_ns == written
    all_ = localllm("run", file, prompt, "-n", 6, "--temp", 0, "--prompt-cache", cache, "--prompt-cache-all")
    assert all_.stdout == first.stdout
    talked = localllm("chat", file, "-n", 3, "--temp", 0, "--prompt-cache", cache, stdin="more\n")
    assert f"{cache}: 1 turn, 140 tokens" in talked.stderr
    assert f"{cache}: 2 turns" in talked.stderr
    kept = cache.read_bytes()
    spared = localllm("run", file, "hi", "-n", 1, "--prompt-cache", cache)
    assert "has a conversation and was not overwritten; give another name, or --force" in spared.stderr
    assert cache.read_bytes() == kept
    assert localllm("run", file, "hi", "-n", 1, "--prompt-cache", cache, "--force").stderr == ""
    assert cache.read_bytes() != kept


def test_run_without_a_template_keeps_its_prompt_too(file: Path, tmp_path: Path) -> None:
    words = ("run", file, "one two three " * 8, "--raw", "-n", 4, "--temp", 0, "-v", "--prompt-cache", tmp_path / "c")
    first, again = localllm(*words), localllm(*words)
    assert again.stdout == first.stdout
    assert "reused" in again.stderr


def test_a_wrong_file_is_one_line_and_stays(file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "c"
    cache.write_bytes(b"LOCALLLM")
    for words in (("run", file, "hi", "-n", 2), ("chat", file)):
        done = localllm(*words, "--prompt-cache", cache, stdin="hi\n" if words[0] == "chat" else None)
        assert done.returncode == 1
        assert done.stderr == f"error: {cache}: not a localllm conversation file, or truncated: it has 8 bytes\n"
        assert done.stdout == ""
    absent = localllm("run", file, "hi", "-n", 2, "--prompt-cache", tmp_path / "no", "--prompt-cache-ro")
    assert absent.returncode == 0
    assert "no such file" in absent.stderr
    assert not (tmp_path / "no").exists()


def test_save_and_load_in_a_chat(file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "my talk"
    typed = f"one\n/save {cache}\ntwo\n/clear\n/load {cache}\ntwo\n/load {tmp_path}\n/save\n/load\n/save {file}\n"
    typed += f"/save --force {file}\n/save {cache}\n/save --force {cache}\n"
    done = localllm("chat", file, "-n", 5, "--temp", 0, stdin=typed)
    assert done.returncode == 0
    answers = done.stdout.splitlines()
    assert len(answers) == 3
    assert answers[1] == answers[2]
    assert f"{cache}: 1 turn, " in done.stderr
    assert "error: wrong usage; write /save FILE" in done.stderr
    assert "error: wrong usage; write /load FILE" in done.stderr
    assert done.stderr.count(f"error: {file}: exists and is not a localllm conv") == 2  # not even with --force
    told = f"error: {cache} exists; /save --force {cache} replaces it\n"
    before, after = done.stderr.split(told)
    assert f"{cache}: 2 turns, " not in before
    assert f"{cache}: 2 turns, " in after
