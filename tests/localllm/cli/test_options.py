"""Command-line options: every sampler option has a flag with llama.cpp's meaning, and its value is passed to
the sampler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from localllm.cli.app import UsageError, read_command_line
from localllm.cli.foreign import FOREIGN
from localllm.cli.options import ModelName, RunOptions
from localllm.cli.table import COMMANDS
from localllm.options import AnswerOptions, LoadOptions, SamplingOptions, SpeculationOptions, declared
from localllm.options.load import FORCED
from localllm.options.sampling import NAMES


def parse(name: str, words: Sequence[str]) -> tuple[Any, ...]:
    line = read_command_line(COMMANDS, [name, *words])
    assert line is not None
    return COMMANDS[name].options(line)


def run(*words: str) -> tuple[RunOptions, LoadOptions, AnswerOptions, SamplingOptions]:
    own, opening, answering, *_, sampling, _ = parse("run", words)
    return own, opening.options, answering, SamplingOptions(**sampling)


def test_every_sampler_option_but_one_has_a_flag() -> None:
    missing = {each.name for each in declared(SamplingOptions) if not each.option.flags}
    assert missing == {"min_keep"}  # llama.cpp has no such flag either


def test_nothing_given_is_the_program_s_defaults() -> None:
    own, loading, answering, sampling = run()
    assert (own, loading, answering, sampling) == (RunOptions(), LoadOptions(), AnswerOptions(), SamplingOptions())


@pytest.mark.parametrize(
    ("words", "group", "expected"),
    [
        ("-c 4096", 1, {"ctx_size": 4096}),
        ("-c4096 -t4", 1, {"ctx_size": 4096, "threads": 4}),
        ("--ctx-size=128", 1, {"ctx_size": 128}),
        ("-ctk f16 -ctv f16", 1, {"cache_type_k": "f16", "cache_type_v": "f16"}),
        ("-n 7", 2, {"max_tokens": 7}),
        ("-n -1", 2, {"max_tokens": None}),
        ("--n-predict 7", 2, {"max_tokens": 7}),
        ("-sys Brief -s 5", 2, {"system_prompt": "Brief"}),
        ("-sys Brief -s 5", 3, {"seed": 5}),
        ('--chat-template-kwargs {"a":{"b":[1,null]}}', 2, {"chat_template_kwargs": {"a": {"b": [1, None]}}}),
        ("--think off", 2, {"think": False}),
        ("--think 0", 2, {"think": 0}),
        ("--think low", 2, {"think": "low"}),
        ("--json-schema s.json", 2, {"json_schema": "s.json"}),
        ('--grammar root::="a"', 2, {"grammar": 'root::="a"'}),
        ("-r a -r b --ignore-eos", 2, {"stop": ("a", "b"), "ignore_eos": True}),
        ("--temp 0 --top-k 1 --top-p .5 --min-p 0", 3, {"temperature": 0.0, "top_k": 1, "top_p": 0.5, "min_p": 0.0}),
        ("--temp 0 --seed -1", 3, {"temperature": 0.0, "seed": -1}),
        ("--system Brief", 2, {"system_prompt": "Brief"}),
        ("--typical .9 --top-nsigma 2", 3, {"typical_p": 0.9, "top_n_sigma": 2.0}),
        ("--typical-p .9 --top-n-sigma 2 --temperature 1", 3, {"typical_p": 0.9, "top_n_sigma": 2.0}),
        ("--xtc-probability .5 --xtc-threshold .2", 3, {"xtc_probability": 0.5, "xtc_threshold": 0.2}),
        ("--repeat-penalty 1.1 --repeat-last-n 32", 3, {"repeat_penalty": 1.1, "repeat_last_n": 32}),
        ("--presence-penalty -1 --frequency-penalty 1", 3, {"presence_penalty": -1.0, "frequency_penalty": 1.0}),
        ("--dry-multiplier .8 --dry-base 2 --dry-allowed-length 3", 3, {"dry_multiplier": 0.8, "dry_base": 2.0}),
        ("--dry-penalty-last-n 9", 3, {"dry_penalty_last_n": 9}),
        (r"--dry-sequence-breaker \n --dry-sequence-breaker x", 3, {"dry_sequence_breaker": ("\n", "x")}),
        ("--dry-sequence-breaker none", 3, {"dry_sequence_breaker": ()}),
        ("--dynatemp-range .3 --dynatemp-exp 2", 3, {"dynatemp_range": 0.3, "dynatemp_exp": 2.0}),
        ("-l 5+1.5 -l 2-inf", 3, {"logit_bias": {5: 1.5, 2: -math.inf}}),
        ("--stop a --stop b -r c", 2, {"stop": ("a", "b", "c")}),
        ("--samplers top_k,temp", 3, {"samplers": ("top_k", "temperature")}),
        ("--samplers top-k;typ;,nucleus", 3, {"samplers": ("top_k", "typ_p", "top_p")}),
        ("--samplers top_k;temperature", 3, {"samplers": ("top_k", "temperature")}),
        ("--samplers top_k;Adaptive-P;infill", 3, {"samplers": ("top_k", "adaptive_p", "infill")}),
        ("--sampling-seq kmt", 3, {"samplers": ("top_k", "min_p", "temperature")}),
        ("--sampler-seq edskypmxtia", 3, {"samplers": NAMES}),
        ("--mirostat 2 --mirostat-lr .2 --mirostat-ent 4", 3, {"mirostat": 2, "mirostat_eta": 0.2, "mirostat_tau": 4}),
        ("--adaptive-target .4 --adaptive-decay .5", 3, {"adaptive_target": 0.4, "adaptive_decay": 0.5}),
    ],
)
def test_options_of_llama_cpp(words: str, group: int, expected: dict[str, Any]) -> None:
    found = run(*words.split())[group]
    assert {name: getattr(found, name) for name in expected} == expected


def test_words_may_stand_between_options() -> None:
    own, *_ = run("demo", "-n", "1", "tell", "--temp", "0", "me")
    assert own.words == ("demo", "tell", "me")
    own, *_ = run("demo", "-n", "1", "--", "-v", "--raw")
    assert (own.words, own.stats, own.raw) == (("demo", "-v", "--raw"), False, False)
    own, _ = parse("show", ["--model", "demo"])
    assert own == ModelName((), "demo")


def test_options_are_not_guessed_from_their_beginnings() -> None:
    for word in ("--tem", "--ctx-s", "-sy"):
        with pytest.raises(UsageError):
            run("demo", word, "1")


def test_options_that_are_refused_by_name_are_not_ours() -> None:
    flags = {flag for command in COMMANDS.values() for group in command.groups for each in declared(group)
             for flag in each.option.flags}  # fmt: skip
    assert not flags & FOREIGN.keys()


def test_who_guesses_ahead() -> None:
    found = run("m.gguf", "hi", "-md", "d.gguf", "--draft-max", "5")[1].speculation
    assert (found, found.kind) == (SpeculationOptions("d.gguf", None, 5), "auto")
    assert run("m.gguf", "hi", "--spec", "ngram")[1].speculation.kind == "ngram"
    assert run("m.gguf", "hi")[1].speculation.kind == "auto"


def test_force_has_one_meaning() -> None:
    """Each command lists what `--force` allows, after the same words."""
    forcing = [
        each.option.help
        for command in COMMANDS.values()
        for group in command.groups
        for each in declared(group)
        if "--force" in each.option.flags
    ]
    assert len(forcing) > 8
    assert [text for text in forcing if not text.startswith(FORCED)] == []
