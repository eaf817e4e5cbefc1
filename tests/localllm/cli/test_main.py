"""The command line as a whole: imports, output streams, and exit codes."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import localllm as api
from localllm.cli.main import main
from localllm.cli.table import COMMANDS
from localllm.options import declared
from tests.conftest import reference
from tests.localllm.support import PROGRAM, REPOSITORY, default_signals, localllm, write_model

HEAVY = ("numpy", "llvmlite", "numba", "jinja2", "tokenizers", "rich", "huggingface_hub")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


# -- help ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["chat", "--help"], ["run", "--help"], ["bench", "-h"], ["pull", "-h"]]
)
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys; from localllm.cli.main import main; code = main(sys.argv[1:]);"
        f"print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=REPOSITORY, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_names_all_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    flags = [flag for group in COMMANDS[name].groups for _, _, _, option in declared(group) for flag in option.flags]
    assert [flag for flag in flags if flag not in text] == []
    assert len(set(flags)) == len(flags)  # no flag belongs to two options


def test_no_words_give_the_help_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Usage: localllm COMMAND" in capsys.readouterr().out


# -- invalid usage and errors --------------------------------------------------------------------------------------

WRONG = [
    (["frobnicate"], "'frobnicate' is neither a command nor a model on this computer"),
    (["run"], "no prompt: "),
    (["run", "demo"], "no prompt: give one after MODEL"),
    (["run", "-hf", "llama"], "-hf/-hfr/--hf-repo: llama is not of the form USER/REPO or USER/REPO:QUANT"),
    (["run", "-hf", "u/r", "-m", "demo", "hi"], "expected one MODEL, got 2: demo, u/r"),
    (["pull"], "expected one USER/REPO[:QUANT]"),
    (["pull", "llama3"], "llama3 is not of the form USER/REPO or USER/REPO:QUANT"),
    (["pull", "a/b", "c/d"], "got 2: a/b, c/d"),
    (["rm"], "expected one NAME"),
    (["show"], "MODEL is required"),
    (["serve", "a", "b"], "expected one MODEL, got 2: a, b"),
    (["chat", "a", "b"], "expected one MODEL, got 2"),
    (["chat", "a", "-m", "b"], "expected one MODEL, got 2"),
    (["run", "m", "hi", "--nonsense"], "--nonsense"),
    (["run", "m", "hi", "-n"], "'-n' requires an argument (localllm run --help"),
    (["run", "m", "hi", "--temp", "warm"], "--temp/--temperature: 'warm' is not a number"),
    (["run", "m", "hi", "--temp", "nan"], "--temp/--temperature: nan: it must be a finite number"),
    (["run", "m", "hi", "--top-p", "3"], "--top-p: 3.0: it must be a number from 0 to 1"),
    (["run", "m", "hi", "--top-k", "1.5"], "--top-k: '1.5' is not a whole number"),
    (["run", "m", "hi", "--samplers", "top_k;magic"], "--samplers/--sampling-seq/--sampler-seq: names 'magic'"),
    (["run", "m", "hi", "-l", "12"], "-l/--logit-bias: '12' is not TOKEN+BIAS"),
    (["run", "m", "hi", "--chat-template-kwargs", "{x}"], "--chat-template-kwargs: '{x}' is not a JSON object"),
    (["run", "m", "hi", "--chat-template-kwargs", "[1]"], "'[1]' is not a JSON object"),
    (["run", "m", "hi", "-t", "0"], "-t/--threads: '0' is not a whole number of at least 1"),
    (
        ["run", "m", "hi", "-c", "999999999999999999999"],
        "-c/--ctx-size/--ctx: '999999999999999999999' is not a whole number from 0 to 2147483647",
    ),
    (["serve", "m", "-c", "9" * 5000], f"'{'9' * 40}...' is not a whole number from 0 to 2147483647 ("),
    (["bench", "m", "-p", "9" * 21], "' is not a whole number from 0 to 2147483647"),
    (["perplexity", "m", "-f", "x", "--ppl-stride", "9" * 21], "' is not a whole number from 0 to 2147483647"),
    (["serve", "m", "--port", "9" * 21], "' is not a port from 0 to 65535"),
    (["serve", "m", "--parallel", "9" * 21], "' is not a whole number from 1 to 256"),
    (["run", "m", "hi", "-c", "-5"], "-c/--ctx-size/--ctx: '-5' is not a whole number of at least 0"),
    *(
        ([command, "m", *rest, "-ctk", "foo"], "-ctk/--cache-type-k: 'foo' is not one of f32, f16, bf16, q8_0, q5_1, ")
        for command, rest in (("run", ["hi"]), ("serve", []), ("chat", []), ("bench", []), ("perplexity", []))
    ),
    (["bench", "m", "-ctv", "f16,foo"], "-ctv/--cache-type-v: 'foo' is not one of f32"),
    (["run", "m", "hi", "--backend", "abacus"], "--backend: 'abacus' is not one of auto, cpu, cuda, opencl"),
    (["bench", "m", "-p", "1,x"], "-p/--n-prompt: 'x' is not a whole number"),
    (["bench", "m", "-o", "xml"], "-o/--output: 'xml' is not one of md, json, jsonl, csv, sql"),
]


@pytest.mark.parametrize(("words", "told"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_wrong_usage_is_one_line_that_names_the_option(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert told in err
    assert err.count("\n") == 1


def test_more_threads_than_processors_give_one_note(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a draft model is loaded with the same option."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main(["run", str(tiny), "hi", "-n", "3", "--temp", "0", "-md", str(tiny)]) == 0
    expected, _ = capsys.readouterr()
    assert main(["run", str(tiny), "hi", "-n", "3", "--temp", "0", "-md", str(tiny), "-t", "9999"]) == 0
    out, err = capsys.readouterr()
    assert out == expected
    assert err.count("note: -t 9999: reduced to ") == 1


def test_errors_of_every_kind_are_one_line_and_exit_code_1(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model at all")
    mamba = write_model(tmp_path / "mamba.gguf", extra={"general.architecture": "mamba\x1b[2J"})
    cases = [
        (["run", "/no/such/file.gguf", "hi"], "/no/such/file.gguf"),  # GGUFError
        (["run", str(broken), "hi"], "broken.gguf"),
        (["run", str(mamba), "hi"], "general.architecture"),  # ModelError
        (["run", str(tiny), "hi", "--backend", "cpu", "-dev", "0"], "has no devices to choose from"),  # BackendError
        (["run", str(tiny), "-f", "/no/prompt.txt"], "/no/prompt.txt: No such file"),  # OSError
        (["run", str(tiny), "-f", "/no/such\nprompt"], "/no/such prompt: No such file"),
        (["run", str(tiny), "hi", "-l", "99999+1"], "99999"),  # SamplingError, raised once the model is loaded
        (["bench", str(tiny), "-p", "0", "-n", "0"], "nothing to measure"),
    ]
    for words, told in cases:
        assert main(words) == 1, words
        out, err = capsys.readouterr()
        assert err.startswith("error: "), words
        assert told in err
        assert err.count("\n") == 1
        assert "\x1b" not in err
        assert out == ""


def test_debug_shows_the_traceback_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    for words in (["--debug", "run", "/no/such", "hi"], ["run", "/no/such", "hi", "--debug"]):
        assert main(words) == 1
        err = capsys.readouterr().err
        assert err.startswith("Traceback")
        assert "NotHere: No such file: /no/such" in err
    assert main(["run", "/no/such", "--", "--debug"]) == 1  # a word after -- is the prompt
    assert "Traceback" not in capsys.readouterr().err


def test_a_bug_is_called_a_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*groups: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("localllm.cli.starting.show", broken)
    assert main(["show", "m"]) == 1
    err = capsys.readouterr().err
    assert "bug in localllm: KeyError: 'lost'" in err
    assert "test_main.py" in err
    assert err.count("\n") == 1


def test_ctrl_c_while_a_model_loads_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*groups: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("localllm.cli.starting.show", interrupted)
    assert main(["show", "m"]) == 130
    assert capsys.readouterr() == ("", "")


# -- run -----------------------------------------------------------------------------------------------------------


def test_stdout_holds_the_answer_and_nothing_else(tiny: Path) -> None:
    done = localllm("run", tiny, "tell", "me", "-n", 12, "--temp", 0)
    with api.load(tiny) as model:
        prompt = "<|im_start|>user\ntell me<|im_end|>\n<|im_start|>assistant\n"
        ids = model.tokenize(prompt, parse_special=True)
        answer = "".join(piece.text for piece in model.generate(ids, max_tokens=12, temperature=0))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == answer + "\n"


def test_prompt_comes_from_words_a_file_and_a_pipe_in_this_order(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.txt").write_text("two\n")
    settings = ["--raw", "-n", "6", "--temp", "0"]

    def answer(words: list[str], piped: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
        assert main(["run", *words, *settings]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    whole = answer([str(tiny), "one\ntwo\nthree"], "")
    assert answer([str(tiny), "one", "-f", str(tmp_path / "prompt.txt")], "three\n") == whole
    assert answer(["-m", str(tiny), "one"], "two\nthree") == whole
    assert answer(["-n", "3", str(tiny), "-p", "one\ntwo\nthree"], "") == whole  # the last -n applies
    assert answer([str(tiny)], "one\ntwo\nthree\n") == whole
    assert answer([str(tiny), "one"], "") != whole


def test_raw_text_may_hold_control_tokens(tiny: Path) -> None:
    written = "a<|im_end|>b"
    done = localllm("run", tiny, written, "--raw", "-n", 8, "--temp", 0)
    with api.load(tiny) as model:
        ids = model.tokenize(written, parse_special=True)
        assert len(ids) == 6 < len(model.tokenize(written))  # BOS, space, "a", the control token, space, "b"
        assert done.stdout == "".join(p.text for p in model.generate(ids, max_tokens=8, temperature=0)) + "\n"


def test_sampling_options_reach_the_sampler(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*words: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        assert main(["run", str(tiny), "hi", "--raw", "-n", "16", *words]) == 0
        return capsys.readouterr().out

    greedy = answer("--temp", "0")
    assert answer("--top-k", "1", "-s", "5") == greedy
    assert answer("--samplers", "top_k", "--top-k", "1") == greedy
    assert answer("-s", "5") == answer("--seed", "5") != answer("-s", "6")
    with api.load(tiny) as model:
        first = model.tokenize(greedy, add_special=False)[1]  # token 0 is the space that the tokenizer adds
    assert answer("--temp", "0", "-l", f"{first}-inf")[0] != greedy[0]
    assert answer("--temp", "0", "-r", greedy[3:5]) == greedy[:3] + "\n"


def test_variables_of_the_chat_template_come_as_json(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", template="{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}")
    counts = []
    for text in ("{}", '{"mood": "glad"}'):
        done = localllm("run", model, "hi", "-n", 1, "--stats", "--chat-template-kwargs", text)
        counts.append(int(done.stderr.split("prompt ")[1].split(",")[0]))
    assert counts[1] == counts[0] + 4


def test_statistics_go_to_stderr(tiny: Path) -> None:
    done = localllm("run", tiny, "hi", "-n", 5, "--stats")
    assert done.returncode == 0
    assert "answer 5, " in done.stderr
    assert "GB/s" in done.stderr
    assert "tokens/s" not in done.stdout


def test_without_a_template_the_prompt_is_continued_and_that_is_said(tmp_path: Path) -> None:
    bare = write_model(tmp_path / "bare.gguf", template=None, extra={"tokenizer.ggml.tokens": _bare_tokens()})
    done, raw = (localllm("run", bare, "hi", "-n", 9, "--temp", 0, *more) for more in ((), ("--raw",)))
    assert done.stdout == raw.stdout
    assert "no chat template" in done.stderr
    assert raw.stderr == ""


def _bare_tokens() -> list[str]:
    """Return the tiny model's vocabulary without the control tokens that identify a chat template."""
    letters = [chr(c) for c in range(33, 127)]
    return ["<unk>", "<s>", "</s>", "<a>", "<b>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", *letters]


