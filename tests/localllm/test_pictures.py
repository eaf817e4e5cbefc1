"""Pictures and sound in Python: loading encoders, chunks of a prompt, messages, and conversations."""

from __future__ import annotations

import gc
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.backends.base import BackendError
from localllm.base.errors import LocalLLMError
from localllm.base.notices import NotUsed
from localllm.engine import ContextFull, MediaSpan
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Request
from localllm.generation.scheduler import Scheduler
from localllm.loading import multimodal
from localllm.loading.media_parts import Medium
from localllm.loading.mmproj import mmproj_beside
from localllm.media import EncoderInput, MediaError
from localllm.model import Model
from localllm.models import ModelError
from localllm.options import OptionError, SamplingOptions
from localllm.server.errors import refusal_of
from tests.localllm.generation.support import ask
from tests.localllm.media_models import LISTS, MARKS, png, wav, write_mmproj, write_pair
from tests.localllm.multimodal import FOLDER, kit
from tests.localllm.support import write_model
from tests.models.encoders import small

USUAL = {"backend": "cpu", "threads": 1, "spec": "off"}
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("pair")
    write_pair(found)
    (found / "a.png").write_bytes(png())
    return found


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Model]:
    with localllm.load(folder / "tiny-Q8_0.gguf", **USUAL) as model:
        yield model


def asks(*parts: object, text: str = "what?") -> list[dict[str, object]]:
    pictures = [{"type": "image", "image": part} for part in parts]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}]


# -- loading -------------------------------------------------------------------------------------------------------


def test_encoders_beside_a_model_are_loaded(model: Model) -> None:
    assert model.reads == ("image",)


def test_encoders_that_would_not_be_used_are_refused(folder: Path) -> None:
    model, encoders = folder / "tiny-Q8_0.gguf", folder / "mmproj-tiny-F16.gguf"
    with pytest.raises(LocalLLMError, match="loaded for embeddings reads no pictures or sound; leave it out"):
        localllm.load(model, embeddings=True, mmproj=encoders, **USUAL)
    with localllm.load(model, embeddings=True, **USUAL) as vectors:  # one that was found beside the model is left out
        assert vectors.reads == ()


def test_encoders_are_not_a_model(folder: Path) -> None:
    with pytest.raises(ModelError, match="the encoders of pictures or sound, not a model; give the model, and this"):
        localllm.load(folder / "mmproj-tiny-F16.gguf", **USUAL)


def test_embeddings_are_not_kept(model: Model) -> None:
    [*_, chunk] = model.media("a <__media__>", png(seed=70))[:2]
    assert chunk.embeddings is not None
    assert not [each for each in gc.get_objects() if type(each).__name__ == "_Encoding"]


def test_a_card_that_holds_only_one_encoder_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are on the CPU then, and the card's memory is free again."""
    loaded: list[str] = []

    class Bound:
        def __init__(self, backend: Any, kind: str) -> None:
            if (backend.name, kind) == ("card", "second"):
                raise BackendError("out of memory")
            self.place = f"{kind} on {backend.name}"
            loaded.append(self.place)

        def close(self) -> None:
            loaded.remove(self.place)

    monkeypatch.setattr(multimodal, "Encoder", Bound)
    monkeypatch.setattr(multimodal, "open_backend", lambda name, threads: SimpleNamespace(name=name))
    encoders = object.__new__(multimodal.Multimodal)
    encoders._models = {"image": "first", "audio": "second"}  # type: ignore[dict-item]
    encoders._encoders = {}
    encoders.bind(SimpleNamespace(name="card"), None, lambda job: job())  # type: ignore[arg-type]
    assert loaded == ["first on cpu", "second on cpu"]


