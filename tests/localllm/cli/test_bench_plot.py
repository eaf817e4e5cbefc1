"""`localllm bench --plot` and `--compare`: plots show the measured values, and hostile input files are safe."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable
from html import unescape
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import pytest

import localllm as api
from localllm.base.machine.energy import Energy
from localllm.cli.commands import bench as command
from localllm.cli.commands import bench_picture
from localllm.cli.commands.bench_tests import Test as BenchTest
from localllm.cli.commands.bench_work import weights_read, work_of
from localllm.cli.commands.doctor_speed import Speed
from localllm.cli.main import main
from localllm.cli.plots import style
from localllm.cli.plots.picture import picture_of
from localllm.cli.plots.runs import MOST_BYTES, MOST_ROWS, RunError, read_run, run_of
from tests.localllm.support import write_model

ROOFS = Speed(2, 20e9, 900e9, ())
TESTS = ("-p", "4,16", "-n", "6", "-d", "0,10", "-t", "1,2", "-r", "2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_energy", lambda: Energy((), "no counters in this test"))
    monkeypatch.setattr(bench_picture, "measure_speed", lambda main: ROOFS)


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a model is loaded or the machine's speed is measured."""

    def never(*words: object, **more: object) -> None:
        raise AssertionError("measured before the files were checked")

    monkeypatch.setattr(command, "load", never)
    monkeypatch.setattr(bench_picture, "measure_speed", never)


def result(**changes: Any) -> dict[str, Any]:
    """Return a shortened result row of `bench -o json`."""
    usual = {
        "model_filename": "/models/tiny.gguf", "model_type": "llama 0.08 M Q8_0", "cpu_info": "cpu: znver4, 2 threads",
        "n_threads": 2, "n_gpu_layers": "auto", "type_k": "f16", "type_v": "f16", "n_prompt": 0, "n_gen": 64,
        "n_depth": 0, "test": "tg64", "avg_ts": 40.0, "stddev_ts": 1.0, "avg_ns": 1_600_000_000,
        "roof_gb_per_s": 30.0, "run_operations": 128_000_000_000, "run_bytes": 64_000_000_000,
    }  # fmt: skip
    return usual | changes


def prompts(*lengths: int, rate: Callable[[int], float] = lambda length: 10.0 * length) -> list[dict[str, Any]]:
    return [
        result(n_prompt=length, n_gen=0, test=f"pp{length}", avg_ts=rate(length), avg_ns=round(1e9 * length / 100))
        for length in lengths
    ]


# -- values ----------------------------------------------------------------------------------------------------------


def test_work_is_counted_by_hand(tiny: Path) -> None:
    layer = 4 * 64 * 64 + 3 * 64 * 96
    with api.load(tiny, threads=1, ctx_size=64) as model:
        memory = model.executable.memory
        decoding = work_of(model, BenchTest(0, 6, 10))
        prompt = work_of(model, BenchTest(8, 0, 10))
        both = work_of(model, BenchTest(8, 6, 2))
        assert decoding.operations == 6 * 2 * (layer + 356 * 64) + 4 * 64 * sum(range(11, 17))
        assert decoding.bytes == 6 * round(memory.read_after(13.5))
        assert prompt.operations == 2 * (8 * layer + 356 * 64) + 4 * 64 * sum(range(11, 19))
        row = 64 // 32 * 34  # bytes of a Q8_0 embedding row; each of the 8 tokens reads one
        assert prompt.bytes == pytest.approx(memory.read_after(18) + 7 * row, rel=1e-3)
        assert both.operations == (
            work_of(model, BenchTest(8, 0, 2)).operations + work_of(model, BenchTest(0, 6, 10)).operations
        )
        assert model.plan is not None
        assert weights_read(model.plan, 1) < weights_read(model.plan, 2) < weights_read(model.plan, 10_000)
        assert weights_read(model.plan, 10**9) == sum(read.weight.bytes for read in model.plan.reads)


