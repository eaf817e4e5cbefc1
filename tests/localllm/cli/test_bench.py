"""`localllm bench`: tests and columns as in llama-bench, and consistent results."""

from __future__ import annotations

import csv
import io
import json
import os
import sqlite3
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

import localllm as api
from localllm.base.machine.energy import Energy
from localllm.cli.commands import bench as command
from localllm.cli.commands import bench_against
from localllm.cli.commands.bench_tests import Test as BenchTest
from localllm.cli.main import main
from localllm.engine.encoder import Encoder
from tests.localllm.media_models import write_pair
from tests.localllm.support import write_model

COLUMNS = ["model", "size", "params", "backend", "threads", "test", "t/s"]  # llama-bench's columns for the CPU


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(autouse=True)
def no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide energy counters, because they would add columns."""
    monkeypatch.setattr(command, "find_energy", lambda: Energy((), "no counters in this test"))


def bench(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["bench", *map(str, words)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return str(out)


def test_table_has_the_columns_and_tests_of_llama_bench(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = bench(capsys, tiny, "-p", "16,32", "-n", 4, "-d", "0,24", "-t", 1, "-r", 2)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()]
    assert rows[0][:7] == COLUMNS
    assert rows[0][7:] == ["GB/s", "roof GB/s", "% of roof", "GOP/s", "p50 ms", "p90 ms", "p99 ms", "load s", "peak"]
    assert [row[5] for row in rows[2:]] == ["pp16", "pp32", "tg4", "pp16 @ d24", "pp32 @ d24", "tg4 @ d24"]
    assert all(" ± " in row[6] for row in rows[2:])
    assert len({line.count("|") for line in out.splitlines()}) == 1
    assert rows[2][0] == "llama 0.08 M Q8_0"


def test_numbers_of_a_result_agree(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results: list[dict[str, Any]] = json.loads(bench(capsys, tiny, "-p", 8, "-n", 6, "-d", 10, "-r", 3, "-o", "json"))
    prompt, decode = results
    with api.load(tiny) as model:
        memory = model.executable.memory
    for result, tokens in ((prompt, 8), (decode, 6)):
        assert len(result["samples_ns"]) == 3
        rates = [tokens / (ns / 1e9) for ns in result["samples_ns"]]
        assert result["avg_ts"] == pytest.approx(sum(rates) / 3)
        assert result["n_depth"] == 10
    # Six decode steps attend to 11 to 16 tokens, 13.5 on average.
    assert decode["bytes_per_token"] == round(memory.weights_per_token + 13.5 * memory.cache_per_token)
    assert decode["gb_per_s"] == pytest.approx(decode["avg_ts"] * decode["bytes_per_token"] / 1e9)
    assert decode["roof_share"] == pytest.approx(decode["gb_per_s"] / decode["roof_gb_per_s"])
    # Operations of prefill: two per weight of every layer and token, the output matrix for one token, and
    # attention over 11 to 18 tokens.
    layer = 4 * 64 * 64 + 3 * 64 * 96
    work = 2 * (8 * layer + 356 * 64) + 4 * 64 * sum(range(11, 19))
    # avg_ns is rounded to whole nanoseconds
    assert prompt["gop_per_s"] == pytest.approx(work / prompt["avg_ns"], rel=1e-5)
    assert (prompt["gb_per_s"], decode["gop_per_s"]) == (0, 0)


def test_csv_has_one_line_a_test(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(io.StringIO(bench(capsys, tiny, "-p", 4, "-n", 2, "-r", 1, "-t", "1,2", "-o", "csv"))))
    assert [(row["test"], row["n_threads"]) for row in rows] == [("pp4", "1"), ("tg2", "1"), ("pp4", "2"), ("tg2", "2")]
    assert all(float(row["avg_ts"]) > 0 and float(row["stddev_ts"]) == 0 for row in rows)


def test_zero_leaves_a_kind_of_test_out(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = bench(capsys, tiny, "-p", 0, "-n", 2, "-r", 1, "--no-warmup").splitlines()
    assert len(only) == 3
    assert "tg2" in only[2]


def test_guessing_is_measured_beside_the_same_answers_without(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (tiny, "-p", 0, "-n", 12, "-r", 2, "-t", 1, "--spec", "ngram")
    tests: list[dict[str, Any]] = json.loads(bench(capsys, *words, "-o", "json"))
    assert [test["test"] for test in tests] == ["tg12", "tg12 code", "tg12 dialogue", "tg12 prose"]
    assert [test["speculation"] for test in tests] == ["", "ngram", "ngram", "ngram"]
    assert (tests[0]["plain_ts"], tests[0]["n_drafted"]) == (0, 0)
    for test in tests[1:]:
        assert test["plain_ts"] > 0
        assert 0 <= test["n_accepted"] <= test["n_drafted"] <= 2 * 15 * 12
    assert any(test["n_drafted"] for test in tests)  # a tiny random model repeats itself, so n-grams match
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in bench(capsys, *words).splitlines()]
    assert rows[0][-4:] == ["guessed by", "plain t/s", "x plain", "accepted"]
    assert rows[2][-4:] == [""] * 4
    assert rows[3][-4] == "ngram"
    assert " of " in rows[3][-1]


def test_the_cache_is_told_where_it_is_not_the_usual(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, _, row = bench(capsys, tiny, "-p", 4, "-n", 0, "-r", 1, "-ctk", "fp8").splitlines()
    assert [cell.strip() for cell in header.split("|")[6:8]] == ["type_k", "type_v"]
    assert [cell.strip() for cell in row.split("|")[6:8]] == ["fp8", "f16"]
    assert main(["bench", str(tiny), "-p", "4", "-n", "0", "-r", "1", "-ctk", "auto"]) == 0
    assert capsys.readouterr().err.startswith("cache: keys ")


# -- pictures --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"), "qwen3vl", name="seeing")


def test_pictures_are_measured_in_two_turns(
    pair: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    begin = Encoder.begin

    def counted(self: Encoder, inputs: Any, flags: Any = ()) -> Any:
        encoded.append(len(inputs))
        return begin(self, inputs, flags)

    monkeypatch.setattr(Encoder, "begin", counted)
    words = (pair, "-p", 4, "-n", 0, "--image", "64x32,96x64", "--image", "64x64", "-r", 2, "-t", 1, "--no-warmup")
    text, *pictures = json.loads(bench(capsys, *words, "-o", "json"))
    assert (text["test"], text["image"], text["encode_ns"]) == ("pp4", "", 0)
    assert [each["test"] for each in pictures] == [each["image"] for each in pictures] == ["64x32", "96x64", "64x64"]
    assert len(encoded) == 3 * 2  # once a run: the second turn finds the picture in the cache
    sizes = [each["n_image"] for each in pictures]
    assert sizes[0] < sizes[2] < sizes[1]
    with api.load(pair, threads=1, ctx_size=256) as model:
        for each in pictures:
            height, width = (int(side) for side in each["image"].split("x")[::-1])
            chunks = model.media("<__media__>", np.zeros((height, width, 3), np.uint8))
            assert each["n_image"] == sum(chunk.count for chunk in chunks if chunk.kind == "image")
    for each in pictures:
        assert 0 < each["preprocess_ns"] + each["encode_ns"] < each["first_token_ns"] == each["avg_ns"]
        assert each["second_turn_ns"] > 0
        assert each["n_prompt"] > each["n_image"] + 8 + 32
        rates = [each["n_prompt"] / (ns / 1e9) for ns in each["samples_ns"]]
        assert each["avg_ts"] == pytest.approx(sum(rates) / 2)


def test_pictures_add_columns(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = bench(capsys, pair, "-p", 4, "-n", 0, "--image", "64x64", "-r", 1, "-t", 1)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()]
    assert rows[0][-5:] == ["picture tokens", "prepare ms", "encode ms", "first ms", "second ms"]
    assert rows[2][-5:] == [""] * 5
    assert rows[3][rows[0].index("test")] == "64x64"
    assert all(rows[3][-5:])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--image", "64"), "'64' is not a width and a height in pixels such as 1024x768"),
        (("--image", "0x5"), "'0x5' is not a width and a height in pixels such as 1024x768"),
        (("--image", "9000x9000"), "'9000x9000' has more than 50 million pixels; give a smaller size"),
        (("--image", "64x64", "--against", "llama-bench"), "--against excludes --image"),
        (("--image", "64x64", "--ray", "auto"), "--ray excludes --image"),
        (("--mmproj", "mmproj.gguf"), "--mmproj needs --image WxH, the sizes of the pictures to measure"),
        (("--image", "64x64", "--mmproj", "off"), "--image needs the encoder of pictures; give the mmproj file of"),
        (("--image", "64x64", "--mmproj", "gone.gguf"), "No such file: gone.gguf"),
    ],
)
def test_pictures_that_cannot_be_measured_are_one_line(
    words: tuple[str, ...], problem: str, pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(pair), *words]) in (1, 2)
    out, err = capsys.readouterr()
    assert problem in err
    assert (out, err.count("\n")) == ("", 1)


def test_a_model_without_encoders_measures_no_pictures(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tiny), "--image", "64x64"]) == 1
    assert "--image needs the encoder of pictures; give the mmproj file of this model" in capsys.readouterr().err


def test_an_mmproj_file_is_no_model_to_measure(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [encoders] = pair.parent.glob("mmproj*")
    assert main(["bench", str(encoders), "--image", "64x64"]) == 1
    assert "the encoders of pictures or sound, not a model" in capsys.readouterr().err


# -- latencies, energy, memory, loading ------------------------------------------------------------------------------


def test_the_times_of_tokens_make_up_the_run(tiny: Path) -> None:
    tokens = list(range(10, 40))
    with api.load(tiny, threads=1) as model:
        session = model.session()
        decoding = command._run(model, session, BenchTest(0, 6, 0), tokens[:6])
        command._evaluate(model, session, tokens[6:10])
        both = command._run(model, session, BenchTest(8, 4, 10), tokens[:22])
        assert len(session.tokens) == 22
        prompt = command._run(model, session, BenchTest(8, 0, 10), tokens[:18])
        session.close()
    assert len(decoding.gaps) == 6
    assert sum(decoding.gaps) == decoding.ns
    assert len(both.gaps) == 4
    assert 0 < sum(both.gaps) < both.ns
    assert prompt.gaps == []


def test_latencies_memory_and_loading_are_in_the_result(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = json.loads(bench(capsys, tiny, "-p", 8, "-n", 12, "-pg", "8,4", "-r", 3, "-o", "json"))
    prompt, decode, both = results
    assert [each["test"] for each in results] == ["pp8", "tg12", "pp8+tg4"]
    assert 0 < decode["p50_ns"] <= decode["p90_ns"] <= decode["p99_ns"] <= max(decode["samples_ns"])
    assert 12 * decode["p50_ns"] < 2 * max(decode["samples_ns"])
    assert (prompt["p50_ns"], prompt["p90_ns"], prompt["p99_ns"]) == (0, 0, 0)
    assert (both["n_prompt"], both["n_gen"], both["bytes_per_token"], both["gop_per_s"]) == (8, 4, 0, 0)
    assert both["avg_ts"] == pytest.approx(sum(12e9 / ns for ns in both["samples_ns"]) / 3)
    assert both["p50_ns"] > 0
    for each in results:
        assert each["load_ns"] == prompt["load_ns"] > 1e6
        assert each["peak_bytes"] > 1 << 22
        assert each["joules_per_token"] == 0


def test_latencies_of_guessed_answers_are_those_of_their_tokens(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (tiny, "-p", 0, "-n", 12, "-r", 2, "-t", 1, "--spec", "ngram", "-o", "json")
    for result in json.loads(bench(capsys, *words))[1:]:
        assert 0 < result["p50_ns"] <= result["p99_ns"] <= max(result["samples_ns"])


def test_energy_is_counted_over_the_runs_alone(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting:
        counters, missing = (1,), ""

        def __init__(self) -> None:
            self.readings = 0

        def read(self) -> tuple[int]:
            self.readings += 1
            return (600 * self.readings,)

        def joules(self, before: tuple[int], after: tuple[int]) -> float:
            return float(after[0] - before[0])

    energy = Counting()
    monkeypatch.setattr(command, "find_energy", lambda: energy)
    prompt, decode = json.loads(bench(capsys, tiny, "-p", 10, "-n", 5, "-r", 3, "-o", "json", "--backend", "cpu"))
    assert energy.readings == 4
    assert (prompt["joules_per_token"], decode["joules_per_token"]) == (600 / 30, 600 / 15)
    header, _, row = bench(capsys, tiny, "-p", 10, "-n", 0, "-r", 3, "--backend", "cpu").splitlines()
    assert header.split("|")[-2].strip() == "J/token"
    assert row.split("|")[-2].strip() == "20.000"


def test_verbose_says_what_is_not_measured(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", str(tiny), "-p", "4", "-n", "0", "-r", "1", "-v"]
    assert main(words) == 0
    assert capsys.readouterr().err == "energy is not measured: no counters in this test\n"
    assert main([*words[:-1]]) == 0
    assert capsys.readouterr().err == ""


# -- several models and output formats -------------------------------------------------------------------------------


def test_several_models_and_lists(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_model(tmp_path / "it's another.gguf")
    lines = bench(capsys, tiny, "-m", other, "-p", "4,8", "-n", 2, "-t", "1,2", "-r", 1, "-o", "jsonl").splitlines()
    results = [json.loads(line) for line in lines]
    assert [(Path(each["model_filename"]).name, each["n_threads"], each["test"]) for each in results] == [
        (name, threads, test)
        for name in ("tiny.gguf", "it's another.gguf")
        for threads in (1, 2)
        for test in ("pp4", "pp8", "tg2")
    ]
    only = bench(capsys, "-m", tiny, "-m", other, "-p", 4, "-n", 0, "-r", 1, "-o", "jsonl").splitlines()
    assert len(only) == 2


def test_lists_of_cache_types_and_layers(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [tiny, "-p", 4, "-n", 0, "-r", 1, "-ctk", "f16,q8_0", "-ctv", "f32,f16", "-ngl", "0,auto"]
    results = [json.loads(line) for line in bench(capsys, *words, "-o", "jsonl").splitlines()]
    assert [(each["n_gpu_layers"], each["type_k"], each["type_v"]) for each in results] == list(
        product(("0", "auto"), ("f16", "q8_0"), ("f32", "f16"))
    )
    assert bench(capsys, *words).splitlines()[0].split("|")[5:9] == [" threads ", "  ngl ", " type_k ", " type_v "]
    assert main(["bench", str(tiny), "-ctk", "f16,q9", "-p", "4", "-n", "0", "-r", "1"]) == 2
    assert "'q9' is not one of f32, f16, bf16" in capsys.readouterr().err


def test_sql_makes_a_table_that_a_database_reads(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "it's.gguf")
    script = bench(capsys, model, "-p", 4, "-n", 2, "-r", 2, "-o", "sql")
    again = bench(capsys, tiny, "-p", 4, "-n", 0, "-r", 1, "-o", "sql")
    database = sqlite3.connect(":memory:")
    database.executescript(script)
    database.executescript(again)  # append a second run to the table
    database.row_factory = sqlite3.Row
    rows = database.execute("SELECT * FROM localllm_bench").fetchall()
    assert [(row["test"], Path(row["model_filename"]).name) for row in rows] == [
        ("pp4", "it's.gguf"), ("tg2", "it's.gguf"), ("pp4", "tiny.gguf"),
    ]  # fmt: skip
    assert rows[1]["avg_ts"] > 0
    assert isinstance(rows[1]["avg_ns"], int)
    assert "samples_ns" not in rows[0].keys()  # noqa: SIM118 - a row iterates over its values
    database.close()


def test_a_prompt_and_an_answer_are_two_numbers(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("8", "8,4,2", "8,x", "0,4"):
        assert main(["bench", str(tiny), "-pg", text]) == 2
        assert f"-pg: {text!r} is not two whole numbers such as 512,128" in capsys.readouterr().err
    assert main(["bench", str(tiny), "-p", "0", "-n", "0"]) == 1
    assert "nothing to measure" in capsys.readouterr().err


def test_speed_beyond_the_trained_context_needs_no_warning(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench(capsys, tiny, "-p", 4, "-n", 0, "-d", 600, "-r", 1)


# -- comparison with another program ---------------------------------------------------------------------------------

PEER = """#!{python}
import json, sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(words) + "\\n")
{body}
"""
FAST = 'print(json.dumps([{"avg_ts": 100.0, "build_commit": "abc1234"}]))'


def peer(folder: Path, body: str) -> Path:
    path = folder / "llama-bench"
    path.write_text(PEER.format(python=sys.executable, log=str(folder / "log"), body=body))
    path.chmod(0o755)
    return path


def test_two_programs_run_in_turn(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def run(words: list[str], name: str) -> Mapping[str, Any]:
        ran.append(name)
        return real(words, name)

    real = bench_against._run
    monkeypatch.setattr(bench_against, "_run", run)
    monkeypatch.setenv("PATH", f"{peer(tmp_path, FAST).parent}{os.pathsep}{os.environ['PATH']}")
    words = (tiny, "-p", 8, "-n", 0, "-pg", "4,2", "-t", 1, "-r", 2, "-ctv", "q8_0", "--against", "llama-bench")
    prompt, both = json.loads(bench(capsys, *words, "-o", "json"))
    assert ran == ["localllm", "llama-bench"] * 4
    assert (prompt["test"], both["test"]) == ("pp8", "pp4+tg2")
    for each in (prompt, both):
        assert each["peer_samples_ts"] == [100, 100]
        ratios = [ours / 100 for ours in each["samples_ts"]]
        assert each["ratio"] == pytest.approx(median(ratios))
        assert (each["ratio_min"], each["ratio_max"]) == (pytest.approx(min(ratios)), pytest.approx(max(ratios)))
        assert each["peer"] == "llama-bench abc1234"
    given = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    common = ["-ctk", "f16", "-ctv", "q8_0", "-r", "1", "-o", "json", "-ngl", "0", "-fa", "1"]
    assert given[0] == given[1] == ["-m", str(tiny), "-t", "1", "-p", "8", "-n", "0", *common]
    assert given[2] == given[3] == ["-m", str(tiny), "-t", "1", "-p", "0", "-n", "0", "-pg", "4,2", *common]


def test_the_ratio_is_in_a_table(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = bench(capsys, tiny, "-p", 0, "-n", 4, "-t", 1, "-r", 1, "--against", peer(tmp_path, FAST))
    header, _, row = ([cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines())
    assert header == ["model", "threads", "test", "localllm t/s", "peer t/s", "ratio", "of rounds", "peer"]
    assert row[:3] == ["llama 0.08 M Q8_0", "1", "tg4"]
    assert row[4] == "100.00"
    assert float(row[5]) == pytest.approx(float(row[3]) / 100, abs=0.01)
    assert row[7] == "llama-bench abc1234"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('print("hello")', "did not print results like those from llama-bench -o json; is it llama-bench?"),
        ('print("[]")', "did not print results like those from llama-bench -o json; is it llama-bench?"),
        ('sys.exit("cannot load \\x1b[31m the model")', "ended with code 1: cannot load \\x1b[31m the model"),
    ],
)
def test_a_peer_that_fails_is_one_line(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, says: str
) -> None:
    words = ["bench", str(tiny), "-p", "4", "-n", "0", "-r", "1", "--against", str(peer(tmp_path, body))]
    assert main(words) == 1
    err = capsys.readouterr().err
    assert err == f"error: {words[-1]} {says}\n"


def test_a_peer_that_is_not_there_is_one_line(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tiny), "--against", "no-such-bench"]) == 1
    assert "no-such-bench: not found on the PATH; build llama.cpp's llama-bench" in capsys.readouterr().err
    (tmp_path / "text").write_text("not a program")
    assert main(["bench", str(tiny), "--against", str(tmp_path / "text")]) == 1
    assert "cannot be run" in capsys.readouterr().err
    assert main(["bench", str(tiny), "--against", "x", "--spec", "ngram"]) == 2
    assert "--against compares plain decoding; leave out -md and --spec" in capsys.readouterr().err
