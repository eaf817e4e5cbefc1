"""The forecast of decoding speed: what a token reads, the speeds that are measured, and `localllm show --speed`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import localllm
from localllm.backends.base import F16_CACHE
from localllm.cli.forecast import CALLS, READ, DecodeSpeed, Fastest, TokenCost, cost_of, cost_of_known, planned
from localllm.cli.main import main
from localllm.gguf import open_gguf
from localllm.hub.short_names import KnownModel
from localllm.loading.resolve import resolve
from tests.localllm.support import Terminal, write_model
from tests.models.kit import KIT


def cost_in(path: Path, tokens: int = 0, context: int = 512) -> TokenCost:
    with open_gguf(path) as file:
        plan = planned(file, context)
        return cost_of(plan.plan, plan.limits, F16_CACHE, tokens)


def test_a_token_costs_what_the_loaded_model_reads() -> None:
    cost = cost_in(resolve("demo"))
    with localllm.load("demo", ctx_size=512) as model:
        memory = model.executable.memory
        assert sum(cost.weights.values()) == pytest.approx(memory.weights_per_token, rel=0.02)
        assert set(cost.weights) == {"Q4_K", "Q6_K"}
        assert cost.calls == len(model.executable.operations)  # type: ignore[attr-defined]
        assert cost.cache == 0
        assert cost_in(resolve("demo"), tokens=100).cache == 100 * memory.cache_per_token


def test_of_experts_those_of_one_token_count(tmp_path: Path) -> None:
    path = KIT["deepseek32-moe"].write(tmp_path / "experts.gguf")
    with open_gguf(path) as file:
        held = sum(tensor.nbytes for name, tensor in file.tensors.items() if name.endswith("_exps.weight"))
        costs = []
        for used in (1, 2):
            changed: Any = SimpleNamespace(
                metadata={**file.metadata, "deepseek32.expert_used_count": used}, tensors=file.tensors
            )
            plan = planned(changed, 512)
            costs.append(cost_of(plan.plan, plan.limits, F16_CACHE, 0).bytes)
    assert costs[1] - costs[0] == held // 2 > 0


def test_the_time_of_a_token_is_that_of_its_products_its_cache_and_its_calls() -> None:
    with DecodeSpeed(threads=1) as speed:
        speed._products = {("Q4_K", READ, 1): 10e9, ("Q6_K", READ, 1): 20e9}
        speed._reads, speed._call, speed._step = 40e9, 2e-6, 1e-5
        cost = TokenCost({"Q4_K": 10**9, "Q6_K": 10**9}, cache=4 * 10**8, calls=1000)
        assert 1 / speed.tokens_per_second(cost) == pytest.approx(0.1 + 0.05 + 0.01 + 0.002 + 0.00001)


def test_a_slow_moment_does_not_lower_the_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest, forecasts = Fastest(), []
    timed = DecodeSpeed._timed
    for slower in (3, 1, 5):  # other programs slow the first and the last measurement down

        def disturbed(*given: Any, slower: float = slower, **more: Any) -> tuple[float, int]:
            seconds, calls = timed(*given, **more)
            return slower * seconds, calls

        monkeypatch.setattr(DecodeSpeed, "_timed", disturbed)
        with DecodeSpeed(1, fastest) as speed:
            forecasts.append(speed.tokens_per_second(TokenCost({"Q4_0": 1 << 21}, calls=10)))
    assert forecasts[1] > 1.3 * forecasts[0]
    assert forecasts[2] >= forecasts[1]


def test_a_slow_moment_does_not_raise_the_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a step is subtracted from the time of products, so a slow step makes them look fast."""

    def forecast(fastest: Fastest, step: float) -> float:
        times = iter([(step, 1), (step + 63e-6, 64), (1e-3, 10)])  # a step, a chain, and the products
        monkeypatch.setattr(DecodeSpeed, "_timed", lambda *_: next(times))
        with DecodeSpeed(1, fastest) as speed:
            return speed.tokens_per_second(TokenCost({"Q4_0": 1 << 30}, calls=100))

    disturbed = Fastest()
    assert forecast(disturbed, 9.9e-4) > 5 * forecast(Fastest(), 1e-5)
    assert forecast(disturbed, 1e-5) == pytest.approx(forecast(Fastest(), 1e-5))
    assert forecast(disturbed, 9.9e-4) == pytest.approx(forecast(Fastest(), 1e-5))


