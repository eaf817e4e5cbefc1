"""Layers on a GPU and on the CPU: placement by free memory, error messages, and the same generated text.

PoCL replaces the GPU. Its free memory is simulated if a test depends on it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import localllm
from localllm.backends import open_backend
from localllm.backends.base import BackendError, CacheTypes, Memory
from localllm.backends.gpu.executable import GpuExecutable
from localllm.backends.hybrid.cut import Placement
from localllm.backends.hybrid.offload import RESERVE, DoesNotFit, Offload, Planner
from localllm.backends.opencl.backend import OpenClBackend
from localllm.cli.main import main
from localllm.loading.loader import limits_of
from localllm.options import LoadOptions, SpeculationOptions
from localllm.plan import Plan
from localllm.saved.prompt_cache import read_prompt_cache, restore, save
from tests.backends.gpu.conftest import pocl
from tests.backends.support import Shape, plan
from tests.conftest import reference
from tests.models.support import plan_of
from tests.models.tiny_families import FAMILIES
from tests.pocl import needed

MODEL = Shape(width=256, ffn=512, heads=8, kv_heads=4, head_dim=32, layers=4)


class Small(OpenClBackend):
    """A GPU with an adjustable amount of free memory."""

    free = 1 << 40

    def free_memory(self) -> int:
        return self.free


@pytest.fixture(autouse=True)
def nothing_piped_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())


@pytest.fixture(scope="module")
def card() -> Iterator[Small]:
    backend = Small("", cache=None)
    yield backend
    backend.close()


def planner(card: Small, model: Plan, context: int = 4096) -> Planner:
    return Planner(card, "card", model, lambda c: limits_of(c, model), context, CacheTypes())


def room_for(card: Small, room: int) -> None:
    """Set the free memory so that a model can use this many bytes."""
    card.free = room + RESERVE
    if card.free // 20 < RESERVE:
        card.free = -(-room * 20 // 19)


def total(memory: Memory | None) -> int:
    return memory.weights + memory.cache + memory.scratch if memory is not None else 0


# -- planning --------------------------------------------------------------------------------------------------------


def test_auto_takes_the_layers_that_fit_and_no_more(card: Small) -> None:
    plans = planner(card, plan("Q8_0", MODEL))
    needed = [total(plans.needs(Placement(layers))) for layers in range(6)]
    assert needed == sorted(set(needed))
    for layers in range(1, 6):
        room_for(card, needed[layers])
        assert needed[layers] <= plans.room <= needed[layers] + 1
        assert plans.place(Offload()) == Placement(layers)
        room_for(card, needed[layers] - 64)
        assert plans.place(Offload()) == Placement(layers - 1)


def test_layers_are_weighed_with_their_cache(card: Small) -> None:
    """The memory of a layer grows with the context. Only the output layer has no KV cache."""
    model = plan("Q8_0", MODEL)
    short, long = (planner(card, model, context) for context in (1024, 4096))
    for layers, blocks in ((1, 0), (3, 2), (5, 4)):
        caches = []
        for plans in (short, long):
            memory = plans.needs(Placement(layers))
            assert memory is not None
            caches.append(memory.cache)
        a_layer = 4 * 32 * 2 * 2  # KV heads, head dimension, keys and values, bytes
        assert caches[1] - caches[0] == blocks * a_layer * 3072


def test_what_is_asked_for_and_does_not_fit_is_refused_with_what_would(card: Small) -> None:
    """Every placement that a message proposes fits, and the next larger placement does not."""
    plans = planner(card, plan("Q8_0", MODEL))
    room_for(card, total(plans.needs(Placement(4))))
    for asked in ("all", 5, 99):
        with pytest.raises(DoesNotFit) as found:
            plans.place(Offload(asked))
    text = str(found.value)
    assert text.startswith("card: 5 of 5 layers need ")
    assert "gpu_layers=4" in text
    assert "n_cpu_moe" not in text
    (context,) = (int(n) for n in re.findall(r"ctx_size=(\d+)", text))
    assert plans.fits(Placement(5), context)
    assert not plans.fits(Placement(5), context + 256)
    assert plans.place(Offload(4)) == Placement(4)
    assert plans.place(Offload(0)) == Placement(0)
    assert len(text.splitlines()) == 1


def test_experts_on_the_cpu_are_proposed_where_they_help(card: Small) -> None:
    plans = planner(card, plan_of(*FAMILIES["qwen2moe"]()), 256)
    everything, fewer = (total(plans.needs(Placement(3, experts))) for experts in (0, 1))
    assert fewer < everything
    room_for(card, fewer)
    with pytest.raises(DoesNotFit, match="n_cpu_moe=1"):
        plans.place(Offload("all"))
    assert plans.place(Offload("all", 1)) == Placement(3, 1)
    assert plans.place(Offload("auto", 1)) == Placement(3, 1)


def test_where_nothing_fits_that_is_said(card: Small) -> None:
    plans = planner(card, plan("Q8_0", MODEL), 64)
    card.free = 1000
    assert plans.place(Offload()) == Placement(0)
    with pytest.raises(DoesNotFit, match='no layer fits: use backend="cpu"'):
        plans.place(Offload(1))


# -- messages --------------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["run", "demo", "Hi there", "-n", "6", "--temp", "0", *words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ("auto", r"opencl: .*: 5 of 5 layers, weights 6\.. MiB, cache .*"),
        ("2", r"opencl: .*: 2 of 5 layers, weights .*; the rest on the CPU: weights .*"),
        ("0", r"opencl: .*: -ngl 0; everything runs on cpu: .*"),
    ],
)
def test_one_line_says_what_runs_where(capsys: pytest.CaptureFixture[str], layers: str, said: str) -> None:
    truth = run(capsys, "--backend", "cpu")
    assert truth[2] == ""
    if layers != "0":
        needed()
    code, out, err = run(capsys, "--backend", "opencl", "-ngl", layers)
    assert (code, out) == (0, truth[1])
    assert re.fullmatch(said + "\n", err)


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.backends._CARDS", ())


@pytest.mark.usefixtures("no_card")
def test_a_machine_without_a_card_says_so_where_one_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys)
    assert (code, err) == (0, "")
    code, _, err = run(capsys, "-ngl", "3")
    assert code == 0
    assert re.fullmatch(r"-ngl 3: no graphics card is used \(cpu: .*\); localllm devices lists the devices\n", err)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--backend", "cpu", "-ngl", "3"), "-ngl 3: the cpu backend has no GPU"),
        (("--backend", "cpu", "-ncmoe", "3"), "-ncmoe 3: the cpu backend has no GPU"),
        (("--backend", "cpu", "-dev", "0"), "--device 0: the cpu backend has no devices"),
        (("--backend", "opencl", "-dev", "77"), "--device 77: opencl has no such device; opencl0 is "),
        (("--backend", "opencl", "-dev", "voodoo"), "--device voodoo: opencl has no such device"),
        (("-dev", "voodoo"), "--device voodoo: opencl has no such device"),
    ],
)
def test_what_cannot_be_is_an_error_in_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (1, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_plan_that_does_not_fit_fails_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenClBackend, "free_memory", lambda self: 24 << 20)
    monkeypatch.setattr(GpuExecutable, "__init__", lambda *_: pytest.fail("something was bound"))
    code, out, err = run(capsys, "--backend", "opencl", "-ngl", "all")
    assert (code, out) == (1, "")
    assert "5 of 5 layers need " in err
    assert "these settings fit: -ngl " in err


@pytest.mark.parametrize("asked", ["pthread", "0", "opencl0", "opencl:0", ""])
def test_a_device_is_named_by_number_or_name(asked: str) -> None:
    there = pocl().device.facts.name
    asked = asked if asked != "pthread" else there[:7].upper()
    backend = open_backend("opencl", device=asked)
    assert backend.describe().startswith(f"opencl: {there}")
    backend.close()


# -- out of memory ---------------------------------------------------------------------------------------------------


def test_memory_that_is_not_there_is_explained(card: Small) -> None:
    with pytest.raises(BackendError, match=r"out of memory at 1048576\.00 GiB for the weights; use fewer layers"):
        card.device.alloc(1 << 50, "the weights")


@pytest.mark.parametrize("call", ["enqueue_nd_range_kernel", "enqueue_copy"])
def test_memory_that_runs_out_in_a_step_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A driver that allocates lazily may report missing memory at any call."""
    import pyopencl

    def refuse(*_: object, **__: object) -> None:
        raise pyopencl.MemoryError("enqueue", pyopencl.status_code.MEM_OBJECT_ALLOCATION_FAILURE)

    with localllm.load("demo", backend="opencl", gpu_layers=2) as model, monkeypatch.context() as patch:
        patch.setattr(pyopencl, call, refuse)
        with pytest.raises(
            localllm.LocalLLMError, match=r"out of memory at (a step|an upload); use fewer layers on it"
        ):
            list(model.generate("Hi", max_tokens=2))
    monkeypatch.setattr(pyopencl, call, refuse)
    code, _, err = run(capsys, "--backend", "opencl")
    assert code == 1
    assert re.search(r"error: .*: out of memory at .*; use fewer layers on it", err)