def test_a_picture_has_the_numbers_of_the_rows(tiny: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["bench", str(tiny), *TESTS, "-o", "json", "--plot", str(tmp_path / "a.svg")]) == 0
    out, err = capsys.readouterr()
    assert err == f"wrote {tmp_path / 'a.svg'}\n"
    rows = json.loads(out)
    assert all((row["machine_gb_per_s"], row["machine_gop_per_s"]) == (20, 900) for row in rows)
    picture = picture_of([run_of("now", rows)])
    assert [(point.intensity, point.gop) for point in picture.points] == [
        pytest.approx((row["run_operations"] / row["run_bytes"], row["run_operations"] / row["avg_ns"])) for row in rows
    ]
    assert picture.roofs[0].gb == max(20, *(row["roof_gb_per_s"] for row in rows))
    assert picture.roofs[0].gop == 900
    assert picture.roofs[0].ridge == 900 / picture.roofs[0].gb
    assert " ops/byte" in (tmp_path / "a.svg").read_text().partition("GOP/s, ridge ")[2][:20]
    assert [bar.rates for bar in picture.bars] == [(row["avg_ts"],) for row in rows]
    assert [bar.spreads for bar in picture.bars] == [(row["stddev_ts"],) for row in rows]
    depth, length, threads = picture.panels
    for panel, field, count in ((depth, "n_depth", 6), (length, "n_prompt", 4), (threads, "n_threads", 6)):
        assert len(panel.series) == count
        drawn = sorted(point for series in panel.series for point in series.points)
        meant = [row for row in rows if panel is not length or not row["n_gen"]]
        assert drawn == sorted((row[field], row["avg_ts"], row["stddev_ts"]) for row in meant)
        assert all(len(series.points) == 2 for series in panel.series)
    assert {series.label for series in depth.series} == {
        f"{test}, {n}" for test in ("pp4", "pp16", "tg6") for n in ("1 thread", "2 threads")
    }


