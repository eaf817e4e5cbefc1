"""Options that have no effect are reported in one line each."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import localllm
from localllm.base.notices import BeyondTraining, NotUsed
from localllm.cli.main import main
from localllm.generation.speculation.errors import SpeculationError
from localllm.generation.speculation.policy import Costs
from tests.localllm.support import write_model

WORDS = ("hi", "--raw", "-n", "3", "--temp", "0")
SHORT = "note: the draft model is not used: a pass of the model takes only "


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def twin(tiny: Path, tmp_path: Path) -> Path:
    """Provide a copy of the model as its draft model."""
    return Path(shutil.copy(tiny, tmp_path / "twin.gguf"))


@pytest.fixture(autouse=True)
def no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", open("/dev/null", encoding="utf-8"))  # noqa: SIM115


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake short forward passes, because the notes depend on them and the computer may be busy."""
    monkeypatch.setattr(
        "localllm.generation.speculation.setup.measure_costs", lambda *asked, **given: Costs({1: 0.0003, 16: 0.001})
    )


def run(capsys: pytest.CaptureFixture[str], model: Path, *words: object, code: int = 0) -> tuple[str, list[str]]:
    assert main(["run", str(model), *WORDS, *map(str, words)]) == code
    out, err = capsys.readouterr()
    return out, err.splitlines()


def test_a_context_beyond_training(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = "note: the model was trained on 512 tokens; beyond that, answers may be nonsense (-c 600)"
    assert run(capsys, tiny, "-c", 600)[1] == [told]
    assert run(capsys, tiny, "-c", 600)[1] == [told]  # reported on every run, even in one process
    assert run(capsys, tiny, "-c", 512)[1] == []
    assert run(capsys, tiny)[1] == []
    with pytest.warns(BeyondTraining, match=r"\(ctx_size=600\)"):
        localllm.load(tiny, ctx_size=600).close()


def test_a_draft_for_a_model_that_is_fast_already(tiny: Path, twin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = run(capsys, tiny)
    out, (note,) = run(capsys, tiny, "-md", twin)
    assert out == plain
    assert note.startswith(SHORT)
    assert note.endswith("; use it anyway with --spec draft")
    _, (note,) = run(capsys, tiny, "--spec", "auto")
    assert note.startswith("note: speculation is not used: ")
    assert note.endswith("; use it anyway with --spec ngram")


def test_a_context_beyond_the_draft_s_is_no_line_of_its_own(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = write_model(tmp_path / "long.gguf", context=2048)
    _, (note,) = run(capsys, long, "-md", tiny)
    assert note.startswith(SHORT)


def test_a_draft_of_another_vocabulary(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A draft model with another vocabulary gives a note, and n-gram drafting continues.

    With `--spec draft`, the draft model is an error.
    """
    plain, _ = run(capsys, tiny)
    out, (note,) = run(capsys, tiny, "-md", "demo")
    assert out == plain
    assert "cannot draft for" in note
    assert note.startswith("note: ")
    with pytest.warns(NotUsed, match="cannot draft"):
        model = localllm.load(tiny, model_draft="demo")
    with model:
        assert model.draft is None
        assert model.speculation is not None
        model.speculation.costs = Costs({1: 0.02, 16: 0.02})
        model.draft_with(model.speculation)
        usage = model.generate("ab" * 10, max_tokens=4).usage
        assert usage.drafting  # n-gram drafts
    _, (error,) = run(capsys, tiny, "-md", "demo", "--spec", "draft", code=1)
    assert error.startswith("error: ")
    with pytest.raises(SpeculationError):
        localllm.load(tiny, model_draft="demo", spec="draft")


def test_a_draft_that_cannot_be_faster(tiny: Path, twin: Path) -> None:
    with localllm.load(tiny, model_draft=twin, spec="draft") as model:
        found = model.speculation
        assert found is not None
        found.costs, found._draft_costs = Costs({1: 0.020, 16: 0.021}), Costs({1: 0.025, 16: 0.025})
        assert found.unused == (
            "the draft model is not used: one of its passes takes 25.00 ms, one of the model 20.00 ms, so it cannot "
            "make the model faster; use a smaller one"
        )
        found._draft_costs = Costs({1: 0.002, 16: 0.002})
        assert found.unused == ""
        found.costs = Costs({1: 0.020, 16: 0.4})  # verifying two tokens takes longer than drafting saves
        assert "cannot make the model faster" in found.unused


def test_a_prompt_cache_without_a_file(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, tiny, "--prompt-cache-ro")[1] == [
        "note: --prompt-cache-ro has no effect without --prompt-cache FILE"
    ]
    assert run(capsys, tiny, "--prompt-cache-all")[1] == [
        "note: --prompt-cache-all has no effect without --prompt-cache FILE"
    ]
    assert main(["chat", str(tiny), "--prompt-cache-ro", "--no-stats"]) == 0
    assert "--prompt-cache-ro has no effect" in capsys.readouterr().err


def test_configured_instructions_for_plain_text(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A configured system prompt without effect gives a note, because it may be meant for chat models.

    On the command line, -sys is an error.
    """
    config = tmp_path / "config.toml"
    config.write_text('system-prompt = "Be brief."\n')
    plain, _ = run(capsys, tiny)
    monkeypatch.setenv("LOCALLLM_CONFIG", str(config))
    note = f"note: -sys ({config}:1) has no effect on plain text"
    assert run(capsys, tiny) == (plain, [note])
    assert main(["explain", str(tiny), *WORDS]) == 0
    assert note in capsys.readouterr().err.splitlines()
    _, (error,) = run(capsys, tiny, "-sys", "Be brief.", code=1)
    assert error == "error: -sys/--system-prompt needs a chat template; put the text into the prompt"
