"""T5 on the CPU and on OpenCL: encoder inputs and decoder outputs in one batch, over several cache blocks,
split at any token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from localllm.backends.base import Backend, BackendError, CacheTypes, Limits
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.hybrid.cut import Placement, sides
from localllm.backends.reference import ReferenceBackend
from localllm.models import ModelError
from localllm.plan import BLOCK, Batch, Plan
from tests.models.kit import KIT
from tests.models.support import Driver, nmse, plan_of

RANDOM = np.random.RandomState(3)
TEXTS = [RANDOM.randint(0, 128, count).tolist() for count in (100, 7, 64)]
ANSWERS = [RANDOM.randint(0, 128, 90).tolist() for _ in TEXTS]
LIMITS = Limits(rows=300, logit_rows=300, blocks=12, positions=4 * BLOCK)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(*KIT["t5-gated"].loaded())


def driver(backend: Backend, plan: Plan, cache: str = "f16") -> Driver:
    driver = Driver(backend.bind(plan, LIMITS, CacheTypes(cache, cache)), len(TEXTS))
    driver.borders = [len(text) for text in TEXTS]
    return driver


def alone(driver: Driver, number: int, cuts: tuple[int, ...] = (90,)) -> np.ndarray:
    """Return the logits of an answer that runs without other sequences. The decoder tokens are evaluated in
    steps of the given sizes. The first step also evaluates the encoder input.
    """
    text, answer, found, at = TEXTS[number], ANSWERS[number], [], 0
    for count in cuts:
        before = text if not at else []
        rows = range(len(before), len(before) + count)
        found.append(driver.step([(number, before + answer[at : at + count])], rows))
        at += count
    return np.concatenate(found)


@pytest.fixture(scope="module")
def expected(plan: Plan) -> list[np.ndarray]:
    reference = driver(ReferenceBackend(), plan, "f32")
    return [alone(reference, number) for number in range(len(TEXTS))]


@pytest.fixture(scope="module", params=["cpu", "opencl"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    from localllm.backends import open_backend

    if request.param == "opencl":
        pytest.importorskip("pyopencl")
    opened = open_backend(request.param)
    yield opened
    opened.close()


def test_answers_agree_with_the_reference(backend: Backend, plan: Plan, expected: list[np.ndarray]) -> None:
    ours = driver(backend, plan, "f32")
    for number, logits in enumerate(expected):
        assert nmse(alone(ours, number), logits).max() < 1e-9


@pytest.mark.parametrize("cache", ["f16", "q8_0"])
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_depend_on_nothing_else(plan: Plan, threads: int, cache: str) -> None:
    """The logits of an answer are bitwise identical regardless of chunk sizes, of other sequences in the
    batch, and of the number of threads.
    """
    with_two, backend = CpuBackend(2), CpuBackend(threads)
    try:
        whole = [alone(driver(with_two, plan, cache), number) for number in range(3)]
        for number, cuts in enumerate([(1, 30, 1, 1, 57), (90,), (*[1] * 20, 70)]):
            assert np.array_equal(alone(driver(backend, plan, cache), number, cuts), whole[number])
        ours, lengths = driver(backend, plan, cache), [0, 0, 0]
        found: list[list[np.ndarray]] = [[], [], []]
        for parts in ([(0, 3)], [(1, 2), (0, 1)], [(0, 1), (2, 5), (1, 1)], [(2, 1), (1, 40), (0, 9)]):
            tokens, rows, at = [], [], 0
            for number, count in parts:
                before = [] if lengths[number] else TEXTS[number]
                tokens.append((number, before + ANSWERS[number][lengths[number] : lengths[number] + count]))
                rows += range(at + len(before), at + len(before) + count)
                at, lengths[number] = at + len(before) + count, lengths[number] + count
            logits = ours.step(tokens, rows)
            for number, count in parts:
                found[number].append(logits[:count])
                logits = logits[count:]
        for number, parts_of in enumerate(found):
            mixed = np.concatenate(parts_of)
            assert np.array_equal(mixed, whole[number][: len(mixed)])
    finally:
        with_two.close()
        backend.close()


def test_what_was_in_the_blocks_before_does_not_matter(plan: Plan, expected: list[np.ndarray]) -> None:
    """Decoder self-attention must not see positions of the encoder input, even if their cache blocks contain data."""
    ours = driver(ReferenceBackend(), plan, "f32")
    alone(ours, 0)
    ours.lengths[0], ours.borders = 0, [len(TEXTS[2]), *[len(text) for text in TEXTS[1:]]]
    logits = ours.step([(0, TEXTS[2] + ANSWERS[2])], range(len(TEXTS[2]), len(TEXTS[2]) + 90))
    assert nmse(logits, expected[2]).max() < 1e-12


def test_batches_that_cut_a_text(plan: Plan) -> None:
    def batch(positions: list[int], wanted: list[int], borders: list[int] | None) -> Batch:
        own = np.array(positions, np.int32)
        table, zeros = np.zeros((1, 1), np.int32), np.zeros(len(own), np.int32)
        made = Batch(zeros, own, own, zeros, table, np.array(wanted, np.int32))
        return made if borders is None else replace(made, borders=np.array(borders, np.int32))

    bound = ReferenceBackend().bind(plan, LIMITS)
    assert bound.step(batch([0, 1, 2, 3], [3], [3])).shape == (1, 128)
    assert bound.step(batch([0, 1, 2], [], [3])).shape == (0, 128)
    for wrong, problem in (
        (batch([0, 1], [], [3]), "a text comes in one batch"),
        (batch([1, 2, 3], [2], [3]), "a text comes in one batch"),
        (batch([0, 1, 2, 3], [2, 3], [3]), "logit_rows must be of rows after the text"),
        (batch([0, 1, 2, 3], [3], [0]), "borders must be at least 1"),
        (batch([0, 1, 2, 3], [3], None), "borders must hold the length of every sequence's text"),
        (batch([0, 1, 2, 3], [3], [3, 3]), "borders must hold the length of every sequence's text"),
    ):
        with pytest.raises(BackendError, match=problem):
            bound.step(wrong)


def test_it_runs_whole_on_one_device(plan: Plan) -> None:
    layers = len(plan.starts)
    assert layers == 3 + 2 + 1
    assert set(sides(plan, Placement(layers))) == {"gpu"}
    assert set(sides(plan, Placement(layers - 1))) == {"host"}


def test_a_decoded_row_reads_the_decoder_alone(plan: Plan) -> None:
    names = {read.weight.name for read in plan.reads}
    assert not any(name.startswith("enc.") for name in names)
    assert {"dec.blk.1.cross_attn_q.weight", "dec.blk.0.ffn_up.weight", "output.weight"} <= names
    assert not any("cross_attn_k" in name for name in names)  # projected only once


def test_keys_of_the_decoder() -> None:
    metadata, tensors = KIT["t5-relu"].loaded()
    del metadata["t5.decoder_start_token_id"]
    with pytest.raises(ModelError, match=r"t5\.decoder_start_token_id: this key is missing"):
        plan_of(metadata, tensors)
    metadata["tokenizer.ggml.bos_token_id"] = 128
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.bos_token_id: expected an integer from 0 to 127"):
        plan_of(metadata, tensors)
    metadata["tokenizer.ggml.bos_token_id"] = 5
    assert len(plan_of(metadata, tensors).starts) == 6
    del metadata["t5.decoder_block_count"]
    with pytest.raises(ModelError, match=r"dec\.blk\.2\.cross_attn_k\.weight: this tensor is missing"):
        plan_of(metadata, tensors)


def test_tied_outputs_are_scaled(plan: Plan) -> None:
    """Without an output matrix in the GGUF, the embedding matrix is used, and its input is divided by the
    square root of the width.
    """
    metadata, tensors = KIT["t5-gated"].loaded()
    output = tensors.pop("output.weight")
    tied = driver(ReferenceBackend(), plan_of(metadata, tensors))
    tensors["output.weight"] = replace(output, rows=tensors["token_embd.weight"].rows)
    own = driver(ReferenceBackend(), plan_of(metadata, tensors))
    assert np.allclose(alone(tied, 1) * 128**0.5, alone(own, 1), rtol=1e-5, atol=1e-4)
