"""Options from environment variables, presets and configuration files: precedence, and one-line errors."""

from __future__ import annotations

import math
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from localllm.cli.catalogue import APART
from localllm.cli.main import main
from localllm.cli.tomlfile import MOST, read_toml
from tests.localllm.cli.user import User

# -- precedence ------------------------------------------------------------------------------------------------------


def test_the_first_place_that_gives_an_option_counts(user: User) -> None:
    for flag, variable, preset, table, top in product((True, False), repeat=5):
        text = ("top-k = 5\n" if top else "") + ("[run]\ntop-k = 4\n" if table else "")
        text += "[presets.mine]\n" + ("top-k = 3\n" if preset else "min-p = 0\n")
        user.has(text, **({"TOP_K": "2"} if variable else {}))
        found = user.runs("run", "--preset", "mine", *(["--top-k", "1"] if flag else []))
        given = [flag, variable, preset, table, top]
        assert found.get("top_k") == (given.index(True) + 1 if any(given) else None), given


def test_no_limit_is_a_value_too(user: User) -> None:
    user.has("predict = 5\nthink = 'low'")
    found = user.runs("run", "-n", "-1", "--think", "auto")
    assert (found["max_tokens"], found["think"]) == (None, None)
    assert user.has("predict = 5", PREDICT="-1").runs("run")["max_tokens"] is None


def test_a_preset_is_chosen_by_flag_variable_table_and_top_in_this_order(user: User) -> None:
    presets = "".join(f"[presets.p{number}]\ntop-k = {number}\n" for number in range(1, 5))
    for flag, variable, table, top in product((True, False), repeat=4):
        text = ("preset = 'p4'\n" if top else "") + ("[run]\npreset = 'p3'\n" if table else "") + presets
        user.has(text, **({"PRESET": "p2"} if variable else {}))
        given = [flag, variable, table, top]
        found = user.runs("run", *(["--preset", "p1"] if flag else []))
        assert found.get("top_k") == (given.index(True) + 1 if any(given) else None), given
    assert "top_k" not in user.has(f"preset = 'p4'\n{presets}").runs("run", "--preset", "")


def test_tables_reach_their_command_alone(user: User) -> None:
    user.has("threads = 3\n[bench]\nthreads = 2\nn-prompt = [8, 16]\n[serve]\nport = 99\ncors = 'a'")
    assert user.runs("run")["threads"] == 3
    found = user.runs("bench")
    assert (found["threads"], found["n_prompt"]) == ((2,), (8, 16))
    found = user.runs("serve")
    assert (found["threads"], found["port"], found["cors"]) == (3, 99, ("a",))
    assert user.has("threads = 3").runs("bench")["threads"] == (3,)


def test_another_file_is_named_by_flag_or_variable(user: User, tmp_path: Path) -> None:
    user.has("threads = 3")
    (tmp_path / "other.toml").write_text("threads = 5")
    assert user.runs("run")["threads"] == 3
    assert user.runs("run", "--config", str(tmp_path / "other.toml"))["threads"] == 5
    assert user.runs("run", "--config", os.devnull)["threads"] is None


def test_a_measurement_keeps_its_windows(user: User) -> None:
    for command in [command for command, name in APART if name == "ctx_size"]:
        user.has("ctx-size = 8192", CTX_SIZE="4096")
        assert user.runs("chat")["ctx_size"] == 4096
        assert user.runs(command)["ctx_size"] == 512
        assert user.has(f"[{command}]\nctx-size = 64").runs(command)["ctx_size"] == 64


def test_an_option_replaces_what_it_excludes(user: User) -> None:
    user.has("model = 'a.gguf'\njson-schema = 's.json'\nsystem-prompt = 'Hi'\n[serve]\nmodels = 'shelf'")
    found = user.runs("chat")
    assert (found["model"], found["json_schema"], found["system_prompt"]) == ("a.gguf", "s.json", "Hi")
    found = user.runs("chat", "b.gguf", "--grammar", "g.gbnf", "-sysf", "f.txt")
    assert (found["words"], found["model"], found["json_schema"], found["system_prompt"]) == (("b.gguf",), "", None, "")
    assert user.runs("chat", "-hf", "ann/tiny")["model"] == ""
    found = user.runs("serve")
    assert (found["models"], found["model"]) == ("shelf", "")
    assert user.runs("serve", "b.gguf")["models"] == ""


