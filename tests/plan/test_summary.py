"""Summary counts of models, compared with counts by hand."""

from __future__ import annotations

from localllm.plan import summarize
from tests.models import tiny
from tests.models.support import plan_of
from tests.models.tiny import FFN, VARIANTS, VOCABULARY, WIDTH
from tests.models.tiny_families import FAMILIES


def test_the_summary_counts_a_model_worked_out_by_hand() -> None:
    metadata, tensors = tiny.make("llama", seed=1, layers=1, tied=True, per_layer=("attn_q.bias",), format="F16")
    summary = summarize(plan_of(metadata, tensors))
    table = 29 * 32
    matrices = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 40 * 32
    vectors = 3 * 32 + 32
    assert summary.parameters == table + matrices + vectors
    assert summary.weight_bytes == 2 * (table + matrices) + 4 * vectors
    assert summary.bytes_per_token == summary.weight_bytes + 2 * 32  # the table as the output matrix, and one row of it
    assert summary.flops_per_token == 2 * (table + matrices)
    assert summary.attention_flops_per_position == 4 * 4 * 8
    assert summary.cache_values_per_token == 2 * 2 * 8


def test_a_token_reads_only_its_experts() -> None:
    metadata, tensors = FAMILIES["llama experts"]()  # 2 of 8 experts, 2 layers
    summary = summarize(plan_of(metadata, tensors))
    assert summary.parameters == sum(tensor.values().size for tensor in tensors.values())
    idle = 2 * (3 * FFN * WIDTH + 3) * 6
    assert summary.bytes_per_token == 4 * (summary.parameters - idle - (VOCABULARY - 1) * WIDTH)
    attention = 2 * (2 * 32 * WIDTH + 2 * 16 * WIDTH)
    mixture = 2 * (8 * WIDTH + 2 * 3 * FFN * WIDTH)
    assert summary.flops_per_token == 2 * (attention + mixture + VOCABULARY * WIDTH)


def test_windows_do_not_grow_with_the_cache() -> None:
    metadata, tensors = FAMILIES["gemma2"]()  # the middle one of the three layers has full attention
    summary = summarize(plan_of(metadata, tensors))
    assert summary.attention_flops_per_position == 4 * 4 * 8


def test_parts_of_a_matrix_are_counted_once() -> None:
    metadata, tensors = FAMILIES["phi3"]()
    summary = summarize(plan_of(metadata, tensors))
    assert summary.parameters == sum(tensor.values().size for tensor in tensors.values())


def test_an_untied_embedding_costs_a_row_per_token() -> None:
    metadata, tensors = VARIANTS["llama plain"]()
    summary = summarize(plan_of(metadata, tensors))
    assert summary.bytes_per_token == summary.weight_bytes - (VOCABULARY - 1) * WIDTH * 4
