"""`localllm cluster plan`: the rows, and wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import localllm
from localllm.cli.main import main
from localllm.cli.tool_options import ClusterOptions, NodeSpec, nodes_of
from localllm.loading.resolve import resolve
from localllm.options.declare import declared
from tests.localllm.media_models import write_pair


def test_each_number_of_stages_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "plan", "demo", "--nodes", "here,8MB@1GB/s,64MB", "--delay", "2", "-t", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["stages"] for row in rows] == [1, 2, 3]
    assert [row["layers"][-1].split(" + ")[-1] for row in rows] == ["output"] * 3
    assert rows[1]["nodes"] == ["here", "node 3"]  # node 2 is slow
    assert all(
        own <= 8e6 for row in rows for node, own in zip(row["nodes"], row["memory"], strict=True) if node == "node 2"
    )
    assert rows[0]["hop_seconds"] == 0
    assert rows[1]["hop_seconds"] == pytest.approx(2 * 0.0025, rel=0.02)
    assert rows[1]["tokens_per_second"]["1"] < min(1 / 0.005, rows[0]["tokens_per_second"]["1"])
    weights = resolve("demo").stat().st_size
    assert weights < sum(rows[2]["memory"]) < 3 * weights


def test_the_first_stage_has_the_memory_of_the_encoders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An mmproj file in the model's folder counts, as for `localllm run`."""
    path, found = write_pair(tmp_path), []
    for words in ([], ["--mmproj", "off"]):
        assert main(["cluster", "plan", str(path), "--nodes", "here,here", "-t", "1", "--json", *words]) == 0
        found.append([row["memory"] for row in json.loads(capsys.readouterr().out)])
    with localllm.load(path, threads=1) as model:
        assert model.multimodal is not None
        encoders = model.multimodal.needed_bytes(1)
    assert encoders > 100_000
    for (first, *others), (first_without, *others_without) in zip(*found, strict=True):
        assert first - first_without == encoders
        assert others == others_without


def test_the_table_says_what_is_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "plan", "demo", "--nodes", "4MB,8MB", "-t", "1", "-c", "256"]) == 0
    found = capsys.readouterr().out
    assert "not possible: the model does not fit in 1 stage: it needs 7." in found
    assert "fastest for one answer: 2 stages; for 8 at a time: 2 stages" in found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cluster"], "expected `localllm cluster plan MODEL --nodes SPEC`"),
        (["cluster", "foo"], "got 'foo'"),
        (["cluster", "plan"], "MODEL is required"),
        (["cluster", "plan", "demo", "--nodes", "here,x"], "node 2 is 'x': give here, same, a memory such as 16GB"),
        (["cluster", "plan", "demo", "--nodes", "here,8GB@0"], "node 2 is '8GB@0': memory and bandwidth are above 0"),
        (["cluster", "plan", "demo", "--nodes", ",".join(["here"] * 9)], "9 nodes are given; at most 8"),
        (["cluster", "plan", "demo", "--nodes", "1KB,1KB"], "the model does not fit in 2 stages: it needs"),
        (["cluster", "plan", "demo", "--network", "3x"], "'3x' is not a size"),
    ],
)
def test_wrong_input_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) in (1, 2)
    found = capsys.readouterr()
    assert said in found.err
    assert found.err.count("\n") == 1
    assert found.out == ""


def test_sizes_and_rates_are_read() -> None:
    network = next(each for each in declared(ClusterOptions) if each.name == "network")
    assert nodes_of("here, 16GB@20GB/s,1GiB") == (
        NodeSpec("here"), NodeSpec("node 2", 16 * 10**9, 20e9), NodeSpec("node 3", 1 << 30),
    )  # fmt: skip
    assert [network.option.kind.read(text) for text in ("1Gbit/s", "100MB/s", "2.5Gbit")] == [125e6, 1e8, 312.5e6]