def test_switches_can_be_switched_off_again(user: User) -> None:
    assert user.has("[run]\nraw = true").runs("run")["raw"] is True
    for text, value in (("off", False), ("0", False), ("No", False), ("on", True), ("TRUE", True)):
        assert user.has("[run]\nraw = true", RAW=text).runs("run")["raw"] is value
    assert user.has("[run]\nraw = true", RAW="").runs("run")["raw"] is True  # an empty variable counts as unset


# -- values ----------------------------------------------------------------------------------------------------------

VALUES = [
    ("temperature = 1", "temperature", 1),
    ("temp = 0.5", "temperature", 0.5),
    ("top_n_sigma = 2.5", "top_n_sigma", 2.5),
    ("temperature = '0.5'", "temperature", 0.5),
    ("predict = 5", "max_tokens", 5),
    ("predict = -1", "max_tokens", None),
    ("max-tokens = 5", "max_tokens", 5),
    ("gpu-layers = 'all'", "gpu_layers", "all"),
    ("gpu-layers = 7", "gpu_layers", 7),
    ("stop = 'a'", "stop", ("a",)),
    ("stop = ['a', 'b']", "stop", ("a", "b")),
    ("logit-bias = ['5+1.5', '2-inf']", "logit_bias", {5: 1.5, 2: -math.inf}),
    ("samplers = ['top_k', 'temperature']", "samplers", ("top_k", "temperature")),
    ("samplers = 'top_k;temp'", "samplers", ("top_k", "temperature")),
    (r"dry-sequence-breaker = ['\n', 'x']", "dry_sequence_breaker", ("\n", "x")),
    ("think = true", "think", True),
    ("think = 'low'", "think", "low"),
    ("think = 100", "think", 100),
    ("chat-template-kwargs = {a = [1, {b = 2}]}", "chat_template_kwargs", {"a": [1, {"b": 2}]}),
    ("chat-template-kwargs = '{\"a\": null}'", "chat_template_kwargs", {"a": None}),
    ("ignore-eos = true", "ignore_eos", True),
    ("hf-repo = 'hf.co/ann/tiny:Q8_0'", "hf_repo", "ann/tiny:Q8_0"),
    ("model = '~/m.gguf'", "model", os.path.expanduser("~/m.gguf")),
    ("system-prompt = '~ is home'", "system_prompt", "~ is home"),
    ("[run]\nfile = '~/p.txt'", "file", os.path.expanduser("~/p.txt")),
    ("run.raw = true", "raw", True),
    ("run = {raw = true}", "raw", True),
]


@pytest.mark.parametrize(("text", "name", "value"), VALUES, ids=[text for text, _, _ in VALUES])
def test_values_of_every_type(user: User, text: str, name: str, value: Any) -> None:
    assert user.has(text).runs("run")[name] == value


def test_values_of_variables_are_those_of_the_command_line(user: User) -> None:
    user.has(TEMP="0.5", STOP="a,b", PREDICT="-1", N_GPU_LAYERS="all", CHAT_TEMPLATE_KWARGS='{"a": 1}', PORT="9")
    found = user.runs("run")
    assert (found["temperature"], found["stop"], found["max_tokens"]) == (0.5, ("a,b",), None)
    assert (found["gpu_layers"], found["chat_template_kwargs"]) == ("all", {"a": 1})
    found = user.has(API_KEY="secret", MAX_BODY="2MiB").runs("serve")
    assert (found["api_key"], found["max_body"]) == (("secret",), 2 << 20)


# -- refusals --------------------------------------------------------------------------------------------------------

