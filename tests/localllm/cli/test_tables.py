"""On a terminal, tables fit the width, drop empty columns, or are transposed. A pipe gets the full table."""

from __future__ import annotations

import pytest

from localllm.cli.commands import bench, show
from localllm.cli.main import main
from localllm.cli.terminal.formatting import markdown, text_table

HEADER = ("name", "nothing", "speed")
ROWS = [("a model with a long name", "", "12.5"), ("b", "", "7")]


def test_a_table_drops_empty_columns_and_then_lies_down() -> None:
    whole = markdown(HEADER, ROWS, right=("speed",))
    assert text_table(HEADER, ROWS, ("speed",)) == whole
    assert text_table(HEADER, ROWS, ("speed",), room=len(whole.split("\n")[0])) == whole
    assert text_table(HEADER, ROWS, ("speed",), room=40) == (
        "| name                     | speed |\n"
        "| ------------------------ | ----: |\n"
        "| a model with a long name |  12.5 |\n"
        "| b                        |     7 |"
    )
    assert (
        text_table(HEADER, ROWS, ("speed",), room=31)
        == "name   a model with a long name\nspeed  12.5\n\nname   b\nspeed  7"
    )


@pytest.mark.parametrize("width", [100, 60, 40])
def test_bench_and_show_fit_a_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "room", lambda: width)
    monkeypatch.setattr(show, "room", lambda: width)
    monkeypatch.setattr("localllm.cli.starting.room", lambda: width)
    for words in (["bench", "demo", "-p", "2", "-n", "2", "-r", "1"], ["show", "demo"], ["show", "--archs"]):
        assert main([*words, *([] if words[0] == "show" else ["-t", "1"])]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert all(len(line) <= width or " " not in line.strip() for line in lines), max(lines, key=len)
        if words[0] == "bench":
            assert [line.split()[1] for line in lines if line.startswith("test ")] == ["pp2", "tg2"]
            assert sum(line.startswith("model ") for line in lines) == 1
