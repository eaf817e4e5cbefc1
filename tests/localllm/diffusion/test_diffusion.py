"""Diffusion models from Python and from the command line, compared with a second implementation in float64."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.base.errors import LocalLLMError
from localllm.diffusion.canvas import Diffusion
from localllm.diffusion.reading import Masking
from localllm.engine import ContextFull
from localllm.model import Model
from localllm.options import DiffusionOptions, OptionError, SamplingOptions
from tests.localllm.support import localllm as program
from tests.localllm.support import write_model
from tests.models.support import Driver, bind_reference, open_model, plan_of

MASK = 0
GREEDY = SamplingOptions(temperature=0.0, top_k=0, top_p=1.0)
PROMPT = "Fill this"


def write_diffusion(path: Path, name: str, extra: dict[str, Any] | None = None, template: str | None = None) -> Path:
    """Write a diffusion model of one layer with random weights."""
    keys = {
        "general.architecture": name,
        f"{name}.block_count": 1,
        f"{name}.context_length": 512,
        f"{name}.embedding_length": 64,
        f"{name}.feed_forward_length": 96,
        f"{name}.attention.head_count": 2,
        f"{name}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.mask_token_id": MASK,
        **({"diffusion.shift_logits": False} if name == "llada" else {}),
    }
    return write_model(path, extra=keys | (extra or {}), template=template)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("diffusion")
    return {name: write_diffusion(folder / f"{name}.gguf", name) for name in ("dream", "llada")}


def load(path: Path, **options: Any) -> Model:
    options = {"threads": 1, "ctx_size": 64, "cache_type_k": "f32", "cache_type_v": "f32"} | options
    return localllm.load(path, **options)


def answer(model: Model, options: DiffusionOptions | None = None, sampling: SamplingOptions = GREEDY) -> list[int]:
    *_, last = model.diffuse(PROMPT, options, sampling, max_tokens=40)
    assert len(last.answer) == 40
    assert MASK not in last.answer
    return list(last.answer)


def recomputed(path: Path, prompt: list[int], length: int, steps: int, shifted: bool) -> list[int]:
    """Return the answer at temperature 0, computed position by position on the reference backend in float64."""
    executable = bind_reference(plan_of(*open_model(path)))
    tokens = [*prompt, *[MASK] * length]
    for step in range(steps):
        rows = Driver(executable).step([(0, tokens)]).astype(np.float64)
        rows[:, MASK] = -np.inf
        weights = np.exp(rows - rows.max(axis=1, keepdims=True))
        p = weights / weights.sum(axis=1, keepdims=True)
        masked = [place for place, token in enumerate(tokens) if token == MASK]
        t, s = (1 - n / steps * 0.999 for n in (step, step + 1))
        count = len(masked) if step == steps - 1 else int(len(masked) * (1 - s / t))
        read = {place: p[place - 1 if shifted else place] for place in masked}
        for place in sorted(masked, key=lambda place: (-read[place].max(), place))[:count]:
            tokens[place] = int(read[place].argmax())
    return tokens[len(prompt) :]


@pytest.mark.parametrize(("name", "shifted"), [("dream", True), ("llada", False)])
def test_an_answer_against_float64(files: dict[str, Path], name: str, shifted: bool) -> None:
    options = DiffusionOptions(diffusion_steps=10, diffusion_eps=0.001)
    with load(files[name], backend="reference") as model:
        assert answer(model, options) == recomputed(files[name], model.tokenize(PROMPT), 40, 10, shifted)


ALL = [
    DiffusionOptions(diffusion_steps=8, diffusion_algorithm=algorithm, diffusion_alg_temp=heat, **schedule)  # type: ignore[arg-type]
    for algorithm, heat in (("origin", 0.0), ("entropy", 0.3), ("margin", 0.0), ("random", 0.0), ("confidence", 0.5))
    for schedule in ({"diffusion_eps": 0.01}, {"diffusion_block_length": 16}, {"diffusion_cfg_scale": 0.5})
]


def test_the_seed_decides_and_threads_do_not(files: dict[str, Path]) -> None:
    found: list[list[list[int]]] = []
    for threads in (1, 2):
        with load(files["llada"], threads=threads) as model:
            found.append([answer(model, options, SamplingOptions(seed=5)) for options in ALL])
            assert answer(model, ALL[0], SamplingOptions(seed=6)) != found[-1][0]
    assert found[0] == found[1]


def test_blocks_settle_from_left_to_right(files: dict[str, Path]) -> None:
    options = DiffusionOptions(diffusion_steps=8, diffusion_block_length=10)
    with load(files["llada"]) as model:
        canvases = list(model.diffuse(PROMPT, options, GREEDY, max_tokens=40))
    assert [canvas.step for canvas in canvases] == list(range(9))
    for canvas in canvases:
        settled = [token != MASK for token in canvas.answer]
        block = canvas.step // 2 * 10
        assert sum(settled) == canvas.step * 5
        assert all(settled[:block])


def test_steps_that_settle_nothing_are_not_evaluated(files: dict[str, Path]) -> None:
    with load(files["dream"]) as model:
        canvases = list(model.diffuse(PROMPT, None, GREEDY, max_tokens=5))
    assert canvases[-1].step == canvases[-1].steps == 128
    assert len(canvases) <= 6  # the first canvas is all masks, and each later one fixes at least one token


def test_an_answer_ends_where_the_model_says(files: dict[str, Path]) -> None:
    with load(files["dream"]) as model:
        *_, last = model.diffuse(PROMPT, None, GREEDY, max_tokens=20)
        assert len(model.answer_of(last)) == 20
        model.tokenizer.eog = frozenset({last.answer[3]})
        assert len(model.answer_of(last)) == list(last.answer).index(last.answer[3])


def test_defaults_are_the_models_own() -> None:
    options = DiffusionOptions()
    assert Diffusion.of(options, Masking(0, True)) == Diffusion(128, "confidence", 0.001, 0, 0.0, 0.0)
    assert Diffusion.of(options, Masking(0, False)).block_length == 32
    assert Diffusion.of(DiffusionOptions(diffusion_eps=0.1), Masking(0, False)).block_length == 0


def test_wrong_options() -> None:
    for wrong, message in (
        ({"diffusion_eps": 0.1, "diffusion_block_length": 8}, "diffusion_eps and diffusion_block_length exclude"),
        ({"diffusion_steps": 0}, "diffusion_steps is 0"),
        ({"diffusion_algorithm": "best"}, "one of origin, entropy, margin, random, confidence"),
        ({"diffusion_eps": 1.0}, "above 0 and below 1"),
    ):
        with pytest.raises(OptionError, match=message):
            DiffusionOptions(**wrong)  # type: ignore[arg-type]


def test_wrong_requests(files: dict[str, Path], tmp_path: Path) -> None:
    with load(files["dream"]) as model:
        for request, message in (
            (lambda: model.generate("a"), "a diffusion model, which fills in a text .* use model.diffuse"),
            (lambda: model.logits([1]), "a diffusion model"),
            (lambda: model.diffuse("a", max_tokens=0), "0 tokens"),
        ):
            with pytest.raises(LocalLLMError, match=message):
                list(request())
        with pytest.raises(ContextFull, match="the canvas holds 64 tokens, too few for"):
            model.diffuse(PROMPT, max_tokens=60)
    with load(write_model(tmp_path / "llama.gguf")) as model, pytest.raises(LocalLLMError, match="not a diffusion"):
        model.diffuse("a")
    for number, (extra, message) in enumerate(
        (
            ({"tokenizer.ggml.mask_token_id": 9999}, "mask_token_id: expected a token from 0 to 355, found 9999"),
            ({"diffusion.shift_logits": 3}, "diffusion.shift_logits: expected true or false, found '3'"),
        )
    ):
        wrong = write_diffusion(tmp_path / f"{number}.gguf", "dream", extra)
        with load(wrong) as model, pytest.raises(LocalLLMError, match=message):
            model.diffuse("a")


def run(*words: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return program(*words, stdin="", environ=environ)


def test_command_line(files: dict[str, Path], tmp_path: Path) -> None:
    """A pipe gets only the final text. Options that the model does not support give a one-line error."""
    told = run(
        "run", files["llada"], "--raw", "-c", "64", "-n", "40", "--temp", "0", "--top-k", "0", "--top-p", "1", PROMPT
    )
    with load(files["llada"], cache_type_k="f16", cache_type_v="f16") as model:
        *_, last = model.diffuse(PROMPT, None, GREEDY, max_tokens=40)
        assert (told.stdout, told.stderr) == (model.answer_of(last) + "\n", "")
    ordinary = write_model(tmp_path / "llama.gguf")
    for words, message in (
        (("run", ordinary, "--diffusion-steps", "4", "a"), "not a diffusion model; leave --diffusion-steps out"),
        (("chat", files["llada"]), "a diffusion model, which fills in a text and cannot"),
        (("serve", files["llada"], "--port", "0"), "a diffusion model, which fills in a text and cannot be served"),
        (("bench", files["llada"], "-p", "4", "-n", "2"), "use `localllm run`"),
        (("run", files["llada"], "--spec", "ngram", "a"), "does not support drafts; leave --spec out"),
        (("run", files["llada"], "--prompt-cache", tmp_path / "x", "a"), "leave --prompt-cache out"),
    ):
        told = run(*words)
        assert (told.returncode != 0, message in told.stderr.splitlines()[-1]) == (True, True), told.stderr
    noted = run("run", files["llada"], "--raw", "--min-p", "0.1", "-n", "4", "a")
    assert "--min-p has no effect on a diffusion model" in noted.stderr


CONFIGURED = """
spec = "ngram"
prompt-cache = "kept"
grammar = 'root ::= "a"'