WRONG = [
    ("thread = 4", "FILE:1: unknown option thread; did you mean threads?"),
    ("\n# no\nchatt = {}", "FILE:3: unknown option chatt; did you mean chat?"),
    ("zzzz = 1", "FILE:1: unknown option zzzz"),
    ("[run]\ntempp = 1", "FILE:2: unknown option tempp; did you mean temp?"),
    ("port = 80", "FILE:1: not all commands share port; it belongs in [serve]"),
    ("[chat]\nport = 80", "FILE:2: chat does not have port; it belongs in [serve]"),
    ("[devices]\nthreads = 1", "FILE:2: devices does not have threads; it belongs in [chat], [run], [explain] and"),
    ("[presets.x]\nraw = true", "FILE:2: not all commands share raw; it belongs in [run]"),
    ("[presets.x]\npreset = 'coding'", "FILE:2: a preset cannot name another preset"),
    ("[presets]\nx = 1", "FILE:2: presets.x is a table; write [presets.x], and its options below"),
    ("presets = 1", "FILE:1: presets is a table; write [presets], and its options below"),
    ("run = 'x'", "FILE:1: run is a table; write [run], and its options below"),
    ("[[run]]\nraw = true", "FILE:1: run is a table; write [run], and its options below"),
    ("force = true", "FILE:1: force cannot be configured; give it on the command line each time"),
    ("[rm]\nyes = true", "FILE:2: yes cannot be configured; give it on the command line each time"),
    ("config = 'x'", "FILE:1: config cannot be configured; give it on the command line each time"),
    ("temp = 1\ntemperature = 1", "FILE:2: temperature is the same option as in FILE:1; remove one of them"),
    ("threads = true", "FILE:1: threads: True is not a value of this option"),
    ("threads = 0", "FILE:1: threads: '0' is not a whole number of at least 1"),
    ("threads = 1.5", "FILE:1: threads: '1.5' is not a whole number of at least 1"),
    ("threads = [1]", "FILE:1: threads: (1,): it must be a whole number of at least 1"),
    ("temperature = 'warm'", "FILE:1: temperature: 'warm' is not a number"),
    ("temperature = nan", "FILE:1: temperature: nan: it must be a finite number"),
    ("top-p = 3", "FILE:1: top-p: 3.0: it must be a number from 0 to 1"),
    ("system-prompt = 5", "FILE:1: system-prompt: 5 is not a text; put it in quotes"),
    ("system-prompt = 2026-01-01", "FILE:1: system-prompt: datetime.date(2026, 1, 1): it must be a text"),
    ("ignore-eos = 'yes'", "FILE:1: ignore-eos: 'yes' is not true or false"),
    ("ignore-eos = 1", "FILE:1: ignore-eos: 1 is not true or false"),
    ("stop = [1]", "FILE:1: stop: 1 is not a text; put it in quotes"),
    ("stop = [true]", "FILE:1: stop: True is not a value of this option"),
    ("samplers = ['top_k', 'magic']", "FILE:1: samplers: names 'magic': known are penalties"),
    ("spec = 'maybe'", "FILE:1: spec: 'maybe' is not one of off, ngram, draft, mtp, auto"),
    ("[serve]\nport = 70000", "FILE:2: port: '70000' is not a port from 0 to 65535"),
    ("spec = 'draft'", "requires one: give it (-md FILE), or use ngram (options come from FILE:1)"),
    ("preset = 'codng'", "FILE:1: unknown preset 'codng'; did you mean coding?"),
    ("preset = 'zz'", "FILE:1: unknown preset 'zz'; known presets: creative, precise, coding"),
    ("a = 1\nb =\n", "FILE:2: not valid TOML: Invalid value"),
    ("a = 1\na = 2\n", "FILE:2: not valid TOML: Cannot overwrite a value"),
    ("a = '''\n", "FILE:2: not valid TOML: "),
    ("a = " + "[" * 5000, "FILE: the values are nested too deeply"),
    ("a = 1" + "0" * 5000, "FILE: not valid TOML: Exceeds the limit"),
    ("# " + "x" * MOST, "FILE: larger than 256 KiB; is this a configuration file?"),
]