# -- the same text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stories260K-f32", "babyllama-969K-tok361-f32"])
@pytest.mark.parametrize("layers", [2, 5])
def test_greedy_text_is_llama_cpp_s(name: str, layers: int) -> None:
    with localllm.load(reference("models", f"{name}.gguf"), backend="opencl", gpu_layers=layers) as model:
        pieces = list(model.generate("Once upon a time", max_tokens=160, temperature=0))
    text = "Once upon a time" + "".join(piece.text for piece in pieces)
    assert text.strip() == reference("models", f"{name}.greedy160.txt").read_text(encoding="utf-8").strip()


def text_of(model: localllm.Model, prompt: str = "Tell me about your day", count: int = 40) -> str:
    return "".join(piece.text for piece in model.generate(prompt, max_tokens=count, temperature=0))


def test_guessing_ahead_changes_nothing() -> None:
    """Rejected draft tokens are removed from the KV caches of both devices."""
    with localllm.load("demo", backend="opencl", gpu_layers=3) as model:
        truth = text_of(model)
    for how in (SpeculationOptions(spec="ngram"), SpeculationOptions("draft", "draft")):
        with localllm.load("demo", LoadOptions(backend="opencl", gpu_layers=3, speculation=how)) as model:
            assert text_of(model) == truth
            if model.draft is not None:
                assert "2 of 2 layers" in model.draft.placed


