"""The figures in README and docs/ equal the stored measurements, and the benchmark programs work as described."""

from __future__ import annotations

import base64
import json
import os
import struct
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from statistics import median

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent


def shown(page: str, name: str) -> str:
    """Return the table between the markers `name` on a page."""
    return (ROOT / page).read_text().split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0].strip()


def test_the_readme_and_the_page_on_speed_show_the_stored_comparison(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import compare

    rows = compare.stored(compare.RESULTS / "compare.jsonl")
    assert shown("docs/speed.md", "performance") == compare.table(rows)
    assert shown("docs/speed.md", "codebooks") == compare.formats(rows)
    assert shown("README.md", "speed") == compare.summary(rows)
    sys.modules.pop("compare", None)


def test_the_comparison_by_processor_time_refuses_short_tests(monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    """It subtracts a run with an eighth of the tokens, which llama-bench cannot do with none."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import compare

    monkeypatch.setattr(compare, "measure", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(sys, "argv", ["compare.py", "model.gguf", "--processor-time", "--tests", "tg8,tg7"])
    with pytest.raises(SystemExit):
        compare.main()
    assert "--processor-time needs tests of 8 tokens or more" in capsys.readouterr().err
    sys.modules.pop("compare", None)


def test_the_page_on_speculation_shows_the_stored_rows(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import speculation

    assert shown("docs/speculation.md", "speculation") == speculation.table(
        speculation.stored(speculation.RESULTS / "speculation.jsonl")
    )
    import forced

    assert shown("docs/speculation.md", "forced") == forced.table(forced.stored(forced.RESULTS / "forced.jsonl"))
    for name in ("speculation", "speculation_pair", "compare", "forced"):
        sys.modules.pop(name, None)


def test_the_page_on_speed_shows_the_stored_passes_of_several_rows(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import rows

    assert shown("docs/speed.md", "rows") == rows.table(rows.stored(rows.RESULTS / "rows.jsonl"))
    for name in ("rows", "kernels", "ports", "compare"):
        sys.modules.pop(name, None)


def test_the_passes_of_the_benchmark_are_those_of_the_kernel(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import rows

    from localllm.backends.cpu.isa import isa_named

    isa = isa_named("avx512-vnni")
    assert [rows.passes(isa, "Q8_0", count) for count in (1, 7, 8, 9, 16)] == [[1], [7], [8], [5, 4], [8, 8]]
    assert [rows.passes(isa, "Q4_K", count) for count in (6, 7, 8, 16)] == [[6], [4, 3], [4, 4], [6, 5, 5]]
    for name in ("rows", "kernels", "ports", "compare"):
        sys.modules.pop(name, None)


def test_the_ceiling_of_speculation_is_that_of_the_best_number_of_drafts(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Worked out by hand: one row costs 1, two 1.2, three 2.5, and a draft 0.1; at 60 % one draft is best."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import forced

    speedup, best = forced.ceiling(0.6, {1: 1.0, 2: 1.2, 3: 2.5}, 0.1)
    assert (speedup, best) == (pytest.approx(1.6 / 1.3), 1)
    assert forced.ceiling(0.0, {1: 1.0, 2: 1.2, 3: 2.5}, 0.1) == (1.0, 0)
    row = forced.Row("m", "draft", 0.6, 1, 96, speedups=[1.0, 1.1, 0.9, 1.0, 1.0], ceiling=1.25)
    assert row.reached == pytest.approx(0.8)
    assert row.lowest == pytest.approx(1 - 2.776 * 0.0707107 / 5**0.5)
    sys.modules.pop("forced", None)


@pytest.mark.parametrize(("program", "name"), [("batch", "batch"), ("serve", "load")])
def test_the_page_on_the_server_shows_the_stored_rows(monkeypatch, program: str, name: str) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = import_module(program)
    assert shown("docs/serve.md", name) == module.table(module.stored())
    sys.modules.pop(program, None)


def test_the_page_on_the_server_shows_the_stored_attacks(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import neighbours_attacked as attacked

    rows = attacked.stored()
    assert shown("docs/serve.md", "attacked") == attacked.table(rows)
    assert {row.attack for row in rows} >= attacked.ATTACKS.keys()
    now = [row for row in rows if row.label == "now"]
    assert all(row.beyond <= attacked.MOST and not row.failures for row in now)
    for attack in attacked.ATTACKS.values():  # the request can be built; it is not sent
        if isinstance(attack, attacked.Sent):
            path, body = next(attack.requests())
            assert path.startswith("/")
            assert body
    for name in ("neighbours_attacked", "neighbours_attacks", "compare"):
        sys.modules.pop(name, None)


def test_the_page_on_caches_shows_the_stored_distances(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import cache_quality

    stored = (ROOT / "benchmarks" / "results" / "cache_quality.jsonl").read_text().splitlines()
    rows = [json.loads(text) for text in stored]
    assert shown("docs/cache.md", "distance") == cache_quality.summary(rows)
    assert all(row["tokens"] >= 2000 for row in rows if row.get("type") == "q8_0")
    for name in ("cache_quality", "bundled", "llama_logits", "compare"):
        sys.modules.pop(name, None)


def test_the_pages_on_quality_show_the_stored_rows_of_the_model_that_ships(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bundled
    import quality_table

    found, caches = quality_table.stored(), quality_table.stored_caches()
    for page, sections in quality_table.pages(found, caches).items():
        for name, text in sections.items():
            assert shown(page, name) == text
    ships = bundled.identity()
    assert ships["bytes"] == bundled.DEMO.stat().st_size
    assert ships["type"] == "Q4_K_M"
    assert found.keys() >= set(quality_table.PLAIN)
    chats = [found[kind]["files"]["ours"]["texts"][quality_table.CHATS] for kind in quality_table.PLAIN]
    assert all(text["kld_error"] < 0.02 * text["kld"] for text in chats)  # as docs/quantizing.md says
    shown_rows = [*found.values(), *(row for row in caches if row["text"] == quality_table.CHATS)]
    assert {json.dumps(row.get("identity") or row["model"]) for row in shown_rows} == {json.dumps(ships)}
    for name in ("quality_table", "quality_base", "bundled", "cache_quality", "llama_logits", "compare"):
        sys.modules.pop(name, None)


def test_the_base_of_the_quality_table_computes_what_ships_and_favours_no_type(monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The logits are those of the file that ships, and errors by type are those of weights on no grid."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bundled
    import quality_base

    import localllm
    from localllm.gguf import NewTensor, open_gguf, write_gguf
    from localllm.quant import dequantize, quantize

    quality_base.write_base(bundled.DEMO, tmp_path / "base.gguf")
    with open_gguf(bundled.DEMO) as file, open_gguf(tmp_path / "base.gguf") as base:
        plain = {name: dequantize(t.read(0, t.rows), t.format) for name, t in file.tensors.items()}
        tensors = [NewTensor(name, "F32", file.tensors[name].shape, w.tobytes()) for name, w in plain.items()]
        write_gguf(tmp_path / "plain.gguf", file.stored, tensors)
        for name, tensor in base.tensors.items():
            if len(tensor.shape) == 1:
                continue
            w = dequantize(tensor.read(0, tensor.rows), "F32")
            errors = [
                float(np.linalg.norm(dequantize(quantize(w, kind), kind) - w) / np.linalg.norm(w))
                for kind in ("Q6_K", "Q5_K", "Q4_K", "Q3_K")
            ]
            assert 0.016 < errors[0] < errors[1] / 1.9 < errors[2] / 3.6 < errors[3] / 7.2, (name, errors)
    logits = []
    for name in ("plain.gguf", "base.gguf"):
        with localllm.load(tmp_path / name, ctx_size=128, cache_type_k="f32", cache_type_v="f32") as model:
            logits.append(model.logits(np.random.default_rng(0).integers(0, 4096, 100).tolist()))
    assert logits[0].std() > 2
    assert np.abs(logits[0] - logits[1]).max() < 1e-4
    for name in ("quality_base", "bundled", "compare"):
        sys.modules.pop(name, None)


def test_the_page_on_machines_shows_the_stored_stages(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import stages

    rows = [json.loads(line) for line in stages.STORED.read_text(encoding="utf-8").splitlines()]
    assert shown("docs/machines.md", "stages") == stages.table(rows)
    assert {"two stages", "llama.cpp, RPC"} <= {name for row in rows for name in row["rows"]}
    for name in ("stages", "relay", "compare"):
        sys.modules.pop(name, None)


def test_the_page_on_pictures_shows_the_stored_encoders(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import encoders

    rows = [json.loads(line) for line in (encoders.RESULTS / "encoders.jsonl").read_text().splitlines()]
    assert shown("docs/media.md", "encoders") == encoders.table(rows)
    assert shown("docs/media.md", "turns") == encoders.turn_table(rows)
    for name in ("encoders", "compare"):
        sys.modules.pop(name, None)


def test_pictures_in_flight_differ() -> None:
    from benchmarks import picture_flight

    png = [base64.b64decode(picture_flight._png(16, seed)) for seed in (1, 1, 2)]
    assert png[0] == png[1] != png[2]
    assert png[0].startswith(b"\x89PNG")


def test_the_page_on_pictures_shows_the_stored_times_between_tokens() -> None:
    from benchmarks import picture_flight

    rows = [json.loads(line) for line in picture_flight.RESULTS.read_text().splitlines()]
    assert shown("docs/media.md", "flight") == picture_flight.table(rows)


def test_every_projector_that_is_prepared_has_an_encoder() -> None:
    from localllm.media.pictures import PICTURES
    from localllm.media.sounds import SOUNDS
    from localllm.models.encoders import supported

    assert set(PICTURES) <= set(supported("vision"))
    assert set(SOUNDS) <= set(supported("audio"))
    assert "All types in the table have an encoder." in (ROOT / "docs/media.md").read_text()


def test_the_page_on_speed_shows_the_stored_neighbours(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import neighbours

    shown_table = neighbours.table(neighbours.stored(neighbours.RESULTS / "neighbours.jsonl"))
    assert shown("docs/speed.md", "neighbours") == shown_table
    cells = [
        neighbours.Cell(
            "m", 2, busy, adaptive=[30.0, 90.0, 40.0], one=[10.0, 12.0, 14.0], all=[80.0, 1.0, 50.0],
            peer_one=[5.0, 1.0, 6.0], load=[1.2, 3.4, 2.0], device="chip, 2 threads",
        )
        for busy in (0, 2)
    ]  # fmt: skip
    assert neighbours.table(cells).splitlines()[2:] == [
        "| model | program | alone | with 2 busy |",
        "|---|---|---:|---:|",
        "| m | localllm | 40.0 | 40.0 |",
        "| m | localllm, 1 thread | 12.0 | 12.0 |",
        "| m | localllm, all threads | 50.0 | 50.0 |",
        "| m | llama.cpp -t 1 | 5.0 | 5.0 |",
        "| m | llama.cpp, all threads | - | - |",
        "| m | share of the better number | 0.80 | 0.80 |",
        "| m | load average before the rounds | 1 to 3 | 1 to 3 |",
    ]
    for name in ("neighbours", "compare"):
        sys.modules.pop(name, None)


def test_neighbours_are_busy_while_it_is_measured_and_gone_afterwards(tmp_path) -> None:  # type: ignore[no-untyped-def]
    peer, out = tmp_path / "peer", tmp_path / "rows.jsonl"
    peer.write_text(FAKE_PEER.format(python=sys.executable, log=str(tmp_path / "log")))
    peer.chmod(0o755)
    command = [sys.executable, "benchmarks/neighbours.py", "demo", "--llama-bench", str(peer)]
    result = subprocess.run(
        [*command, "--busy", "0,1", "--rounds", "2", "--seconds", "0.1", "--out", str(out)],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    cells = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(cell["model"], cell["busy"]) for cell in cells] == [("demo", 0), ("demo", 1)]
    for cell in cells:
        for rates in (cell["adaptive"], cell["one"], cell["all"]):
            assert len(rates) == 2
            assert min(rates) > 0
        assert cell["peer_one"] == cell["peer_all"] == [7.0, 7.0]
    assert "| demo | localllm | " in result.stdout


def test_a_ratio_is_the_median_of_rounds_against_the_better_peer(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import compare

    row = compare.Row(
        "m", "pp512", 2, ours=[30.0, 40.0, 90.0], peer_repacked=[10.0, 10.0, 30.0], peer_plain=[20.0, 5.0, 9.0]
    )
    assert row.ratio == 3.0  # 30/20, 40/10, 90/30
    sys.modules.pop("compare", None)


def test_formats_are_compared_with_the_best_way_of_three(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import compare

    row = compare.Row(
        "1b-IQ2_S.gguf", "tg32", 1, weights=2 * 10**9, ours=[30.0, 40.0, 90.0], peer_repacked=[10.0, 20.0, 10.0],
        ik=[15.0, 10.0, 30.0], ik_repacked=[5.0, 5.0, 18.0],
    )  # fmt: skip
    assert compare.formats([row]).splitlines()[2] == "| 1b-IQ2_S | 80.0 | 20.0 | 30.0 | 10.0 | 2.00 |"
    assert "IQ2_S" not in compare.table([row])
    sys.modules.pop("compare", None)


def test_a_long_chat_evaluates_what_is_new_and_a_token_at_most(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import long_chat

    import localllm

    with localllm.load("demo", ctx_size=512) as model:
        model.context = 200
        rows = long_chat.chat(model, turns=20, answer=16)
    assert any(row["shifted"] for row in rows)
    for row in rows:
        assert row["shifted"] or 0 <= row["evaluated"] - row["new"] <= 1
        assert 0 < row["new"] < 40 or row["shifted"]
    for name in ("long_chat", "compare"):
        sys.modules.pop(name, None)


def test_a_guard_compares_in_turn_and_fails_for_a_slower_row_alone(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import against

    ours, other = against.Installation(("ours",), ()), against.Installation(("other",), ())
    calls: list[str] = []

    def measure(one: object) -> dict[str, float]:
        calls.append(one.program[0])  # type: ignore[attr-defined]
        return {"as before": 10.0 + len(calls), "slower": 8.0 if one is ours else 10.0, one.program[0]: 1.0}  # type: ignore[attr-defined]

    rows = against.compared(ours, other, [("work", measure)], 4, float("inf"))
    assert calls == ["other", "ours", *["other", "ours", "ours", "other"] * 2]  # the first two are the warm-up
    assert [(row["unit"], row["rounds"]) for row in rows] == [("as before", 4), ("slower", 4)]
    assert (rows[1]["ours"], rows[1]["other"], rows[1]["ratio"], rows[1]["highest"]) == (8.0, 10.0, 0.8, 0.8)
    assert against.verdict(rows) == (1, [rows[1]])
    assert against.verdict(rows[:1]) == (0, [])
    assert against.verdict(against.compared(ours, other, [("work", measure)], 4, 0.0))[0] == 2  # one round fitted
    for name in ("against", "compare"):
        sys.modules.pop(name, None)


FAKE_PEER = """#!{python}
import json, sys
prompt = sys.argv[sys.argv.index("-p") + 1] != "0"
rate = 50.0 if "--repack" in sys.argv else 100.0 if prompt else 7.0
open({log!r}, "a").write(" ".join(sys.argv[1:]) + "\\n")
print(json.dumps([{{"avg_ts": rate, "build_commit": "abc", "build_number": 5}}]))
"""


def test_a_comparison_calls_both_in_turn_and_keeps_every_sample(tmp_path) -> None:  # type: ignore[no-untyped-def]
    peer, log, out = tmp_path / "peer", tmp_path / "log", tmp_path / "rows.jsonl"
    peer.write_text(FAKE_PEER.format(python=sys.executable, log=str(log)))
    peer.chmod(0o755)
    model = ROOT / "models" / "demo" / "demo.gguf"
    command = [sys.executable, "benchmarks/compare.py", str(model), "--llama-bench", str(peer), "--tests", "pp8,tg4"]
    subprocess.run(
        [*command, "-t", "1", "--rounds", "2", "--out", str(out)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=600,
    )
    prompt, answer = (json.loads(line) for line in out.read_text().splitlines())
    assert (prompt["peer_repacked"], prompt["peer_plain"]) == ([100.0, 100.0], [50.0, 50.0])
    assert (answer["peer_repacked"], answer["peer_plain"]) == ([7.0, 7.0], [])
    assert prompt["peer"] == "llama.cpp abc (build 5)"
    assert prompt["ratio"] == median(rate / 100.0 for rate in prompt["ours"])
    assert answer["roof_share"] > 0
    assert len(answer["ours"]) == len(answer["roof_gb_per_s"]) == 2
    called = [line.split("-p ")[0].split("-t 1")[1].strip() for line in log.read_text().splitlines()]
    assert called == ["", "--repack 0", ""] * 2


def test_llama_cpp_python_is_timed_as_llama_bench_times(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import llama_cpp_bench

    calls: list[object] = []

    class Peer:
        vocabulary = 10

        def clear(self) -> None:
            calls.append("clear")

        def decode(self, tokens: list[int]) -> None:
            calls.append(len(tokens))
            assert all(0 <= token < 10 for token in tokens)

    found = llama_cpp_bench.samples(Peer(), prompt=0, answer=3, depth=5, repetitions=2)  # type: ignore[arg-type]
    assert len(found) == 2
    assert all(found)
    assert [call for call in calls if call] == [1, *["clear", 5, 1, 1, 1] * 2]  # the first evaluation is the warm-up
    sys.modules.pop("llama_cpp_bench", None)


def test_without_llama_cpp_python_a_comparison_says_what_to_do(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "llama_cpp.py").write_text("raise ImportError\n")
    command = [sys.executable, "benchmarks/llama_cpp_bench.py", "-m", "m.gguf", "-p", "8"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 1
    assert result.stderr == "llama-cpp-python is not installed: pip install it, or give --llama-bench PATH\n"


def test_the_page_on_architectures_shows_the_stored_depths(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import deep

    assert shown("docs/architectures.md", "deep") == deep.table(deep.stored())
    row = deep.Row("m", "tg32@64", 2, ours=[30.0, 90.0, 40.0], flash=[10.0, 20.0, 20.0], plain=[15.0])
    assert row.best == [15.0, 20.0, 20.0]  # in each round, the best of the llama.cpp variants that were measured
    assert row.ratio == 2.0
    cases = [
        (model, depth, whole) for model in ("deepseek32", "deepseek4") for depth in (16384, 65536) for whole in (0, 1)
    ]
    rows = [deep.row_of(model, f"tg32@{depth}", 2, bool(whole)) for model, depth, whole in cases]
    assert [row.whole for row in rows] == [False, True, False, True, True, True, False, True]
    assert [row.test for row in rows if row.alone] == ["tg32@65536"]  # only this model runs without copied KV rows
    alone = next(row for row in rows if row.alone)
    alone.ours, alone.cache_per_token = [40.0, 60.0], 1_500_000
    assert deep.table([alone]).splitlines()[-1] == "| deepseek4 | tg32@65536 | copies | 50.0 |  |  | 1.5 |  |"
    assert not deep.hopeless(row, "plain")
    assert deep.hopeless(deep.Row("m", "t", 2, flash=[21.0], plain=[10.0]), "plain")
    assert not deep.hopeless(deep.Row("m", "t", 2, flash=[21.0]), "flash")  # the other variant was skipped
    for name in ("deep", "compare"):
        sys.modules.pop(name, None)


def test_a_state_of_llama_cpp_gets_more_cells(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The first state holds two caches without values: MLA latents and indexer keys. The second has transposed
    values.
    """
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import llama_cpp_state

    def cache(cells: int, widths: list[int], columns: int = 0) -> bytes:
        found = struct.pack("<II", 1, cells) + b"".join(struct.pack("<iIi", cell, 1, 0) for cell in range(cells))
        found += struct.pack("<II", int(columns > 0), len(widths))
        for layer, width in enumerate(widths):
            rows = [bytes([10 * layer + cell % 3]) * width for cell in range(cells)]
            found += struct.pack("<iQ", 1, width) + b"".join(rows)
        for layer in range(len(widths) if columns else 0):
            found += struct.pack("<iII", 1, 2, columns)
            found += b"".join(bytes([9 * layer + cell % 3, row]) for row in range(columns) for cell in range(cells))
        return found

    mark = struct.pack("<Ii", 0xABCD, 0)
    for whole in (lambda n: mark + cache(n, [6, 8]) + cache(n, [4, 4]), lambda n: mark + cache(n, [6, 6], 5)):
        assert llama_cpp_state.repeated(whole(3), 8) == whole(8)
        with pytest.raises(ValueError, match="another form"):
            llama_cpp_state.repeated(whole(3)[:-1], 8)
    sys.modules.pop("llama_cpp_state", None)