def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    long = write_model(tmp_path / "long.gguf", context=20000)
    process = subprocess.Popen(
        [*PROGRAM, "run", str(long), "hi", "--raw", "-n", "-1", "-c", "20000", "--temp", "0"],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert len(process.stdout.read(3)) == 3
    process.stdout.close()
    assert process.wait(60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*PROGRAM, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, timeout=120
        )
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def test_a_cache_that_cannot_be_trusted_is_told_once(tiny: Path, tmp_path: Path) -> None:
    """The note about an untrusted cache appears once, although the model and its draft both open the cache."""
    (cache := tmp_path / "cache").mkdir()
    cache.chmod(0o777)
    words = ["run", tiny, "hi", "--raw", "-n", "2", "-md", tiny, "--backend", "cpu"]
    done = localllm(*words, environ={"XDG_CACHE_HOME": str(cache)})
    told = f"compiled code cannot be saved, so every start is slower: other users can write {cache}; chmod go-w {cache}"
    first, *others = done.stderr.splitlines()
    assert (done.returncode, first) == (0, f"note: {told}")
    assert all(line.startswith("note: the draft model is not used: ") for line in others)
    assert list(cache.iterdir()) == []


def test_closed_streams_are_no_error() -> None:
    done = subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *PROGRAM, "--help"], cwd=REPOSITORY, timeout=120)
    assert done.returncode == 0


def test_ctrl_c_ends_run_with_130_and_no_traceback(tiny: Path) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "run", str(tiny), "hi", "--raw", "-n", "-1", "-c", "20000"],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=default_signals,
    )
    assert process.stdout is not None
    process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    [note] = err.splitlines()
    assert (process.returncode, note[:20]) == (130, b"note: the model was ")  # -c exceeds the trained context


@pytest.mark.parametrize("name", ["stories260K-f32", "babyllama-969K-tok361-f32"])
def test_greedy_stories_are_those_of_llama_cpp(name: str) -> None:
    model, told = (reference("models", f"{name}.{end}") for end in ("gguf", "greedy160.txt"))
    done = localllm("run", model, "Once upon a time", "--raw", "--temp", 0, "-n", 160)
    assert done.returncode == 0
    assert "Once upon a time" + done.stdout.rstrip() == told.read_text(encoding="utf-8").strip()
