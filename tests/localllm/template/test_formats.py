"""The table of formats: the format detected for each template, and the control tokens that its parser must see."""

from __future__ import annotations

import pytest

from localllm.template.formats import ROWS, find_format
from tests.conftest import SHARED_DATA, reference
from tests.localllm.output.support import named

FAMILIES = {  # according to the models' publishers
    "Apertus-8B-Instruct": "apertus",
    "CohereForAI-c4ai-command-r-plus-tool_use": "command-r-plus",
    "GLM-4.7-Flash": "glm",
    "Kimi-K2-Thinking": "kimi-k2",
    "Kimi-K3": "kimi-k3",
    "LFM2-8B-A1B": "lfm2",
    "MiniMax-M3": "minimax-m3",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral-call-id",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3-coder",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen3.5-4B": "qwen3-coder",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek-r1",
    "deepseek-ai-DeepSeek-V3.2": "deepseek-v3.2",
    "google-gemma-2-2b-it": "hermes",
    "google-gemma-4-31B-it": "gemma-4",
    "ibm-granite-granite-3.3-2B-Instruct": "granite-3",
    "meetkai-functionary-medium-v3.2": "functionary-v3.2",
    "meta-llama-Llama-3.3-70B-Instruct": "llama-3",
    "openai-gpt-oss-120b": "harmony",
    "tencent-Hy3": "hunyuan-3",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_found_by_its_template(name: str) -> None:
    source = reference("templates", f"{name}.jinja").read_text(encoding="utf-8")
    assert find_format(source).name == FAMILIES[name]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_can_be_found(row: object) -> None:
    assert named(row.name).name == row.name  # type: ignore[attr-defined]


def test_every_row_but_a_few_belongs_to_a_reference_template() -> None:
    found = {find_format(path.read_text(encoding="utf-8")).name for path in (SHARED_DATA / "templates").glob("*.jinja")}
    if not found:
        pytest.skip("reference data not present")
    assert {row.name for row in ROWS} - found == {"phi-4-mini"}


@pytest.mark.parametrize("source", ["", "{{ messages }}", "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_other_templates_have_the_format_of_hermes_without_knowing_it(source: str) -> None:
    found = find_format(source)
    assert (found.name, found.native, found.thinks) == ("hermes", False, False)


def test_a_template_may_know_tools_but_not_describe_them() -> None:
    assert not find_format("{{ '<｜tool▁call▁begin｜>' }}").native
    assert find_format("{% for tool in tools %}{{ tool }}{% endfor %}<tool_call>").native


def test_tokens_of_markers_are_visible_and_others_are_not() -> None:
    special = {"<|im_end|>": 1, "<tool_call>": 2, "<think>": 3, "<|open|>": 4, "<|sep|>": 5, "｜DSML｜": 6, "": 7}
    assert named("hermes").visible(special) == {2, 3}
    assert named("kimi-k3").visible(special) == {4, 5}
    assert named("deepseek-v4").visible(special) == {3, 6}
    harmony = {"<|channel|>": 1, "<|message|>": 2, "<|start|>": 3, "<|end|>": 4, "<|constrain|>": 5, "<|endoftext|>": 6}
    assert named("harmony", "<|channel|>").visible(harmony) == {1, 2, 3, 4, 5}
