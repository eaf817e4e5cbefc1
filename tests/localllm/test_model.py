"""The Python API: the models that `localllm.load` opens, and their answers."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.backends.base import BackendError
from localllm.engine import ContextFull
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Finished
from localllm.gguf import GGUFError, NewTensor, open_gguf, write_gguf
from localllm.loading.loaded_model import NoTokenizer, NoWeights
from localllm.options import OptionError
from localllm.plan import BLOCK
from localllm.tokenizer import TokenizerError
from tests.backends.support import model as random_model
from tests.backends.support import tokens
from tests.conftest import reference
from tests.localllm.support import localllm as program
from tests.localllm.support import write_model
from tests.localllm.tokenizer.test_pretokenize import probe_metadata
from tests.models.support import nmse

PROMPT = "Tell me a story"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a llama whose tokens are single characters. Its end-of-generation token is 4."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", context=256)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a llama with F32 weights, a trained context of 5000 tokens, and no tokenizer."""
    metadata, tensors = random_model("F32")
    new = [NewTensor(t.name, t.format, t.shape, t.rows) for t in tensors.values()]
    target = tmp_path_factory.mktemp("bare") / "bare.gguf"
    write_gguf(target, {**metadata, "llama.context_length": 5000}, new)
    return target


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[localllm.Model]:
    with localllm.load(path, threads=2) as opened:
        yield opened


