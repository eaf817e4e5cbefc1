"""The README's figures are those that were measured and stored."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_readme_shows_the_stored_comparison(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import compare

    readme = (ROOT / "README.md").read_text()
    shown = readme.split("<!-- performance -->")[1].split("<!-- /performance -->")[0].strip()
    assert shown == compare.table(compare.stored(compare.RESULTS / "compare.jsonl"))
    sys.modules.pop("compare", None)


def test_a_ratio_is_the_median_of_rounds_against_the_better_peer(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import compare

    row = compare.Row(
        "m", "pp512", 2, ours=[30.0, 40.0, 90.0], peer_repacked=[10.0, 10.0, 30.0], peer_plain=[20.0, 5.0, 9.0]
    )
    assert row.ratio == 3.0  # 30/20, 40/10, 90/30
    sys.modules.pop("compare", None)


def test_a_long_chat_evaluates_what_is_new_and_a_token_at_most(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import long_chat

    import localllm

    with localllm.load("demo", ctx=512) as model:
        model.context = 200
        rows = long_chat.chat(model, turns=20, answer=16)
    assert any(row["shifted"] for row in rows)
    for row in rows:
        assert row["shifted"] or 0 <= row["evaluated"] - row["new"] <= 1
        assert 0 < row["new"] < 40 or row["shifted"]
    for name in ("long_chat", "compare"):
        sys.modules.pop(name, None)
