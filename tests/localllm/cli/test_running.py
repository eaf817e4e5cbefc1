"""Long measurements show a running value on a terminal, and print the results so far on Ctrl-C."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.cli.commands import imatrix, perplexity
from localllm.cli.main import main
from localllm.evaluation import Scores, evaluate
from localllm.quantize.calibration.imatrix import measure_imatrix
from tests.localllm.support import Terminal, write_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def text_of(folder: Path, characters: int) -> Path:
    path = folder / "text.txt"
    random = np.random.RandomState(3)
    path.write_text("".join(map(chr, random.randint(97, 123, characters))))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return text_of(tmp_path, 400)


# -- perplexity ------------------------------------------------------------------------------------------------------


def interrupted_after(count: int) -> Callable[..., Iterator[Scores]]:
    """Return a version of `evaluate` that is interrupted by Ctrl-C after `count` windows."""

    def walk(*given: Any) -> Iterator[Scores]:
        for number, part in enumerate(evaluate(*given)):
            if number == count:
                signal.raise_signal(signal.SIGINT)
            yield part

    return walk


def test_ctrl_c_leaves_the_estimate_of_the_windows_done(
    tiny: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["perplexity", str(tiny), "-f", str(text), "-c", "32", "-t", "1"]
    base = text.parent / "base"
    assert main([*words, "--chunks", "3", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(perplexity, "evaluate", interrupted_after(3))
    assert main([*words, "--json", "--save-base", str(base)]) == 130
    out, err = capsys.readouterr()
    found = json.loads(out)
    total = found["windows_of_text"]
    assert total > 8
    assert err == f"stopped: the numbers cover 3 of {total} windows; {base} was not written\n"
    assert found == expected | {"windows_of_text": total}
    assert not base.exists()
    assert main(words) == 130
    assert f"text        3 of {total} windows of 32 tokens, 45 predictions\n" in capsys.readouterr().out


def test_ctrl_c_before_the_first_window_leaves_nothing(
    tiny: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "evaluate", interrupted_after(0))
    assert main(["perplexity", str(tiny), "-f", str(text), "-c", "32"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_the_value_so_far_and_the_time_left(tiny: Path, tmp_path: Path) -> None:
    long = text_of(tmp_path, 400_000)
    terminal = Terminal("perplexity", tiny, "-f", long, "-c", "32", "-t", "1", columns=120)
    shown = terminal.wait_for(r"perplexity \d+\.\d{4}")
    assert "evaluating" in shown
    assert "left" in shown
    terminal.type("\x03")
    terminal.wait_for(r"perplexity +\d+\.\d{4} ± ")
    terminal.wait_for(r"stopped: the numbers cover \d+ of \d+ windows")
    assert terminal.end() == 130


# -- imatrix ---------------------------------------------------------------------------------------------------------


def pressed_in_window(count: int, times: int = 1) -> Callable[..., Any]:
    """Return a version of `measure_imatrix` that gets `times` Ctrl-C signals in window `count`."""

    def run(model: Any, windows: Any, dataset: str, output: bool, progress: Any, stop: Any, seen: Any) -> Any:
        asked = 0

        def stopping() -> bool:
            nonlocal asked
            asked += 1
            if asked == count:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return bool(stop())

        return measure_imatrix(model, windows, dataset, output, progress, stopping, seen)

    return run


@pytest.mark.parametrize("name", ["i.gguf", "i.dat"])
def test_ctrl_c_writes_the_windows_done(
    tiny: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    whole, cut_short = text.parent / f"whole-{name}", text.parent / f"short-{name}"
    words = ["imatrix", str(tiny), "-f", str(text), "-c", "32", "-t", "1"]
    assert main([*words, "--chunks", "3", "-o", str(whole)]) == 0
    capsys.readouterr()
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(imatrix, "measure_imatrix", pressed_in_window(3))
    assert main([*words, "-o", str(cut_short)]) == 130
    assert " tensors, 3 of 12 windows of 32 tokens\n" in capsys.readouterr().out
    assert cut_short.read_bytes() == whole.read_bytes()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_keeps_nothing(
    tiny: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imatrix, "measure_imatrix", pressed_in_window(3, times=2))
    assert main(["imatrix", str(tiny), "-f", str(text), "-c", "32", "-o", str(text.parent / "i.gguf")]) == 130
    assert capsys.readouterr() == ("", "")
    assert [path.name for path in text.parent.iterdir()] == [text.name]


def test_the_value_beside_the_bar_is_the_perplexity_of_the_text(
    tiny: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The progress bar's last value equals the result of `localllm perplexity`, even if a window takes several
    steps.
    """
    bars = []

    class Shown(imatrix.RunningProgress):
        shown = True

        def __init__(self) -> None:
            super().__init__()
            bars.append(self)

    monkeypatch.setattr(imatrix, "RunningProgress", Shown)
    monkeypatch.setattr("localllm.loading.loader.BATCH_ROWS", 20)
    options = ["-f", str(text), "-c", "64", "-t", "1"]
    assert main(["imatrix", str(tiny), *options, "-o", str(text.parent / "i.gguf")]) == 0
    capsys.readouterr()
    assert main(["perplexity", str(tiny), *options, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)["perplexity"]["value"]
    (bar,) = bars
    assert bar.value == f"perplexity {value:.4f}"


def test_a_terminal_shows_the_value_of_an_imatrix_too(tiny: Path, tmp_path: Path) -> None:
    long, target = text_of(tmp_path, 400_000), tmp_path / "i.gguf"
    terminal = Terminal("imatrix", tiny, "-f", long, "-c", "32", "-t", "1", "-o", target, columns=120)
    terminal.wait_for(r"observing")
    terminal.wait_for(r"perplexity \d+\.\d{4}")
    terminal.type("\x03")
    terminal.wait_for(r"tensors, \d+ of \d+ windows of 32 tokens")
    assert terminal.end() == 130
    assert target.is_file()