[run]
diffusion-steps = 4
diffusion-alg-temp = 0.5
"""


def test_configured_options_that_do_not_fit_the_model_are_noted(files: dict[str, Path], tmp_path: Path) -> None:
    """Configured options may be meant for other models, so only options on the command line are errors."""
    (tmp_path / "config.toml").write_text(CONFIGURED)
    config, ordinary = str(tmp_path / "config.toml"), write_model(tmp_path / "llama.gguf")
    words = ("--raw", "-n", "2", "--temp", "0", "-c", "64", "a")
    off = ("--spec", "off", "--prompt-cache", "", "--grammar", "")
    plain = run("run", ordinary, *words)
    told = run("run", ordinary, *off, *words, LOCALLLM_CONFIG=config, LOCALLLM_DIFFUSION_EPS="0.5")
    assert (told.returncode, told.stdout) == (0, plain.stdout)
    assert told.stderr.splitlines() == [
        f"note: {option} has no effect on this model"
        for option in (
            f"--diffusion-steps ({config}:7)",
            "--diffusion-eps (LOCALLLM_DIFFUSION_EPS)",
            f"--diffusion-alg-temp ({config}:8)",
        )
    ]
    typed = run("run", ordinary, *off, *words, "--diffusion-alg-temp", "1", LOCALLLM_CONFIG=config)
    assert (typed.returncode, typed.stdout) == (1, "")
    [line] = typed.stderr.splitlines()
    assert line == f"error: {ordinary}: not a diffusion model; leave --diffusion-alg-temp out"

    plain = run("run", files["llada"], "--diffusion-steps", "4", "--diffusion-alg-temp", "0.5", "--seed", "3", *words)
    told = run("run", files["llada"], "--seed", "3", *words, LOCALLLM_CONFIG=config)
    assert (told.returncode, told.stdout) == (0, plain.stdout)
    assert told.stderr.splitlines() == [
        f"note: {option} ({config}:{line}) has no effect on a diffusion model"
        for option, line in (("--spec", 2), ("--prompt-cache", 3), ("--grammar", 4))
    ]
    assert not Path("kept").exists()
    typed = run("run", files["llada"], *words, "--grammar", "x.gbnf", LOCALLLM_CONFIG=config)
    assert typed.stderr.splitlines()[-1].endswith("support schemas and grammars; leave --grammar out")
    assert typed.returncode == 1
