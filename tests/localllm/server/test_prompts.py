"""Infill prompts equal llama.cpp's for /infill: extra files, then the text before and after the gap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import localllm
from localllm.engine import ContextFull
from localllm.server.errors import PromptTooLong
from localllm.server.prompts import Prompts
from localllm.server.turn import Completion, Generation
from tests.localllm.support import write_model

MARKS = {"fim_pre": 10, "fim_suf": 11, "fim_mid": 12}
REPOSITORY, SEPARATOR = 13, 14
CONTEXT = 128


@pytest.fixture(scope="module", params=[True, False])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[localllm.Model]:
    """Yield a model with infill tokens, with and without the tokens for files."""
    marks = MARKS | ({"fim_rep": REPOSITORY, "fim_sep": SEPARATOR} if request.param else {})
    extra = {f"tokenizer.ggml.{name}_token_id": token for name, token in marks.items()}
    path = write_model(tmp_path_factory.mktemp("fills") / "m.gguf", extra=extra)
    with localllm.load(path, backend="cpu", threads=1, ctx_size=CONTEXT) as model:
        yield model


def filled(model: localllm.Model, *files: tuple[str, str], before: str = "ab", **generation: Any) -> list[int]:
    asked = Completion(before, Generation(**generation), suffix="cd", extra=files)
    return Prompts(model).of_text(asked).ids


def plain(model: localllm.Model, text: str) -> list[int]:
    return model.tokenize(text, add_special=False)


def gap(model: localllm.Model) -> list[int]:
    return [10, *plain(model, "ab"), 11, *plain(model, "cd"), 12]


def named(model: localllm.Model) -> bool:
    return Prompts(model).fill_token("separator") is not None


def test_what_is_around_a_gap(model: localllm.Model) -> None:
    assert Prompts(model).fills
    assert filled(model) == [*([model.tokenizer.bos] if model.tokenizer.add_bos else []), *gap(model)]


def test_files_come_first(model: localllm.Model) -> None:
    ids = filled(model, ("f.c", "x"), ("g.c", "y"), max_tokens=1)
    start = [model.tokenizer.bos] if model.tokenizer.add_bos else []
    if named(model):
        files = [REPOSITORY, *plain(model, "myproject\n"), SEPARATOR, *plain(model, "f.c\n"), *plain(model, "x"),
                 SEPARATOR, *plain(model, "g.c\n"), *plain(model, "y"),
                 SEPARATOR, *plain(model, "filename\n")]  # fmt: skip
    else:
        before = plain(model, "\n\n--- snippet ---\n\n")
        files = [*before, *plain(model, "x"), *before, *plain(model, "y")]
    assert ids == [*start, *files, *gap(model)]


@pytest.mark.parametrize(("wanted", "left"), [(8, 8), (None, CONTEXT // 4), (1000, CONTEXT // 4)])
def test_files_leave_room_for_the_answer(model: localllm.Model, wanted: int | None, left: int) -> None:
    ids = filled(model, ("far.c", "z" * 200), ("near.c", "y" * 60), max_tokens=wanted)
    assert len(ids) == CONTEXT - left
    assert ids[-len(gap(model)) :] == gap(model)
    text = model.detokenize(ids)
    assert "y" * 60 in text
    assert "far.c" not in text
    assert "zz" in text or left > 8


def test_a_gap_that_does_not_fit_is_refused(model: localllm.Model) -> None:
    with pytest.raises(PromptTooLong):
        filled(model, before="x" * 100_000)
    # files do not fit, and the scheduler rejects the prompt
    assert REPOSITORY not in filled(model, ("f.c", "x"), before="x" * CONTEXT)


def test_a_text_is_refused_by_its_length_as_the_model_refuses_it(model: localllm.Model) -> None:
    """A text that must exceed the context is rejected untokenized, at the model's limit and with llama-server's
    message.
    """
    longest = "x" * (CONTEXT * model.tokenizer.longest)
    # the prompt also has "cd"; the scheduler rejects this length
    assert len(filled(model, before=longest[:-2])) > CONTEXT
    words = f"the prompt has at least {CONTEXT + 1} tokens and exceeds the available context size of {CONTEXT} tokens"
    with pytest.raises(PromptTooLong, match=words) as refused:
        filled(model, before=longest[:-1])
    assert (refused.value.prompt_tokens, refused.value.context) == (CONTEXT + 1, CONTEXT)
    model.check_length(longest)
    with pytest.raises(ContextFull):
        model.check_length(longest + "x")
