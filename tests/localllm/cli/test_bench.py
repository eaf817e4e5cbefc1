"""`localllm bench`: llama-bench's tests and columns, and numbers that agree with one another."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

import localllm as api
from localllm.cli.main import main
from tests.localllm.support import write_model

COLUMNS = ["model", "size", "params", "backend", "threads", "test", "t/s"]  # llama-bench's, on a CPU


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def bench(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["bench", *map(str, words)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return str(out)


def test_table_has_the_columns_and_tests_of_llama_bench(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = bench(capsys, tiny, "-p", "16,32", "-n", 4, "-d", "0,24", "-t", 1, "-r", 2)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()]
    assert rows[0][:7] == COLUMNS
    assert rows[0][7:] == ["GB/s", "roof GB/s", "% of roof", "GOP/s"]
    assert [row[5] for row in rows[2:]] == ["pp16", "pp32", "tg4", "pp16 @ d24", "pp32 @ d24", "tg4 @ d24"]
    assert all(" ± " in row[6] for row in rows[2:])
    assert len({len(line) for line in out.splitlines()}) == 1
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
    # six tokens see 11 to 16 positions: 13.5 on the average
    assert decode["bytes_per_token"] == round(memory.weights_per_token + 13.5 * memory.cache_per_token)
    assert decode["gb_per_s"] == pytest.approx(decode["avg_ts"] * decode["bytes_per_token"] / 1e9)
    assert decode["roof_share"] == pytest.approx(decode["gb_per_s"] / decode["roof_gb_per_s"])
    # prompt: two operations a weight of every layer, the output for one token, attention over 11 to 18 positions
    layer = 4 * 64 * 64 + 3 * 64 * 96
    work = 2 * (8 * layer + 356 * 64) + 4 * 64 * sum(range(11, 19))
    assert prompt["gop_per_s"] == pytest.approx(work / prompt["avg_ns"], rel=1e-5)  # whole nanoseconds
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
    assert any(test["n_drafted"] for test in tests)  # a tiny random model repeats itself
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in bench(capsys, *words).splitlines()]
    assert rows[0][11:] == ["guessed by", "plain t/s", "x plain", "accepted"]
    assert rows[2][11:] == [""] * 4
    assert rows[3][11] == "ngram"
    assert " of " in rows[3][14]


def test_the_cache_is_told_where_it_is_not_the_usual(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, _, row = bench(capsys, tiny, "-p", 4, "-n", 0, "-r", 1, "-ctk", "fp8").splitlines()
    assert [cell.strip() for cell in header.split("|")[6:8]] == ["type_k", "type_v"]
    assert [cell.strip() for cell in row.split("|")[6:8]] == ["fp8", "f16"]
    assert main(["bench", str(tiny), "-p", "4", "-n", "0", "-r", "1", "-ctk", "auto"]) == 0
    assert capsys.readouterr().err.startswith("cache: keys ")
