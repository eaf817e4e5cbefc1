"""The rate of unidiomatic phrases in each room stays at or below its limit. Rewrite a sentence rather than
raise the limit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.words import count, rate

ROOT = Path(__file__).resolve().parent.parent
SLACK = 3.0  # largest gap between limit and count; lower the limit after a room is rewritten

# Limits in phrases per 10,000 words, including strings that users see.
FIGURES = {
    "localllm": 0.0,
    "localllm/base": 0.0,
    "localllm/cli": 0.0,
    "localllm/cluster": 0.0,
    "localllm/constrained": 0.0,
    "localllm/convert": 0.0,
    "localllm/diffusion": 0.0,
    "localllm/distributed": 0.0,
    "localllm/engine": 0.0,
    "localllm/evaluation": 0.0,
    "localllm/explain": 0.0,
    "localllm/generation": 0.0,
    "localllm/gguf": 5.5,
    "localllm/hub": 0.0,
    "localllm/loading": 0.0,
    "localllm/media": 0.0,
    "localllm/options": 0.0,
    "localllm/output": 5.5,
    "localllm/quantize": 0.0,
    "localllm/sampling": 0.0,
    "localllm/sandbox": 0.0,
    "localllm/saved": 0.0,
    "localllm/server": 1.0,
    "localllm/template": 0.0,
    "localllm/tokenizer": 0.0,
    "backends": 3.5,
    "benchmarks": 6.0,
    "docs": 1.5,
    "models": 1.0,
    "plan": 0.0,
    "quant": 2.0,
    "tests": 5.0,
}


def paths(room: str) -> list[Path]:
    """Return the files and folders of a room; `localllm` means the modules outside all rooms."""
    return sorted((ROOT / room).glob("*.py")) if room == "localllm" else [ROOT / room]


@pytest.mark.parametrize("room", FIGURES)
def test_a_room_keeps_to_its_figure(room: str) -> None:
    words, phrases = count(paths(room))
    found = rate(words, phrases)
    worst = "\n".join(f"{file.relative_to(ROOT)}: {sentence[:150]}" for file, sentence, _ in phrases[:5])
    assert found <= FIGURES[room], f"{found:.1f} phrases per 10,000 words in {room}, such as\n{worst}"
    assert found >= FIGURES[room] - SLACK, f"lower the figure of {room} to {found:.1f}"


def test_every_room_has_a_figure() -> None:
    found = [path.parent for path in (ROOT / "localllm").glob("*/__init__.py")]
    rooms = {f"localllm/{each.name}" for each in found if not each.is_symlink()}
    others = {"localllm", "quant", "plan", "models", "backends", "tests", "benchmarks", "docs"}
    assert rooms | others == set(FIGURES)


def test_phrases_are_counted_in_prose_only(tmp_path: Path) -> None:
    odd = "It is the {} rows.".format("be" + "side")  # split so that the phrase is not counted in this file
    (tmp_path / "a.py").write_text(f'"""{odd}"""\n{odd[10:12]}side = 1  # {odd} One row.\n')
    words, found = count([tmp_path])
    assert words == 12
    assert [(sentence, hits) for _, sentence, hits in found] == [(odd, 1), (odd, 1)]
    (tmp_path / "b.md").write_text("Somebody waits.\n\n```\nanybody\n```\n")
    assert rate(*count([tmp_path / "b.md"])) == 1e4 / 2