def test_a_model_of_the_table_costs_its_share_of_the_file() -> None:
    mixture = KnownModel("a:20b", "ann/A-GGUF", "MXFP4", 12 * 10**9, "MIT", 0.25)
    assert cost_of_known(mixture) == TokenCost({"MXFP4": 3 * 10**9}, 0, CALLS)
    assert set(cost_of_known(KnownModel("b:1b", "ann/B-GGUF", "Q4_K_M", 10**9, "MIT")).weights) == {"Q4_K"}


def test_measured_speeds_order_models_by_what_they_read(tmp_path: Path) -> None:
    """Other programs disturb measurements, so only large differences are compared."""
    with DecodeSpeed() as speed:
        tiny = speed.tokens_per_second(cost_in(write_model(tmp_path / "tiny.gguf")))
        demo = speed.tokens_per_second(cost_in(resolve("demo")))
        large = speed.tokens_per_second(TokenCost({"Q4_K": 10**10}))
    assert tiny > demo > 50 * large > 0
    assert large < 100  # 1 TB/s


@pytest.mark.parametrize("format_", ["F32", "F16", "BF16", "Q4_0", "Q8_0", "Q2_K", "IQ4_XS", "MXFP4"])
def test_every_kind_of_format_is_measured(format_: str) -> None:
    with DecodeSpeed(threads=1) as speed:
        assert 1 < speed.tokens_per_second(TokenCost({format_: 1 << 21}, calls=10)) < 1e6


def test_show_forecasts_when_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["show", "demo", "--json"]) == 0
    assert "speed" not in json.loads(capsys.readouterr().out)
    assert main(["show", "demo", "--json", "--speed"]) == 0
    speed = json.loads(capsys.readouterr().out)["speed"]
    assert speed["context"] == 1024
    assert speed["tokens_per_second"] > speed["tokens_per_second_at_full_context"] > 0
    assert main(["show", "demo"]) == 0
    assert "tokens/s" not in capsys.readouterr().out
    terminal = Terminal("show", "demo", "--speed", columns=100)
    terminal.wait_for(r"about \d+ tokens/s on this computer, \d+ with a full context \(forecast, measured now\)")
    assert terminal.end() == 0


@pytest.mark.parametrize("name", ["dream-dense", "t5-gated"])
def test_show_forecasts_nothing_for_a_model_that_does_not_write_token_by_token(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = KIT[name].write(tmp_path / "model.gguf")
    assert main(["show", str(path), "--json", "--speed"]) == 0
    assert json.loads(capsys.readouterr().out)["speed"] == {"problem": "not a model that continues a text"}


def test_a_prompt_reads_the_cache_once_and_needs_one_row_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = TokenCost({"Q4_0": 700, "Q6_K": 300}, 50, 0, {"Q4_0": 700, "Q6_K": 300}, {"Q6_K": 200})
    rates = {"Q4_0": 100.0, "Q6_K": 50.0}  # bytes per second for one row; twice the time for two
    monkeypatch.setattr(DecodeSpeed, "_measure_calls", lambda self: None)
    monkeypatch.setattr(DecodeSpeed, "_read", lambda self: 10.0)
    monkeypatch.setattr(DecodeSpeed, "_product", lambda self, name, size, rows=1: rates[name] / rows)
    with DecodeSpeed(1) as speed:
        assert speed.seconds(cost, 4) == pytest.approx(4 * (7 + 6) + 4 * 5)
        assert speed.prompt_seconds(cost, 4) == pytest.approx(4 * (7 + 2) + 4 + 5)
        middle = TokenCost(cost.weights, 50, 0, cost.held)  # a stage without the output
        assert speed.prompt_seconds(middle, 4) == pytest.approx(4 * (7 + 6) + 5)