def test_a_server_s_cache_leaves_room_for_the_encoders(folder: Path) -> None:
    """With encoders, the cache of a server is smaller by their memory; the facts of the model count them."""
    path = folder / "tiny-Q8_0.gguf"
    with localllm.load(path, sequences=1, **USUAL) as model:
        encoders, full = model.multimodal, model.facts
        assert encoders is not None
        assert encoders.needed_bytes(1) == encoders.bytes == full.encoders > 0
        assert full.bytes == full.weights + full.cache + full.scratch + full.encoders
    half = full.encoders + full.weights + full.cache // 2
    with localllm.load(path, sequences=1, memory=half, mmproj="off", **USUAL) as model:
        assert model.facts.blocks == full.blocks
        assert not model.facts.encoders
    with localllm.load(path, sequences=1, memory=half, **USUAL) as model:
        assert abs(model.facts.blocks - full.blocks // 2) <= 2
    # of several models, each has a share for its cache, which the encoders do not reduce
    share = 6 * full.cache // full.blocks
    with localllm.load(path, sequences=1, memory=1 << 30, most_cache=share, **USUAL) as model:
        assert model.facts.blocks == 6


def test_off_loads_none(folder: Path) -> None:
    with localllm.load(folder / "tiny-Q8_0.gguf", mmproj="off", **USUAL) as text:
        assert text.reads == ()
        with pytest.raises(LocalLLMError, match="loaded without encoders of pictures and sound; if it has an mmproj"):
            text.chat(asks(png()))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["mmproj-F32.gguf", "mmproj-F16.gguf", "mmproj-Q8_0.gguf"], "mmproj-F16.gguf"),
        (["mmproj-F16.gguf", "mmproj-Big-VL-7B-Q8_0.gguf"], "mmproj-Big-VL-7B-Q8_0.gguf"),
        (["Big-VL-7B.mmproj-f16.gguf"], "Big-VL-7B.mmproj-f16.gguf"),
        (["mmproj-model-f16.gguf"], "mmproj-model-f16.gguf"),
        (["mmproj-Other-VL-F16.gguf", "Other.gguf"], None),
        (["mmproj-F16.txt"], None),
    ],
)
def test_the_file_beside_has_the_name_of_the_model(names: list[str], expected: str | None, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    found = mmproj_beside(tmp_path / "Big-VL-7B-Instruct-Q4_K_M.gguf")
    assert (found[0].name if found else None) == expected


def test_a_file_beside_that_does_not_fit_is_left_out_with_a_warning(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf")
    write_mmproj(tmp_path / "mmproj.gguf", "minicpmv-2.6")
    with pytest.warns(NotUsed, match=r"pictures and sound are off: mmproj.gguf: does not fit this model"):
        localllm.load(path, **USUAL).close()


def test_wrong_files_are_one_line(folder: Path, tmp_path: Path) -> None:
    path = folder / "tiny-Q8_0.gguf"
    wide = write_mmproj(tmp_path / "wide.gguf", "minicpmv-2.6")
    other = write_mmproj(tmp_path / "other.gguf", "gemma3", projector_type="gemma3na")
    for given, problem in (
        (wide, r"^wide.gguf: does not fit this model: its embeddings have 128 values, the text model has 64; choose"),
        (other, r"^other.gguf: projector type 'gemma3na' is not supported for vision; supported: "),
        (path, r"tiny-Q8_0.gguf: not an mmproj file, but a model; give the file of its encoders, mmproj-\*.gguf$"),
        (tmp_path / "none.gguf", r"none.gguf"),
    ):
        with pytest.raises(LocalLLMError, match=problem) as caught:
            localllm.load(path, mmproj=given, **USUAL)
        assert "\n" not in str(caught.value)
    with pytest.raises(OptionError, match="exchange the two limits"):
        localllm.load(path, image_min_tokens=9, image_max_tokens=8)


# -- chunks of a prompt --------------------------------------------------------------------------------------------


def test_chunks_have_texts_positions_tensors_and_embeddings(model: Model) -> None:
    own = small.input_of("gemma3")
    picture = np.clip(own * 127.5 + 127.5, 0, 255).astype(np.uint8)
    before, middle, after = model.media("a <__media__> b", picture)
    assert [chunk.kind for chunk in (before, middle, after)] == ["text", "image", "text"]
    marks = [model.tokenize(mark, add_special=False, parse_special=True) for mark in MARKS]
    assert before.tokens == [*model.tokenize("a ", parse_special=True), *marks[0]]
    assert after.tokens == [*marks[1], *model.tokenize(" b", add_special=False)]
    assert (middle.count, middle.positions, middle.start, middle.pos) == (16, 16, len(before.tokens), None)
    assert after.start == middle.start + 16
    (tensor,) = middle.tensors
    np.testing.assert_allclose(tensor, picture / np.float32(127.5) - 1, atol=1e-6)
    assert middle.embeddings is not None
    assert middle.embeddings.shape == (16, 64)
    assert before.embeddings is None
    prompt = [each for chunk in (before, middle, after) for each in chunk.prompt]
    assert sum(isinstance(each, MediaSpan) for each in prompt) == 1
    rows = model.logits(prompt)
    assert len(rows) == len(before.tokens) + 1 + len(after.tokens)
    again = model.logits(model.media("a <__media__> b", picture)[0].tokens)
    np.testing.assert_array_equal(rows[: len(again)], again)
    other = model.media("a <__media__> b", 255 - picture)
    assert not np.array_equal(model.logits([each for chunk in other for each in chunk.prompt])[-1], rows[-1])


def test_a_marker_for_each_picture(model: Model) -> None:
    with pytest.raises(LocalLLMError, match="the prompt has 1 of <__media__> and 2 pictures and sounds; write one"):
        list(localllm.loading.media_parts.of_marked("<__media__>", [Medium("image", b""), Medium("image", b"")]))
    chunks = model.media("<__media__><__media__>", [png(seed=1), png(seed=2)])
    assert [chunk.kind for chunk in chunks] == ["text", "image", "text", "image", "text"]


def test_sound_is_not_for_a_model_of_pictures(model: Model) -> None:
    with pytest.raises(LocalLLMError, match=r"^sound 1 of the prompt: this model reads pictures, no sound$"):
        model.media("<__media__>", wav())


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_sound(tmp_path: Path, backend: str) -> None:
    path = write_pair(tmp_path, "gemma4ua")
    with localllm.load(path, **{**USUAL, "backend": backend}) as model:
        assert model.reads == ("audio",)
        chunks = model.media("a<__media__>", wav(3200))
        assert [chunk.kind for chunk in chunks] == ["text", "audio", "text"]
        assert chunks[1].count == 5
        sound = {"type": "audio", "audio": (np.sin(np.arange(3200) / 9).astype(np.float32), 16000)}
        reply = model.chat([{"role": "user", "content": [sound, {"type": "text", "text": "a"}]}], max_tokens=2)
        assert reply.end.usage.prompt_tokens > 5


@pytest.mark.skipif(kit() is None, reason="needs the reference kit")
@pytest.mark.parametrize(("case", "only"), [("gemma3", ()), ("qwen3vl", ()), ("ultravox", ("short",))])
def test_the_reference_kit_end_to_end(case: str, only: tuple[str, ...], tmp_path: Path) -> None:
    """Layout, tensors, embeddings and logits are llama.cpp's, as the kit's README compares them."""
    make, _ = kit()
    z = np.load(FOLDER / f"{case}.npz")
    make.build(str(FOLDER / f"{case}.npz"), str(tmp_path / "mm.gguf"), int(z["seed"]))
    make.build(str(FOLDER / f"{z['text_model']}.npz"), str(tmp_path / "text.gguf"), int(z["seed"]))
    exact = {"cache_type_k": "f32", "cache_type_v": "f32"}
    with localllm.load(tmp_path / "text.gguf", mmproj=tmp_path / "mm.gguf", ctx_size=2048, **exact, **USUAL) as model:
        for name, kind, data in make.inputs(z):
            if only and name not in only:
                continue
            chunks = model.media("a <__media__><__media__> b" if kind == "two" else "a <__media__> b", data)
            for number, (chunk, row) in enumerate(zip(chunks, z[f"{name}.layout"].tolist(), strict=True)):
                assert [chunk.count, chunk.positions, chunk.start] == row[1:4], (name, number)
                if chunk.piece is None:
                    assert chunk.tokens == z[f"{name}.{number}.text"].tolist()
                    continue
                if f"{name}.{number}.pos" in z:
                    np.testing.assert_array_equal(chunk.pos, z[f"{name}.{number}.pos"])
                found = make.check_media(z, name, number, chunk.embeddings, chunk.tensors)
                assert found["rows"] < 2e-5, (name, found)
                assert found["centered"] < 1e-4, (name, found)
                assert found["pre0.max"] < (1e-3 if kind == "audio" else 1e-5), (name, found)
            prompt = [each for chunk in chunks for each in chunk.prompt] + z[f"{name}.next_tokens"].tolist()
            rows = model.logits(prompt)[-7:, :512]
            assert max(map(make.nmse, rows, z[f"{name}.logits"])) < 1e-3, name


# -- messages ------------------------------------------------------------------------------------------------------


def test_all_sources_of_a_picture_are_the_same_prompt(model: Model, folder: Path) -> None:
    from PIL import Image

    path = folder / "a.png"
    with Image.open(path) as image:
        sources = [str(path), path, path.read_bytes(), image, np.asarray(image)]
        answers = {str(model.chat(asks(source), **GREEDY)) for source in sources}
    assert len(answers) == 1
    other = model.chat(asks(png(seed=9)), **GREEDY)
    assert str(other)
    assert other.end.usage.reused_tokens < 40 < other.end.usage.prompt_tokens - 16


def test_the_same_picture_again_is_in_the_cache(model: Model) -> None:
    first = model.chat(asks(png(seed=3)), **GREEDY)
    text = str(first)
    again = model.chat(asks(png(seed=3)), **GREEDY)
    assert str(again) == text
    assert again.end.usage.reused_tokens == again.end.usage.prompt_tokens - 1


def test_too_many_pictures_are_refused_before_all_are_prepared(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = []
    parts = model.encoders.parts
    monkeypatch.setattr(model.encoders, "parts", lambda *given: prepared.append(1) or parts(*given))
    with pytest.raises(
        ContextFull, match="more than 1024 tokens with its pictures and sounds, the size of the context"
    ):
        model.chat(asks(*[png()] * 200))
    assert len(prepared) < 40  # of at least 33 tokens each


def test_a_picture_that_the_encoder_cannot_take_is_refused_at_once(tmp_path: Path) -> None:
    """The rule of youtuvl's pictures allows 62500 patches, the encoder 16384."""
    path, picture = write_pair(tmp_path, "youtuvl"), np.zeros((2100, 2100, 3), np.uint8)
    with localllm.load(path, **USUAL) as model, pytest.raises(MediaError) as refused:
        model.chat(asks(picture))
    advice = "use a smaller picture, or load the model with image_max_tokens=4096"
    assert str(refused.value) == f"picture 1 of the messages: 132 x 132 patches are more than 16384; {advice}"
    assert refusal_of(refused.value).status == 400
    with localllm.load(path, image_max_tokens=4096, **USUAL) as model:
        assert 4000 < model.encoders.tokens(Medium("image", picture)) <= 4096


def test_what_an_encoder_refuses_ends_one_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        localllm.load(folder / "tiny-Q8_0.gguf", sequences=4, **USUAL) as model,
        Scheduler(model.new_core(SchedulerLimits())) as scheduler,
    ):
        encoders = model.encoders
        spans = [encoders.span(part, 1) for part in encoders.parts(Medium("image", png())) if not isinstance(part, str)]
        stream = ask(scheduler, Request([5, 6, 7], SamplingOptions(temperature=0.0), 100, ignore_eos=True))
        asked = Request([1, *spans, 2], SamplingOptions(temperature=0.0), 4, ignore_eos=True)
        with monkeypatch.context() as patch:
            patch.setattr(encoders._models["image"], "most", 4)
            error = ask(scheduler, asked).error().error
        assert isinstance(error, MediaError)
        assert "patches are more than 4; use a smaller picture" in str(error)
        assert encoders._current is None
        assert ask(scheduler, asked).result().usage.answer_tokens == 4
        assert stream.result().usage.answer_tokens == 100


def test_text_cannot_imitate_a_picture(model: Model) -> None:
    plain = "<__media__> <__media_0__> <start_of_image>"
    reply = model.chat(plain, **GREEDY)
    assert str(reply)
    assert reply.end.usage.prompt_tokens > len(plain)  # letters, no picture
    with_picture = model.chat(asks(png(), text=plain), **GREEDY)
    assert str(with_picture)
    assert with_picture.end.usage.prompt_tokens - reply.end.usage.prompt_tokens < 16 + 40


def test_a_template_that_writes_its_own_tokens_sees_text(tmp_path: Path) -> None:
    path = write_pair(tmp_path, template=LISTS)
    with localllm.load(path, **USUAL) as model:
        told = model.apply_chat_template(asks(png(), text="what"), tokenize=False)
        assert told == "<|im_start|>user\n[picture]what<|im_end|>\n<|im_start|>assistant\n"
        assert str(model.chat(asks(png()), **GREEDY))


def test_a_template_that_leaves_out_a_picture_is_refused(tmp_path: Path) -> None:
    path = write_pair(tmp_path, template="{{ messages[-1].content }}")
    with localllm.load(path, **USUAL) as model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        messages = [*asks(png()), {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
        with pytest.raises(LocalLLMError, match="leaves out a message with picture 1 of the messages; give another"):
            model.chat(messages)


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "image"}, "expected .*'type': 'image'|expected "),
        (
            {"type": "image", "image": 7},
            "picture 2 of the messages: expected a path, the bytes of .* or an array, got int",
        ),
        ({"type": "image", "image": "none.png"}, "none.png: No such file"),
        ({"type": "image", "image": b"nonsense"}, "picture 2 of the messages: it is not a picture that can be read"),
        ({"type": "video"}, "content has parts of type text, image or audio"),
    ],
)
def test_wrong_parts_are_one_line(model: Model, part: dict[str, object], problem: str) -> None:
    with pytest.raises(LocalLLMError, match=problem):
        model.chat([{"role": "user", "content": [{"type": "image", "image": png()}, part]}])


