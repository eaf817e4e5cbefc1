"""Nothing needs Linux: commands give the same answers without the system calls that macOS and Windows lack
(`stand_in`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from urllib.request import urlopen

import pytest

from localllm.quant.codecache import default_folder
from tests.localllm.support import REPOSITORY
from tests.platforms.stand_in import LACKING, done

SYSTEMS = ("darwin", "win32")
HOME = "Zoë Müller 名前"


def environ(home: Path) -> dict[str, str]:
    """Return the environment of a user whose home folder has a space and non-ASCII letters in its path."""
    local = home / "AppData" / "Local"
    local.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "LOCALLLM_", "HF_"))}
    return {**kept, "HOME": str(home), "USERPROFILE": str(home), "LOCALAPPDATA": str(local), "APPDATA": str(local)}


def commands(folder: Path) -> list[list[str]]:
    text = folder / "text é.txt"
    text.write_text("Once upon a time there was a little bird. " * 20, encoding="utf-8")
    small, kept = str(folder / "small é.gguf"), str(folder / "kept é.kv")
    return [
        ["run", "demo", "Hello", "-n", "12", "--temp", "0"],
        ["run", "demo", "Hello", "-n", "4", "--temp", "0", "--prompt-cache", kept],
        ["run", "demo", "Hello", "-n", "4", "--temp", "0", "--prompt-cache", kept],
        ["quantize", "demo", small, "Q4_0", "--allow-requantize"],
        ["quantize", "demo", small, "Q4_0", "--allow-requantize"],  # refused because the file exists
        ["perplexity", small, "-f", str(text), "-c", "32", "--chunks", "2"],
        ["run", str(folder / "none.gguf"), "Hello"],
        ["list"],
    ]


@pytest.mark.parametrize("system", SYSTEMS)
def test_commands_answer_as_here(system: str, tmp_path: Path) -> None:
    (theirs := tmp_path / HOME).mkdir()
    (ours := tmp_path / "ours").mkdir()
    folder = theirs / {"darwin": "Library/Caches/localllm", "win32": "AppData/Local/localllm/Cache"}[system]
    here = [done(each) for each in commands(ours)]
    kept = default_folder("quant")
    assert kept is not None
    if kept.is_dir():  # reuse the kernels, which take half a minute to compile
        shutil.copytree(kept, folder / "quant")
        folder.chmod(0o700)
    words = [sys.executable, "-m", "tests.platforms.stand_in", system, json.dumps(commands(theirs))]
    run = subprocess.run(
        words, cwd=REPOSITORY, env=environ(theirs), stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8",
        timeout=300,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    found = json.loads(run.stdout)
    for words, (code, out, err), (our_code, our_out, our_err) in zip(commands(theirs), found, here, strict=True):
        assert "bug in localllm" not in err, (words, err)
        assert (code, bool(err)) == (our_code, bool(our_err)), (words, err)
        if words[0] == "run":
            assert out == our_out
    assert (theirs / "small é.gguf").read_bytes() == (ours / "small é.gguf").read_bytes()
    assert "exists" in found[4][2]
    assert list((folder / "kernels").iterdir())
    assert not (theirs / ".cache" / "localllm").exists()


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_server_answers_and_ends_at_ctrl_c(system: str, tmp_path: Path) -> None:
    (home := tmp_path / HOME).mkdir()
    code = (
        "import sys; from tests.platforms.stand_in import become; become(sys.argv.pop(1));"
        "from localllm.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, system, "serve", "demo", "--port", "0"], cwd=REPOSITORY, env=environ(home),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as server:  # fmt: skip
        assert server.stderr is not None
        try:
            said = ""
            while "listening on http://" not in (line := server.stderr.readline()):
                said += line
                assert line, said
            address = line.split("listening on ")[1].split()[0]
            with urlopen(f"{address}/health", timeout=60) as answer:
                assert json.load(answer)["status"] == "ok"
            server.send_signal(signal.SIGINT)
            rest = server.communicate(timeout=60)[1]
        finally:
            server.kill()
    assert server.returncode == 0, rest
    assert "Traceback" not in rest


def test_what_is_taken_away_is_here() -> None:
    """Every name that `stand_in` removes exists here. A misspelled name would remove nothing."""
    assert sys.platform == "linux"
    for module, names in LACKING["win32"].items():
        missing = [name for name in names if not hasattr(import_module(module), name)]
        assert set(missing) <= {"MAP_POPULATE", "sched_yield"}, module  # newer than the oldest supported Python
