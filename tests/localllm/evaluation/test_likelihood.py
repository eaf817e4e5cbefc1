"""Perplexity and KL divergence equal values computed by hand and by llama-perplexity. Base-logits files work
in both directions.
"""

from __future__ import annotations

import io
import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest

from localllm import LocalLLMError, load
from localllm.cli.main import main
from localllm.evaluation import (
    LogitsFile,
    ModelSource,
    Scores,
    TextTooShort,
    Windows,
    compare,
    cut_windows,
    evaluate,
    log_softmax,
    save_base,
    score,
    statistics,
)
from localllm.evaluation.likelihood import mean_of
from localllm.evaluation.logits_file import pack_logits, unpack_logits
from localllm.gguf import NewTensor, open_gguf, write_gguf
from localllm.model import Model
from tests.conftest import reference
from tests.localllm.support import REPOSITORY, write_model

SMALLTALK = REPOSITORY / "benchmarks" / "demo" / "smalltalk.txt"
RANDOM = np.random.RandomState(3)


def source_of(model: Model, windows: Windows) -> ModelSource:
    return ModelSource(model, windows)


# -- formulas ------------------------------------------------------------------------------------------------------


def test_perplexity_of_chances_known_by_heart() -> None:
    log_p = np.log(np.array([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]], np.float32))
    own, divergence = statistics(score(log_p, np.array([0, 2], np.int32)))
    assert own.tokens == 2
    assert divergence is None
    assert own.perplexity.value == pytest.approx(4.0)  # sqrt(2 * 8)
    half_apart = math.log(8) - math.log(4)
    assert own.nll.error == pytest.approx(half_apart)  # sqrt(mean square deviation / (n - 1))


def test_divergence_of_two_coins() -> None:
    fair, bent = np.log(np.array([[0.5, 0.5]], np.float32)), np.log(np.array([[0.75, 0.25]], np.float32))
    one = compare(bent, fair, np.zeros(1, np.int32))
    assert one.kld[0] == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25), rel=1e-6)
    assert compare(fair, fair, np.zeros(1, np.int32)).kld[0] == 0.0
    _, divergence = statistics(Scores.join([one, one]))
    assert divergence is not None
    assert divergence.p_difference.value == pytest.approx(0.25)
    assert divergence.log_ratio.value == pytest.approx(math.log(0.5 / 0.75))


def test_what_the_base_holds_for_all_but_impossible_does_not_count() -> None:
    base = np.array([[0.0, -16.5, -15.5]], np.float32)
    log_p = np.array([[0.0, -40.0, -15.5 - 2.0]], np.float32)
    assert compare(log_p, base, np.zeros(1, np.int32)).kld[0] == pytest.approx(2.0 * math.exp(-15.5), rel=1e-4)


def test_log_softmax_sums_to_one_whatever_the_logits() -> None:
    logits = (RANDOM.standard_normal((4, 5000)) * [[1.0], [30.0], [1e-3], [1.0]] + [[0], [0], [0], [1e4]]).astype("f4")
    assert np.exp(log_softmax(logits).astype(np.float64)).sum(axis=1) == pytest.approx(1.0, abs=3e-3)
    assert np.exp(log_softmax(logits[:3]).astype(np.float64)).sum(axis=1) == pytest.approx(1.0, abs=3e-5)


def test_standard_error_is_that_of_the_mean() -> None:
    values = RANDOM.standard_normal(1000)
    assert mean_of(values).error == pytest.approx(values.std(ddof=1) / math.sqrt(1000))


# -- windows -------------------------------------------------------------------------------------------------------


def test_only_the_second_half_of_a_window_counts_and_bos_takes_the_first_place(tmp_path: Path) -> None:
    """Scores equal the result of a plain forward pass over each window.

    The first token is replaced by BOS, and only the second half counts.
    """
    with load(write_model(tmp_path / "tiny.gguf"), threads=1, ctx_size=32) as model:
        windows = cut_windows(model, "abcdefghij" * 12, 32)
        found = Scores.join(list(evaluate(windows, source_of(model, windows))))
        expected = []
        for tokens in windows.tokens.tolist():
            log_p = log_softmax(model.logits([1, *tokens[1:]]))
            expected += [-log_p[i, tokens[i + 1]] for i in range(16, 31)]
    assert len(windows.tokens) == 3
    assert found.nll.tolist() == [pytest.approx(e, abs=1e-6) for e in expected]