def test_embeddings_and_answers_at_the_same_time(model: Model) -> None:
    """Answers with other pictures run while embeddings are read; all of them are as alone."""
    chunk = model.media("<__media__>", png(seed=20))[1]
    alone = chunk.embeddings
    assert alone is not None
    answers = [str(model.chat(asks(png(seed=seed)), **GREEDY)) for seed in (30, 31, 32)]
    with localllm.load(model.file.path, **USUAL) as other:  # nothing is cached
        replies = [other.chat(asks(png(seed=seed)), **GREEDY) for seed in (30, 31, 32)]
        with ThreadPoolExecutor(4) as pool:
            found = [pool.submit(str, reply) for reply in replies]
            own = other.media("<__media__>", png(seed=20))[1]
            for _ in range(5):
                np.testing.assert_array_equal(own.embeddings, alone)
            assert [each.result() for each in found] == answers


# -- conversations -------------------------------------------------------------------------------------------------


def test_later_turns_see_the_picture_and_evaluate_only_what_is_new(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "b.png"
    shutil.copyfile(Path(model.file.path).parent / "a.png", path)
    talk = model.conversation(**GREEDY)
    first = talk.say([{"type": "image", "image": str(path)}, {"type": "text", "text": "what?"}])
    said = str(first)
    path.unlink()  # the conversation has its content
    second = talk.say("and?")
    text = str(second)
    assert second.end.usage.reused_tokens >= first.end.usage.prompt_tokens
    assert talk.told[0]["content"] == "[b.png]what?"
    other = [*asks(png()), {"role": "assistant", "content": said}, {"role": "user", "content": "and?"}]
    assert str(model.chat(other, **GREEDY)) == text
    assert talk.undo() == "and?"
    assert talk.undo() == "[b.png]what?"
    assert str(talk.say("plain"))


def test_a_conversation_drops_the_oldest_pictures_of_a_full_context(folder: Path) -> None:
    with localllm.load(folder / "tiny-Q8_0.gguf", ctx_size=256, **USUAL) as model:
        talk = model.conversation(context_shift=True, max_tokens=4, temperature=0, ignore_eos=True)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for seed in range(4):  # two turns fill most of the context
                [message] = asks(png(seed=seed), text="what is this now?")
                assert len(str(talk.say(message["content"]))) == 4  # type: ignore[arg-type]
    full = [str(each.message) for each in told if "the context of 256 tokens is full" in str(each.message)]
    assert len(full) == 1
    assert "the oldest 2 turns were dropped" in full[0]


def test_a_conversation_keeps_no_tensors_of_dropped_turns(model: Model) -> None:
    talk = model.conversation(**GREEDY)
    known = {id(each) for each in gc.get_objects() if isinstance(each, EncoderInput)}
    [message] = asks(png(seed=80))
    assert str(talk.say(message["content"]))  # type: ignore[arg-type]
    assert str(talk.say("and?"))
    talk.clear()
    assert str(talk.say("plain"))
    model.encoders._kept.clear()
    assert [each for each in gc.get_objects() if isinstance(each, EncoderInput) and id(each) not in known] == []


def test_a_conversation_refuses_what_the_model_cannot_read(model: Model) -> None:
    talk = model.conversation()
    with pytest.raises(LocalLLMError, match="this model reads pictures, no sound"):
        talk.say([{"type": "audio", "audio": wav()}])
    with pytest.raises(LocalLLMError, match="say expects a text, or parts with media"):
        talk.say([{"type": "text", "text": "x"}])
    assert talk.messages == []


def test_measurements_load_no_encoders() -> None:
    from localllm.cli.options import MeasuringOptions

    assert MeasuringOptions().options.mmproj == "off"