def test_roofs_that_other_programs_lowered_are_told(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    busy = Speed(2, 20e9, 900e9, ("4.9 programs wanted to run", "reading was slow"))
    monkeypatch.setattr(bench_picture, "measure_speed", lambda main: busy)
    assert main(["bench", str(tiny), "-p", "4", "-n", "0", "-r", "1", "--plot", str(tmp_path / "a.svg")]) == 0
    told = "the roofs may be too low: 4.9 programs wanted to run; reading was slow"
    assert capsys.readouterr().err.splitlines() == [told, f"wrote {tmp_path / 'a.svg'}"]


@pytest.mark.parametrize(("share", "kept"), [(0.9, 0), (0.99, 1), (2.0, 1)])
def test_products_slower_than_a_test_are_no_roof(share: float, kept: int) -> None:
    fastest = max(row.gop for row in run_of("now", [result(), *prompts(64, 128)]).rows)
    measured = {"machine_gb_per_s": 20.0, "machine_gop_per_s": share * fastest}
    rows = [row | measured for row in [result(), *prompts(64, 128)]]
    (roof,) = picture_of([run_of("now", rows)]).roofs
    assert (roof.gb, roof.gop, roof.disturbed) == (30.0, kept * share * fastest, not kept)


def test_what_was_not_varied_has_no_panel() -> None:
    assert picture_of([run_of("now", [result()])]).panels == ()
    (panel,) = picture_of([run_of("now", prompts(64, 128))]).panels
    assert panel.title == "Prompts: speed against their length"
    assert [series.points for series in panel.series] == [((64, 640, 1), (128, 1280, 1))]


def test_ratios_are_new_over_old(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", str(tiny), "-p", "4,8", "-n", "0", "-r", "2", "-t", "1"]
    assert main([*words, "-o", "jsonl"]) == 0
    old = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    extra = result(n_threads=7)
    (tmp_path / "old.jsonl").write_text("\n".join(json.dumps(row) for row in [*old, extra]) + "\n")
    assert main([*words, "-o", "json", "--compare", str(tmp_path / "old.jsonl")]) == 0
    out, err = capsys.readouterr()
    new = json.loads(out)  # stdout stays machine-readable; the ratios go to stderr
    ratios = [a["avg_ts"] / b["avg_ts"] for a, b in zip(new, old, strict=True)]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in err.splitlines() if "pp" in line]
    assert [row[5] for row in cells] == [f"{ratio:.3f}" for ratio in ratios]
    assert [row[3] for row in cells] == [f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}" for row in new]
    ending = f"2 tests compared with old.jsonl; median ratio {median(ratios):.3f}; 1 tests only in old.jsonl"
    assert err.splitlines()[-1] == ending
    assert main([*words, "--compare", str(tmp_path / "old.jsonl")]) == 0
    assert "compared with old.jsonl" in capsys.readouterr().out


def test_both_runs_are_drawn() -> None:
    new, old = run_of("now", [*prompts(64, 128), result()]), run_of("old", prompts(64, 256))
    picture = picture_of([new, old])
    assert [bar.rates for bar in picture.bars] == [(640, 640), (1280, 0), (40, 0), (0, 2560)]
    assert [(point.run, point.label) for point in picture.points] == [
        (0, "pp64"), (0, "pp128"), (0, "tg64"), (1, "pp64"), (1, "pp256"),
    ]  # fmt: skip
    (panel,) = picture.panels
    assert [series.run for series in panel.series] == [0, 1]


def test_results_of_llama_bench_are_read(tmp_path: Path) -> None:
    theirs = {
        "model_filename": "m.gguf", "model_type": "llama 1B Q4_K - Medium", "n_threads": 2, "n_gpu_layers": -1,
        "type_k": "f16", "type_v": "f16", "n_prompt": 512, "n_gen": 0, "n_depth": 4096, "avg_ns": 5, "stddev_ns": 1,
        "avg_ts": 100.5, "stddev_ts": 0.5, "samples_ts": [100.5],
    }  # fmt: skip
    (tmp_path / "theirs.json").write_text(json.dumps([theirs]))
    (row,) = read_run(tmp_path / "theirs.json").rows
    assert (row.test, row.rate, row.placed, row.intensity) == ("pp512 @ d4096", 100.5, "", 0)


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it contains no results"),
        ("[]", "it contains no results"),
        ("hello", "not JSON"),
        ("\xff\xfe", "not JSON"),
        ("3", "result 1 is not an object"),
        ("[[1]]", "result 1 is not an object"),
        ("[" * 100_000, "not JSON"),
        (json.dumps([result(), {}]), "result 2: n_prompt is not a number"),
        (json.dumps([result(avg_ts="fast")]), "result 1: avg_ts is not a number"),
        (json.dumps([result(avg_ts=True)]), "result 1: avg_ts is not a number"),
        ('[{"n_prompt": 1, "n_gen": 1, "n_depth": 0, "avg_ts": NaN}]', "avg_ts is not a number from 0"),
        (json.dumps([result(avg_ts=10**400)]), "avg_ts is not a number from 0"),
        (json.dumps([result(avg_ts=0)]), "it measures nothing"),
        (json.dumps([result(n_gen=-1)]), "n_gen is not a number from 0"),
        (json.dumps([result(n_gen=0.5)]), "n_gen is not a whole number"),
        (json.dumps([result(test=["tg"])]), "test is not a text"),
        (json.dumps([result(model_filename="")]), "model_filename is not a text"),
        (json.dumps([result()] * (MOST_ROWS + 1)), f"more than {MOST_ROWS} results"),
    ],
    ids=range(18),
)
def test_a_hostile_file_is_one_line_before_anything_is_measured(
    text: str, reason: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], unmeasured: None
) -> None:
    path = tmp_path / "old.json"
    path.write_bytes(text.encode("latin-1"))
    assert main(["bench", str(tiny), "--compare", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {path}: not results of localllm bench -o json or jsonl: ")
    assert reason in err
    assert err.count("\n") == 1
    assert len(err) < 400 + len(str(path))


def test_a_file_that_is_too_large_or_missing_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(RunError, match="more than 32 MiB"):
        read_run(tmp_path / "large")
    with pytest.raises(RunError, match="cannot be read: No such file"):
        read_run(tmp_path / "missing")
    with pytest.raises(RunError, match="cannot be read: is not a regular file but a folder"):
        read_run(tmp_path)


def test_the_place_is_checked_before_anything_is_measured(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], unmeasured: None
) -> None:
    taken, old = tmp_path / "taken.svg", tmp_path / "old.html"
    taken.write_text("mine")
    old.write_text(json.dumps([result()]))
    for words, code, reason in (
        (["--plot", taken], 1, "exists; give another name, or --force"),
        (["--plot", tmp_path / "none" / "a.svg"], 1, "no such folder"),
        (["--plot", tmp_path / "a.pdf"], 1, "give a name that ends in .svg, .png or .html"),
        (["--plot", old, "--compare", old, "--force"], 1, "this file is being read"),
        (["--plot", tmp_path / "a.svg", "--against", "llama-bench"], 1, "--against excludes --plot and --compare"),
    ):
        assert main(["bench", str(tiny), *map(str, words)]) == code
        err = capsys.readouterr().err
        assert reason in err
        assert err.count("\n") == 1
    assert taken.read_text() == "mine"


def test_without_matplotlib_one_line_says_how_to_get_it(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, unmeasured: None
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["bench", str(tiny), "--plot", str(tmp_path / "a.svg")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: --plot needs matplotlib (")
    assert err.endswith("); pip install 'localllm[plot]'\n")


def test_force_replaces_a_picture(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.PNG"
    path.write_text("old")
    assert main(["bench", str(tiny), "-p", "4", "-n", "0", "-r", "1", "--plot", str(path), "--force"]) == 0
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


# -- drawing ---------------------------------------------------------------------------------------------------------

HOSTILE = '_<script>alert("$x_1$ & y")</script>\x1b[31m\x00'


def hostile_picture() -> tuple[Any, Any]:
    rows = [*prompts(64, 128), result(n_depth=512, test="tg64 @ d512"), result()]
    rows += [result(model_type=HOSTILE * 9, model_filename=HOSTILE)]
    new, old = run_of("now", rows), run_of(HOSTILE.replace("\x00", "").replace("\x1b", ""), [*prompts(64, 512)])
    return [new, old], picture_of([new, old])


def test_the_same_picture_is_the_same_svg() -> None:
    pytest.importorskip("matplotlib")
    from localllm.cli.plots.drawing import draw

    _, picture = hostile_picture()
    with warnings.catch_warnings(action="error"):  # such as matplotlib's warning about a layout without room
        first = draw(picture, "svg")
    assert draw(picture, "svg") == first
    text = first.decode()
    ElementTree.fromstring(text)
    assert "<dc:date>" not in text
    assert not re.search(r"20\d\d-\d\d-\d\d", text)
    assert "<script" not in text
    shown = [unescape(found).strip() for found in re.findall(r"<text[^>]*>([^<]*)</text>", text)]
    assert "operations per byte read" in shown
    assert "billions of operations per second" in shown
    assert "tokens in the cache" in shown
    assert shown.count("tokens per second") == 3
    named = '_<script>alert("$x_1$ & y")</script>\\x1b['
    assert any(each.startswith(named) for each in shown)  # the legend shows names that begin with "_", too
    assert "640.0, before 640.0 = 1.00x" in shown


def test_a_page_stands_alone_and_holds_the_table() -> None:
    pytest.importorskip("matplotlib")
    from localllm.cli.plots.drawing import draw
    from localllm.cli.plots.page import page

    runs, picture = hostile_picture()
    text = page(picture.title, draw(picture, "svg", titled=False), runs).decode()
    words = [unescape(found) for found in re.findall(r"<(?:h1|text)[^>]*>([^<]*)<", text)]
    # the page shows the title, so the SVG omits it
    assert [word for word in words if word.startswith(picture.title[:9])] == [picture.title]
    assert text.startswith("<!doctype html>")
    assert text.count("<svg") == 1
    assert "<?xml" not in text
    assert not re.findall(r"<script|<link|<img|<iframe|\bon\w+=|@import|url\((?!#)", text)
    assert not [at for at in re.findall(r'(?:src|href)="([^"]*)"', text) if not at.startswith("#")]
    assert "default-src 'none'" in text
    cells = re.findall(r"<td>([^<]*)</td>", text)
    for row in runs[0].rows:
        assert {f"{row.rate:.2f}", f"{row.intensity:.4g}", f"{row.gop:.4g}", row.test} <= set(cells)
    assert "1.000" in cells  # the ratio of pp64


def luminance(colour: str) -> float:
    """Return the relative luminance as WCAG 2.1 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("paper", [style.PAPER, style.DARK[style.PAPER]], ids=["light", "dark"])
def test_colours_can_be_told_from_the_paper(paper: str) -> None:
    dark = paper != style.PAPER
    for colour in (*style.COLOURS, style.DARK[style.LINES] if dark else style.LINES):
        assert contrast(colour, paper) >= 3, colour  # WCAG's minimum contrast for graphics
    assert contrast(style.DARK[style.INK] if dark else style.INK, paper) >= 7  # WCAG's enhanced contrast for text


def test_a_dark_theme_swaps_all_of_ink_and_paper() -> None:
    pytest.importorskip("matplotlib")
    from localllm.cli.plots.drawing import draw

    text = draw(picture_of([run_of("now", [result()])]), "svg").decode()
    drawn = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", text))
    assert drawn <= {*style.DARK, *style.COLOURS}  # no default colours of matplotlib
    for light, dark in style.DARK.items():
        assert f'[style*="fill: {light}"]{{fill:{dark} !important}}' in text