@pytest.mark.parametrize(("text", "told"), WRONG, ids=[told[:60] for _, told in WRONG])
def test_a_wrong_file_is_one_line_that_says_where(user: User, text: str, told: str) -> None:
    assert told in user.has(text).is_refused("run")


WRONG_VARIABLES = [
    ({"THREAD": "4"}, "LOCALLLM_THREAD: no option has this name; did you mean LOCALLLM_THREADS?"),
    ({"ZZZZ": "4"}, "LOCALLLM_ZZZZ: no option has this name"),
    ({"FORCE": "1"}, "LOCALLLM_FORCE: force cannot be configured; give it on the command line each time"),
    ({"THREADS": "four"}, "LOCALLLM_THREADS: 'four' is not a whole number of at least 1"),
    ({"TOP_P": "3"}, "LOCALLLM_TOP_P: 3.0: it must be a number from 0 to 1"),
    ({"RAW": "maybe"}, "LOCALLLM_RAW: 'maybe' is not on or off"),
    ({"TEMP": "1", "TEMPERATURE": "1"}, "is the same option; unset one of them"),
    ({"PRESET": "precice"}, "LOCALLLM_PRESET: unknown preset 'precice'; did you mean precise?"),
    ({"SPEC": "draft"}, "(options come from LOCALLLM_SPEC)"),
]


@pytest.mark.parametrize(("variables", "told"), WRONG_VARIABLES, ids=[told for _, told in WRONG_VARIABLES])
def test_a_wrong_variable_is_one_line_that_names_it(user: User, variables: dict[str, str], told: str) -> None:
    assert told in user.has(**variables).is_refused("run")


def test_an_unknown_preset_of_the_command_line(user: User) -> None:
    told = user.has("[presets.mine]").is_refused("run", "--preset", "min")
    assert told == "--preset: unknown preset 'min'; did you mean mine?"


def test_files_that_cannot_be_read(user: User, tmp_path: Path) -> None:
    user.path.write_bytes(b"# fine\na = '\xff'")
    assert user.is_refused("run") == "FILE:2: not UTF-8 text"
    user.path.unlink()
    assert user.is_refused("run") == "FILE: No such file or directory"  # a file named by the user must exist
    assert user.is_refused("run", "--config", str(tmp_path)) == f"{tmp_path}: is not a regular file but a folder"


def test_a_key_is_never_shown(user: User, capsys: pytest.CaptureFixture[str]) -> None:
    assert "s\u00e9cret" not in user.has('[serve]\napi-key = "s\u00e9cret"').is_refused("serve")
    assert "s\u00e9cret" not in user.has(API_KEY="s\u00e9cret").is_refused("serve")
    user.has('[serve]\napi-key = ["secret", "other"]')
    for more in ([], ["serve"], ["--json"]):
        assert main(["config", *more]) == 0
        out = capsys.readouterr().out
        assert "secret" not in out
        assert "(2 set)" in out


# -- lines -----------------------------------------------------------------------------------------------------------

LINES = '''\ufeff# a comment
a = 1
b.c = 2
"d e" = [  # [run]
  "]",
  3,
]

f = {g = 1}
[run]
system = """
[not.a.table]
a = 5
"""
h = 'i'
[presets."my own"] # here
j = """one
two""" # three
k = 4
[[l]]
m = 5
'''


def test_every_value_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    for ends in ("\n", "\r\n"):
        path.write_bytes(LINES.replace("\n", ends).encode())
        file = read_toml(path, required=True)
        assert file is not None
        assert file.lines == {
            ("a",): 2, ("b",): 3, ("b", "c"): 3, ("d e",): 4, ("f",): 9, ("f", "g"): 9, ("run",): 10,
            ("run", "system"): 11, ("run", "h"): 15, ("presets", "my own"): 16, ("presets", "my own", "j"): 17,
            ("presets", "my own", "k"): 19, ("l",): 20, ("l", "m"): 21,
        }  # fmt: skip
        assert file.place("run", "h") == f"{path}:15"
