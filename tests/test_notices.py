"""Every option named in a message exists, and no module below the command line names a flag."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.base.errors import LocalLLMError
from localllm.base.notices import FILE, N, Notice, Setting, Together
from localllm.cli.flags import GROUPS, flag_of, typed
from localllm.cli.table import COMMANDS
from localllm.options import declared
from tests.test_imports import FILES, name

BELOW = [path for path in FILES if not name(path).startswith(("localllm/cli/", "localllm/options/"))]
OPTIONS = [each for command in COMMANDS.values() for group in command.groups for each in declared(group)]
FLAGS = {flag for each in OPTIONS for flag in each.option.flags}
FOREIGN = {  # file and string: strings that look like our flags but are not
    ("localllm/distributed/attach.py", "--port"),  # an option of Ray
    ("localllm/distributed/worker.py", "--port"),  # the same
    ("localllm/distributed/membership.py", "-m"),  # an option of Python
    ("localllm/distributed/supervised.py", "-m"),  # an option of Python
    ("backends/cuda/nvrtc.py", "-v"),  # an option of ptxas, NVIDIA's assembler
    ("localllm/__main__.py", "-m"),  # an option of Python
    ("localllm/sandbox/process.py", "-c"),  # an option of Python
    ("localllm/base/machine/system.py", "-n"),  # an option of sysctl
    ("localllm/base/notices.py", "--backend"),  # an example in a docstring
    ("quant/formats/q1_q2.py", "-d"),  # the expression "minus d"
}


def texts(path: Path) -> Iterator[str]:
    """Yield the string literals of a file, including docstrings."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])-{1,2}[a-zA-Z][\w-]*", text)) & FLAGS


def settings(path: Path) -> Iterator[str]:
    """Yield the options that a file names in messages: in Setting(...), or in a loop over names passed to Setting."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Setting":
            first = node.args[0]
            yield first.value if isinstance(first, ast.Constant) else ""


def test_below_the_command_line_no_text_names_a_flag() -> None:
    found = {(name(path), flag) for path in BELOW for text in texts(path) for flag in flags_in(text)}
    assert found - FOREIGN == set()


def test_flags_are_found_in_texts(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        '"""As -t."""\ndef f():\n    """And -c."""\n    return f"use --backend {1} or -ngl N"'
    )
    assert {flag for text in texts(tmp_path / "m.py") for flag in flags_in(text)} == {"--backend", "-ngl", "-c", "-t"}
    assert flags_in("a first-token, the -inf, top-k") == set()


def test_every_option_that_a_message_names_exists() -> None:
    named = {each for path in FILES for each in settings(path)}
    known = {each.name for group in GROUPS for each in declared(group)}
    assert len(named) > 10
    assert named - {""} <= known  # "": the name is in a variable
    for each in sorted(named - {""}):
        assert flag_of(each) in FLAGS


def test_an_option_of_several_commands_has_one_flag_in_messages() -> None:
    for group in GROUPS:
        for each in declared(group):
            if each.option.flag and each.name != "words":
                assert each.option.flag == flag_of(each.name), each.name


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        (Setting("backend", "cpu"), "--backend cpu"),
        (Setting("gpu_layers", 40), "-ngl 40"),
        (Setting("gpu_layers", 1), "-ngl 1"),
        (Setting("n_cpu_moe", N), "-ncmoe N"),
        (Setting("device", "cuda:1"), "--device cuda:1"),
        (Setting("ctx_size"), "-c"),
        (Setting("threads"), "-t"),
        (Setting("force", True), "--force"),
        (Setting("imatrix", FILE), "--imatrix FILE"),
        (Together((Setting("cache_type_k", "q8_0"), Setting("cache_type_v", "q8_0"))), "-ctk q8_0 -ctv q8_0"),
    ],
)
def test_the_command_line_writes_flags(part: Setting | Together, shown: str) -> None:
    assert typed(LocalLLMError(Notice("use ", part))) == f"use {shown}"
    assert typed("plain -x") == "plain -x"