def test_a_session_goes_back_and_a_file_keeps_it(tmp_path: Path) -> None:
    """A session on both devices can rewind and be stored in a prompt cache file. A different split rejects the file."""
    kept = tmp_path / "kept"
    with localllm.load("demo", backend="opencl", gpu_layers=3) as model:
        ids = model.tokenize("One day a very small cat went out to look for a friend. " * 12)[:150]
        session = model.session()
        session.evaluate(ids, logits=False)
        truth = session.evaluate([ids[3]], logits=False).copy()
        session.rewind(100)
        session.evaluate(ids[100:], logits=False)
        again = session.evaluate([ids[3]], logits=False)
        assert np.abs(again - truth).max() < 1e-2 * np.abs(truth).max()
        save(kept, model, session.sequence, [])
        truth = session.evaluate([ids[5]], logits=False).copy()
    for layers, problem in ((3, ""), (2, "its cache is 2 of cpu ")):
        with localllm.load("demo", backend="opencl", gpu_layers=layers) as model:
            found = read_prompt_cache(kept, model)
            assert found.problem[:22] == problem
            session = model.session()
            restore(found, model, session.sequence)
            assert session.length == (0 if problem else 151)
            if problem:
                session.evaluate([*ids, ids[3]], logits=False)
            limit = 2e-2 if problem else 1e-2  # the GPU rounds the inputs of products to 8 bits
            assert np.abs(session.evaluate([ids[5]], logits=False) - truth).max() < limit * np.abs(truth).max()


def test_experts_of_a_reference_model_on_the_cpu() -> None:
    path = reference("archs", "llama-moe.gguf")
    truth = np.load(reference("archs", "llama-moe.npz"))
    ids = [int(token) for token in truth["tokens"]]
    for experts in (1, 2):
        with localllm.load(path, backend="opencl", gpu_layers="all", n_cpu_moe=experts) as model:
            assert f"except the experts of the first {experts}" in model.placed
            assert "the rest on the CPU" in model.placed
            difference = model.logits(ids) - truth["logits"]
        assert (difference**2).mean() < 5e-6 * (truth["logits"] ** 2).mean()