def test_windows_that_overlap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With overlapping windows, the last tokens of each window are scored, given all earlier tokens of the window and
    no BOS.
    """
    path, text = write_model(tmp_path / "tiny.gguf"), tmp_path / "text.txt"
    text.write_text("abcdefghijk" * 60)
    told = {}
    for more in ((), ("--chunks", "2")):
        words = ["perplexity", str(path), "-f", str(text), "-c", "200", "--ppl-stride", "100", "--json", *more]
        assert main(words) == 0
        told[more] = json.loads(capsys.readouterr().out)
    with load(path, threads=1, ctx_size=256) as model:
        tokens = model.tokenize(text.read_text())
        starts = range(0, len(tokens) - 256, 100)
        nll = []
        for start in starts:
            window = tokens[start : start + 256]
            log_p = log_softmax(model.logits(window))
            nll += [-float(log_p[i, window[i + 1]]) for i in range(155, 255)]
    found = told[()]
    assert (found["ctx"], found["stride"], found["windows"], found["tokens"]) == (256, 100, len(starts), len(nll))
    assert found["nll"]["value"] == pytest.approx(float(np.mean(nll)), abs=1e-6)
    assert told["--chunks", "2"]["nll"]["value"] == pytest.approx(float(np.mean(nll[:200])), abs=1e-6)


def test_a_text_must_fill_two_windows(tmp_path: Path) -> None:
    with load(write_model(tmp_path / "tiny.gguf"), threads=1, ctx_size=64) as model:
        with pytest.raises(TextTooShort, match="has 100 tokens and 128 are needed"):
            cut_windows(model, "a" * 98, 64)
        # BOS, the added space and 126 tokens; the final newline is dropped
        assert len(cut_windows(model, "a" * 126 + "\n", 64).tokens) == 2
        with pytest.raises(TextTooShort, match="has 127 tokens"):
            cut_windows(model, "a" * 125 + "\n", 64)
        assert len(cut_windows(model, "a" * 500, 64, limit=3).tokens) == 3


def test_models_of_different_vocabularies_are_not_compared(tmp_path: Path) -> None:
    with load(write_model(tmp_path / "tiny.gguf"), threads=1) as model, load("demo", threads=1) as other:
        windows = Windows(np.zeros((2, 32), np.int32))
        with pytest.raises(LocalLLMError, match="356 tokens and the base 4096"):
            list(evaluate(windows, source_of(model, windows), source_of(other, windows)))
        with pytest.raises(LocalLLMError, match="no token 400"):
            source_of(model, Windows(np.full((2, 32), 400, np.int32)))


# -- llama.cpp's numbers -------------------------------------------------------------------------------------------


def test_the_models_in_the_box_give_llama_cpp_s_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Perplexity and KL divergence of draft.gguf against demo.gguf equal llama-perplexity's (2026-10-01, -c 128).

    Both programs quantize activations to 8 bits in blocks of 256, in different ways. With float activations, the base's
    perplexity is 83.14.
    """
    assert main(["perplexity", "draft", "--kld", "demo", "-f", str(SMALLTALK), "-c", "128", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    divergence = told["divergence"]
    assert (told["windows"], told["tokens"]) == (35, 2205)
    assert told["perplexity"]["value"] == pytest.approx(110.491076, rel=4e-3)
    assert told["perplexity"]["error"] == pytest.approx(11.228922, rel=4e-3)
    assert divergence["base"]["perplexity"]["value"] == pytest.approx(81.753552, rel=2e-2)
    assert divergence["log_ratio"]["error"] == pytest.approx(0.053969, rel=2e-2)
    assert divergence["kld"]["value"] == pytest.approx(1.585041, rel=4e-3)
    assert divergence["kld"]["error"] == pytest.approx(0.031017, rel=5e-3)
    assert divergence["kld_percentiles"]["99"] == pytest.approx(5.914860, rel=2e-2)
    assert divergence["kld_percentiles"]["50"] == pytest.approx(1.250476, rel=2e-2)
    assert divergence["same_top"]["value"] == pytest.approx(0.54150, abs=5e-3)
    assert divergence["p_difference"]["value"] == pytest.approx(-0.12220, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "ctx", "value", "error"),
    [("stories260K-f32", 256, 3.9882, 0.14296), ("babyllama-969K-tok361-f32", 101, 2.2031, 0.08933)],
)
def test_the_reference_models_give_llama_cpp_s_numbers(name: str, ctx: int, value: float, error: float) -> None:
    """Float models differ from llama-perplexity only by rounding. Windows of odd size are halved as in llama.cpp."""
    text = reference("text", "tinystories_smallGPT.txt").read_text(encoding="utf-8")[:100000]
    with load(reference("models", f"{name}.gguf"), ctx_size=ctx) as model:
        windows = cut_windows(model, text, ctx, limit=20)
        own, _ = statistics(Scores.join(list(evaluate(windows, source_of(model, windows)))))
    assert own.perplexity.value == pytest.approx(value, abs=2e-4)
    assert own.perplexity.error == pytest.approx(error, abs=2e-5)


@pytest.mark.parametrize(
    ("name", "ctx", "stride", "windows", "value"),
    [
        ("stories260K-f32", 256, 128, 12, "122.7450"),
        ("stories260K-f32", 192, 100, 20, "103.7048"),
        ("babyllama-969K-tok361-f32", 200, 64, 10, "19.7073"),
    ],
)
def test_windows_that_overlap_give_llama_cpp_s_numbers(
    name: str, ctx: int, stride: int, windows: int, value: str, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    """Perplexities with --ppl-stride equal llama-perplexity's (2026-11, -b equal to -c) for the first 60,000 bytes of
    wikitext-2's test set.
    """
    text = tmp_path / "text.txt"
    text.write_bytes(reference("text", "wiki.test.raw").read_bytes()[:60000])
    path = str(reference("models", f"{name}.gguf"))
    told = ("-f", str(text), "-c", str(ctx), "--ppl-stride", str(stride), "--chunks", str(windows))
    assert main(["perplexity", path, *told, "-ctk", "f32", "-ctv", "f32"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["text"].startswith(f"{windows} windows of ")
    assert lines["perplexity"].split()[0] == value


# -- files of base logits ------------------------------------------------------------------------------------------


def test_a_row_of_the_file_by_hand() -> None:
    """Each row starts with scale and minimum.

    Code 0 means a log-probability of at least 16 below the maximum. Rows of odd vocabulary sizes are padded.
    """
    log_p = np.array([[-1.0, -9.0, -30.0]], np.float32)
    row = pack_logits(log_p)
    assert row.shape == (1, 8)
    assert row[0, :4].view("<f4").tolist() == [np.float32(16.0 / 65535.0), -17.0]
    assert row[0, 4:].tolist() == [65535, 32768, 0, 0]
    assert unpack_logits(row)[0, :3].tolist() == pytest.approx([-1.0, -9.0, -17.0], abs=2e-4)
    assert (
        unpack_logits(pack_logits(np.full((2, 4), -1.5, np.float32))).tolist() == [[-1.5] * 4] * 2
    )  # equal values give scale 0


def test_a_base_on_disk_is_as_good_as_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "base.kld"
    short = ("-f", str(SMALLTALK), "-c", "64", "--chunks", "6", "--json")
    assert main(["perplexity", "demo", *short, "--save-base", str(saved)]) == 0
    assert main(["perplexity", "draft", *short, "--kld", "demo"]) == 0
    assert main(["perplexity", "draft", "--kld", str(saved), "--json"]) == 0  # the file has the text's tokens
    _, model, file = (json.loads(part + "}")["divergence"] for part in capsys.readouterr().out.split("\n}\n")[:3])
    assert file["kld"]["value"] == pytest.approx(model["kld"]["value"], rel=1e-3)
    assert file["same_top"] == model["same_top"]
    assert saved.stat().st_size == 20 + 4 * 6 * 64 + 6 * 31 * 2 * (4096 + 4)
    assert [p.name for p in tmp_path.iterdir()] == ["base.kld"]


def test_a_base_of_another_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "base.kld"
    assert (
        main(["perplexity", "demo", "-f", str(SMALLTALK), "-c", "16", "--chunks", "2", "--save-base", str(saved)]) == 0
    )
    (other := tmp_path / "other.txt").write_text("Once upon a time there was a small model. " * 20)
    assert main(["perplexity", "demo", "-f", str(other), "--kld", str(saved)]) == 1
    assert "made from another text" in capsys.readouterr().err


def test_rows_are_found_wherever_they_stand(tmp_path: Path) -> None:
    log_p = log_softmax(RANDOM.standard_normal((6, 5)).astype(np.float32))
    with save_base(tmp_path / "base", Windows(np.ones((2, 8), np.int32)), 5) as keep:
        keep(log_p)
    file = LogitsFile(tmp_path / "base")
    for window, start, stop in ((0, 0, 3), (1, 0, 3), (1, 1, 2), (0, 2, 3)):
        expected = log_p[3 * window + start : 3 * window + stop]
        np.testing.assert_allclose(file.log_probabilities(window, start, stop), expected, atol=1e-3)
    file.close()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda b: b[:-1], "truncated"),
        (lambda b: b[:10], "not a base-logits file"),
        (lambda b: b[:8] + b"\xff\xff\xff\xff" + b[12:], "damaged"),
        (lambda b: b[:20] + b"\xff\xff\xff\x7f" + b[24:], "outside its vocabulary"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, damage: object, message: str) -> None:
    path = tmp_path / "base"
    with save_base(path, Windows(np.ones((2, 8), np.int32)), 5) as keep:
        keep(np.zeros((6, 5), np.float32))
    assert callable(damage)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(LocalLLMError, match=message):
        LogitsFile(path)


def test_a_walk_that_breaks_off_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), save_base(tmp_path / "base", Windows(np.ones((2, 8), np.int32)), 5):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


class Fixed:
    """A source of base logits that returns fixed log-probabilities."""

    def __init__(self, log_p: np.ndarray) -> None:
        self.log_p, self.vocabulary = log_p, log_p.shape[1]

    def log_probabilities(self, window: int, start: int, stop: int) -> np.ndarray:
        return self.log_p[start:stop]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_no_number_is_told_without_a_warning_of_numpy(value: float) -> None:
    """NaN and infinite logits of the model or the base are an error, without a NumPy warning."""
    logits = np.array([[0, -3e38, 1], [-3e38, 1, 2], [0, 1, 2]], np.float32)
    good = Fixed(log_softmax(logits[2:].repeat(3, axis=0)))
    logits[1, 2] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bad, windows = Fixed(log_softmax(logits)), Windows(np.ones((1, 8), np.int32))
        pack_logits(bad.log_p[:1])
        for source, base, what in ((bad, None, "model"), (bad, good, "model"), (good, bad, "base")):
            with pytest.raises(LocalLLMError, match=f"the {what} gives NaN or infinity in window 1 of the text"):
                list(evaluate(windows, source, base))
        unpack_logits(np.full((1, 6), 0x7F80, "<u2"))


@pytest.mark.parametrize("value", [np.inf, 3e38])
def test_a_model_that_computes_infinity_is_one_line(
    value: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with open_gguf(write_model(tmp_path / "a.gguf")) as file:
        new = [NewTensor(t.name, t.format, t.shape, t.read(0, t.rows)) for t in file.tensors.values()]
        norm = np.full(64, value, "<f4")
        new = [t._replace(data=norm.view(np.uint8)) if t.name == "output_norm.weight" else t for t in new]
        write_gguf(tmp_path / "b.gguf", file.stored, new)
    for more in ((), ("--save-base", tmp_path / "base")):
        words = ["perplexity", tmp_path / "b.gguf", "-f", SMALLTALK, "-c", "32", "--chunks", "2", *more]
        assert main([str(word) for word in words]) == 1
        err = capfd.readouterr().err
        assert err.startswith("error: the model gives NaN or infinity in window 1 of the text; ")
        assert err.count("\n") == 1
    assert not (tmp_path / "base").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-c", "3"), "whole number of at least 4"),
        ((), "no text"),
        (("-f", "nowhere.txt"), "nowhere.txt: No such file"),
        (("-f", str(SMALLTALK), "-c", "100000"), "are needed for windows of 100000"),
        (("-f", str(SMALLTALK), "--ppl-stride", "600", "-c", "4"), "too small for a stride of 600"),
        (("-f", str(SMALLTALK), "--ppl-stride", "9", "--save-base", "x"), "--save-base cannot store overlapping"),
    ],
)
def test_wrong_use_is_a_line(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["perplexity", "demo", *words]) in (1, 2)
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