def text(pieces: list[localllm.Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def ids(pieces: list[localllm.Piece]) -> list[int]:
    return [piece.token for piece in pieces if piece.token is not None]


def end_of(pieces: list[localllm.Piece]) -> Finished:
    assert [piece.finished is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].finished is not None
    return pieces[-1].finished


# -- loading ---------------------------------------------------------------------------------------------------------


def test_context_is_as_trained_but_at_most_4096_or_as_asked_for(path: Path, bare: Path) -> None:
    for file, asked, context in ((path, 0, 256), (path, 100, 100), (bare, 0, 4096), (bare, 1, 1)):
        with localllm.load(file, ctx_size=asked, threads=1) as opened:
            assert opened.context == context
            assert opened.pool.blocks == -(-context // BLOCK) + 1


def test_what_cannot_be_loaded_is_said(path: Path, tmp_path: Path) -> None:
    with pytest.raises(localllm.LocalLLMError, match="ctx_size is -1: it must be a whole number of at least 0"):
        localllm.load(path, ctx_size=-1)
    with pytest.raises(OptionError, match="backend is 'abacus': it must be one of auto, cpu"):
        localllm.load(path, backend="abacus")
    with pytest.raises(OptionError, match="cache_type_k is 'q3': it must be one of f32, f16, bf16, q8_0"):
        localllm.load(path, cache_type_k="q3")
    with pytest.raises(GGUFError, match=r"nothing\.gguf"):
        localllm.load(tmp_path / "nothing.gguf")


def test_a_damaged_weight_is_found_if_asked_for(path: Path, tmp_path: Path) -> None:
    localllm.load(path, check_tensors=True).close()
    with open_gguf(path) as file:
        tensor = file.tensors["blk.0.ffn_up.weight"]
        assert tensor.format == "Q8_0"
        row = tensor.read(2, 3).tobytes()
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(path.read_bytes().replace(row, b"\0\x7c" + row[2:]))  # the scale of a block is infinite
    localllm.load(damaged).close()
    told = "tensor 'blk.0.ffn_up.weight': row 2 has a value that is infinite or NaN"
    with pytest.raises(GGUFError, match=told):
        localllm.load(damaged, check_tensors=True)
    done = program("run", damaged, "hi", "--check-tensors")
    assert (done.returncode, done.stdout) == (1, "")
    assert told in done.stderr


def test_progress_hears_of_the_weights(path: Path) -> None:
    heard: list[tuple[str, int, int]] = []
    localllm.load(path, threads=1, progress=lambda *news: heard.append(news)).close()
    weights = [(done, total) for what, done, total in heard if what == "loading weights"]
    assert weights[-1][0] == weights[-1][1] > 0
    assert weights == sorted(weights)


def test_a_closed_model_says_so(path: Path) -> None:
    opened = localllm.load(path, threads=2)
    opened.close()
    for use in (lambda: opened.logits([1, 2, 3]), lambda: list(opened.generate("Hi")), lambda: list(opened.chat("Hi"))):
        with pytest.raises(localllm.LocalLLMError, match=r"tiny\.gguf: this model is closed; load it again"):
            use()
    opened.close()


@pytest.mark.parametrize("spec", ["off", "ngram"])
def test_an_answer_of_a_closed_model_cannot_continue(path: Path, spec: Any) -> None:
    opened = localllm.load(path, threads=2, spec=spec)
    answers = [opened.generate("Hi", max_tokens=30, ignore_eos=True), opened.chat("Hi", max_tokens=30, ignore_eos=True)]
    for answer in answers:
        next(answer)
    opened.close()
    for answer in answers:
        with pytest.raises(localllm.LocalLLMError, match="this model is closed; load it again"):
            list(answer)
        assert list(answer) == []  # the answer has ended


def test_the_device_is_named(model: localllm.Model) -> None:
    why = r"( \([^()]*\))?"  # optional reason why no GPU is used
    assert re.fullmatch(rf"cpu: [^()]*, 2 threads{why}", model.device)


# -- text and numbers ------------------------------------------------------------------------------------------------


def test_tokens_and_text(model: localllm.Model) -> None:
    found = model.tokenize("a b")
    assert found[0] == 1  # the GGUF requests a BOS token
    assert model.tokenize("a b", add_special=False) == found[1:]
    assert model.detokenize(found[1:]).strip() == "a b"
    assert model.tokenize("</s>", add_special=False, parse_special=True) == [2]
    assert 2 not in model.tokenize("</s>", add_special=False)


def test_logits_are_those_of_the_reference(bare: Path, path: Path) -> None:
    """With F32 weights, the difference comes from the float16 KV cache. With Q8_0 weights, it also comes from int8
    activations.
    """
    for file, vocabulary, limit in ((bare, 97, 2e-8), (path, 356, 1e-3)):
        sequence = [int(token) for token in tokens(80, vocabulary)]
        with localllm.load(file, threads=2) as ours, localllm.load(file, backend="reference") as theirs:
            logits = ours.logits(sequence)
            assert (logits.shape, logits.dtype) == ((80, vocabulary), np.float32)
            assert nmse(logits, theirs.logits(sequence)).max() < limit


def test_logits_of_more_than_a_batch(model: localllm.Model) -> None:
    """The logits do not depend on how the text is split into batches. Each call starts with an empty KV cache."""
    sequence = [int(token) for token in tokens(200, 356)]
    whole = model.logits(sequence)
    model.batch_rows, before = 7, model.batch_rows
    np.testing.assert_array_equal(model.logits(sequence), whole)
    model.batch_rows = before
    assert model.pool.free_blocks == model.pool.blocks


def test_logits_of_nothing_and_of_what_is_no_token(model: localllm.Model) -> None:
    with pytest.raises(localllm.LocalLLMError, match="at least one token id, got none"):
        model.logits([])
    for token in (-1, 356):
        with pytest.raises(BackendError, match="tokens must be from 0 to 355"):
            model.logits([1, token])
    with pytest.raises(ContextFull, match="the context of 256 tokens is full"):
        model.logits([1] * 257)
    assert model.pool.free_blocks == model.pool.blocks
    assert model.logits([1] * 256).shape == (256, 356)


# -- answers ---------------------------------------------------------------------------------------------------------


def greedy(model: localllm.Model, prompt: str | list[int] = PROMPT, **options: Any) -> list[localllm.Piece]:
    return list(model.generate(prompt, temperature=0.0, **{"max_tokens": 30, **options}))


def test_greedy_takes_the_largest_logit(model: localllm.Model) -> None:
    pieces = greedy(model)
    prompt, answer = model.tokenize(PROMPT), ids(pieces)
    assert len(answer) == 30
    assert answer == model.logits(prompt + answer)[len(prompt) - 1 : -1].argmax(axis=1).tolist()
    assert text(pieces) == model.detokenize(answer)


def test_statistics(model: localllm.Model) -> None:
    model.new_core(SchedulerLimits())  # empties the KV cache
    end = end_of(greedy(model))
    found = end.usage
    assert (found.prompt_tokens, found.reused_tokens) == (len(model.tokenize(PROMPT)), 0)
    assert (found.answer_tokens, found.decode_steps, end.reason) == (30, 29, "length")
    assert 0 < found.prompt_seconds < found.first_token_seconds < found.prompt_seconds + found.decode_seconds + 1
    assert found.decode_rate == pytest.approx(29 / found.decode_seconds)
    held = found.prompt_tokens + 29
    memory = model.executable.memory
    assert found.bytes_per_step == memory.weights_per_token + held * memory.cache_per_token
    assert found.bandwidth == pytest.approx(found.decode_rate * found.bytes_per_step)


@pytest.mark.parametrize("wanted", [0, 1, 5])
def test_max_tokens(model: localllm.Model, wanted: int) -> None:
    pieces = greedy(model, max_tokens=wanted)
    assert ids(pieces) == ids(greedy(model))[:wanted]
    assert (end_of(pieces).reason, end_of(pieces).usage.answer_tokens) == ("length", wanted)


def test_a_seed_repeats_an_answer(model: localllm.Model) -> None:
    def answer(seed: int) -> list[int]:
        return ids(list(model.generate(PROMPT, seed=seed, temperature=1.5, max_tokens=20)))

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)
    assert answer(-1) != answer(-1)  # a new seed every time


def test_keywords_change_a_full_set_of_options(model: localllm.Model) -> None:
    sampling = localllm.SamplingOptions(temperature=2.0, logit_bias={300: 1e6})
    answer = localllm.AnswerOptions(max_tokens=9)
    pieces = list(model.generate(PROMPT, answer, sampling, temperature=0.0, max_tokens=3))
    assert ids(pieces) == [300, 300, 300]
    pieces = list(model.generate(PROMPT, answer, sampling, logit_bias={301: 1e6}))
    assert ids(pieces) == [301] * 9


def test_the_end_of_generation_is_not_shown(model: localllm.Model) -> None:
    options = localllm.SamplingOptions(temperature=0.0, logit_bias={4: 1e6})
    pieces = list(model.generate(PROMPT, sampling=options))
    assert (text(pieces), ids(pieces), end_of(pieces).reason) == ("", [], "end")


def test_stop_strings(model: localllm.Model) -> None:
    """The text before a stop string is shown, no matter how tokens divide it. A stop string is never shown, but an
    incomplete match is.
    """
    whole = text(greedy(model))
    stop = whole[8:11]
    assert whole.index(stop) == 8, "the random model repeats itself: choose another place"
    pieces = greedy(model, stop=[stop, "never to be seen"])
    assert (text(pieces), end_of(pieces).reason) == (whole[:8], "stop")
    assert text(greedy(model, stop=[whole[-2:] + "never"])) == whole


def test_the_end_of_the_context_is_said(path: Path) -> None:
    with localllm.load(path, ctx_size=40, threads=1) as small:
        prompt = small.tokenize("x" * 30)
        pieces = greedy(small, prompt, max_tokens=None)
        assert end_of(pieces).reason == "context"
        assert len(prompt) + len(ids(pieces)) == 41  # the last token is sampled when the context is full
        exactly = (prompt * 2)[:40]
        assert len(ids(greedy(small, exactly, max_tokens=None))) == 1
        with pytest.raises(ContextFull, match="the prompt has 41 tokens, but the context holds 40"):
            greedy(small, (prompt * 2)[:41])


def test_cancelling(model: localllm.Model) -> None:
    cancel = threading.Event()
    pieces = []
    for piece in model.generate(PROMPT, temperature=0.0, cancel=cancel):
        pieces.append(piece)
        if len(pieces) == 3:
            cancel.set()
    assert (len(ids(pieces)), end_of(pieces).reason) == (3, "cancelled")
    pieces = list(model.generate(PROMPT, cancel=cancel))
    assert (ids(pieces), end_of(pieces).reason) == ([], "cancelled")


def test_an_answer_left_early_gives_its_memory_back(model: localllm.Model) -> None:
    model.new_core(SchedulerLimits())
    answer = model.generate(PROMPT, temperature=0.0)
    next(answer)
    prefixes = model.stepper.core.running.prefixes
    assert not list(prefixes)
    answer.close()
    [kept] = prefixes  # kept until other requests need the blocks
    assert model.pool.free_blocks == model.pool.blocks - len(kept.blocks)
    assert not model.stepper.core.running.busy


def test_an_empty_prompt_is_refused(model: localllm.Model) -> None:
    with pytest.raises(localllm.LocalLLMError, match="the prompt has no tokens"):
        greedy(model, [])


# -- files without weights
# ----------------------------------------------------------------------------------------------


def test_a_model_without_tokenizer_takes_ids(bare: Path) -> None:
    with localllm.load(bare, threads=1) as opened:
        pieces = greedy(opened, [3, 1, 4, 1, 5])
        assert (text(pieces), len(ids(pieces))) == ("", 30)
        for ask in (lambda: opened.tokenize("x"), lambda: opened.detokenize([1]), lambda: greedy(opened, "x")):
            with pytest.raises(NoTokenizer, match=r"bare\.gguf: the file has no tokenizer; give token ids instead"):
                ask()


def test_a_vocabulary_without_weights_tokenizes(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "words.gguf"
    metadata = {k: v for k, v in open_gguf(path).metadata.items() if k.startswith(("general.", "tokenizer."))}
    write_gguf(target, metadata, [])
    with localllm.load(target) as words, localllm.load(path, threads=1) as whole:
        assert words.tokenize(PROMPT) == whole.tokenize(PROMPT)
        for ask in (lambda: words.logits([1]), lambda: greedy(words)):
            with pytest.raises(NoWeights, match=r"words\.gguf: has a vocabulary but no weights; it can only tokenize"):
                ask()


def test_an_unknown_tokenizer_rule_is_refused_and_force_takes_the_nearest(tmp_path: Path) -> None:
    target = tmp_path / "words.gguf"
    write_gguf(target, probe_metadata("qwen2.1"), [])
    with pytest.raises(
        TokenizerError, match=r"'qwen2\.1' is not supported; the nearest known is qwen2, and force=True"
    ):
        localllm.load(target)
    with localllm.load(target, force=True) as words:
        assert "qwen2 is used instead" in words.tokenizer.note
    refused, taken = program("run", target, "hi"), program("run", target, "hi", "--force")
    assert "the nearest known is qwen2, and --force takes it" in refused.stderr
    assert "has a vocabulary but no weights" in taken.stderr  # so the tokenizer was accepted


def test_a_reference_vocabulary_tokenizes() -> None:
    with localllm.load(reference("vocab", "ggml-vocab-llama-bpe.gguf")) as words:
        assert words.detokenize(words.tokenize("Hello, world", add_special=False)) == "Hello, world"


# -- real models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stories260K-f32", "babyllama-969K-tok361-f32"])
@pytest.mark.parametrize("threads", [1, 2])
def test_greedy_text_is_that_of_llama_cpp(name: str, threads: int) -> None:
    expected = reference("models", f"{name}.greedy160.txt").read_text()
    with localllm.load(reference("models", f"{name}.gguf"), threads=threads) as opened:
        pieces = greedy(opened, "Once upon a time", max_tokens=160)
    assert " Once upon a time" + text(pieces) + "\n\n" == expected


def test_a_text_that_no_context_can_hold_is_refused_before_it_is_tokenized(model: localllm.Model) -> None:
    """A text that is too long in characters is refused at once. A text that might fit is tokenized, and its
    tokens are counted.
    """
    most = model.context * model.tokenizer.longest
    with pytest.raises(ContextFull, match=f"has {most + 1} characters, the context of {model.context} tokens holds"):
        next(model.generate("a" * (most + 1)))
    with pytest.raises(ContextFull, match=r"the prompt has \d+ tokens"):
        next(model.generate("a" * most))
