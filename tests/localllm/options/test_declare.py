"""Option groups are validated when constructed, accept flat keyword arguments, and are visible to type checkers."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, get_type_hints

import pytest

from localllm.base.errors import LocalLLMError
from localllm.options import (
    AnswerOptions,
    LoadOptions,
    OptionError,
    Options,
    SamplingOptions,
    SpeculationOptions,
    declared,
    group,
    option,
    same,
)
from localllm.options.keywords import CHAT_ONLY, ChatKeywords, GenerateKeywords, LoadKeywords
from localllm.options.kinds import integer
from localllm.options.signature import takes, types_of

GROUPS = (LoadOptions, AnswerOptions, SamplingOptions)


@dataclass(frozen=True, slots=True)
class Timing(Options):
    threads: Any = same(LoadOptions, "threads", default=7, help="how many")
    load: LoadOptions = group(LoadOptions, without=("threads", "draft_max"))
    runs: int = option(5, "--runs", help="runs of a test", kind=integer(1))


def test_names_are_flat_and_each_stands_once() -> None:
    assert LoadOptions.names()[-5:] == ("spec", "draft_max", "draft_earlier", "force", "any_cache")
    assert Timing.names() == ("threads", *(n for n in LoadOptions.names() if n not in ("threads", "draft_max")), "runs")
    names = [name for each in GROUPS for name in each.names()]
    assert len(set(names)) == len(names)


def test_a_group_is_made_from_flat_values() -> None:
    made = Timing.of({"runs": 2, "ctx_size": 9, "spec": "ngram", "threads": 3})
    assert made == Timing(3, LoadOptions(ctx_size=9, speculation=SpeculationOptions(spec="ngram")), 2)
    assert made.changed({"ctx_size": 8}).load.ctx_size == 8
    assert made.changed({"ctx_size": 8}).load.speculation.spec == "ngram"
    assert Timing.of(made.values()) == made


def test_options_are_frozen_and_hold_nothing_else() -> None:
    made = LoadOptions()
    with pytest.raises(FrozenInstanceError):
        made.ctx_size = 5  # type: ignore[misc]
    assert not hasattr(made, "__dict__")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"ctx": 5}, r"unknown option ctx; did you mean ctx_size\?"),
        ({"n_gpu_layers": 5}, r"unknown option n_gpu_layers; did you mean gpu_layers\?"),
        ({"zzz": 5}, "unknown option zzz; known are ctx_size, threads, "),
        ({"ctx_size": -1}, "ctx_size is -1: it must be a whole number of at least 0"),
        ({"ctx_size": "512"}, "ctx_size is '512': it must be a whole number"),
        ({"ctx_size": True}, "ctx_size is True: it must be a whole number"),
        ({"ctx_size": 2**31}, "ctx_size is 2147483648: it must be a whole number from 0 to 2147483647"),
        ({"ctx_size": 10**5000}, "ctx_size is a number of more than 40 digits: it must be a whole number from 0 to"),
        ({"threads": 0}, "threads is 0: it must be a whole number of at least 1"),
        ({"gpu_layers": "most"}, "gpu_layers is 'most': it must be a number of layers, all or auto"),
        ({"gpu_layers": -1}, "gpu_layers is -1: it must be a number of layers"),
        ({"n_cpu_moe": -1}, "n_cpu_moe is -1"),
        ({"backend": None}, "backend is None: it must be one of auto, cpu"),
        ({"device": None}, "device is None: it must be a text"),
        ({"force": 1}, "force is 1: it must be True or False"),
        ({"spec": "maybe"}, "spec is 'maybe': it must be one of off, ngram, draft, mtp, auto"),
        ({"spec": "draft"}, "requires one: give it \\(model_draft=FILE\\)"),
        ({"spec": "ngram", "model_draft": "m"}, "ngram does not use it"),
        ({"draft_max": 0}, "draft_max is 0"),
    ],
)
def test_wrong_options_are_refused_when_made(values: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told) as error:
        LoadOptions.of(values)
    assert isinstance(error.value, LocalLLMError)


def test_without_a_kind_of_speculation_a_draft_model_decides() -> None:
    assert (SpeculationOptions().kind, SpeculationOptions().asked) == ("auto", False)
    assert SpeculationOptions(model_draft="m").kind == "auto"
    assert SpeculationOptions(model_draft="m", spec="off").kind == "off"


def test_a_stop_may_be_one_text_or_several() -> None:
    assert AnswerOptions(stop="END").stops == ("END",)
    assert AnswerOptions(stop=["a", "b"]).stops == ("a", "b")


@pytest.mark.parametrize("value", [None, [1], {"a": {1}}, {"a": object()}])
def test_variables_of_a_template_are_json(value: Any) -> None:
    assert AnswerOptions(chat_template_kwargs={"a": [1, None, {"b": "c"}]}).chat_template_kwargs["a"]
    with pytest.raises(OptionError, match=r"chat_template_kwargs is .*: it must be a dict of names and JSON values"):
        AnswerOptions(chat_template_kwargs=value)


# -- names -----------------------------------------------------------------------------------------------------------

OTHER_NAMES = {  # options whose name in the Python and HTTP APIs differs from llama.cpp's flag
    "max_tokens": "--predict", "mirostat_tau": "--mirostat-ent", "mirostat_eta": "--mirostat-lr",
}  # fmt: skip


def test_an_option_is_called_by_its_long_flag() -> None:
    for each in GROUPS:
        for name, _, _, shown in declared(each):
            if shown.flags:
                assert OTHER_NAMES.get(name, "--" + name.replace("_", "-")) in shown.flags, name


def test_type_checkers_see_what_is_declared() -> None:
    chat = types_of(AnswerOptions) | types_of(SamplingOptions)
    assert get_type_hints(LoadKeywords) == types_of(LoadOptions)
    assert get_type_hints(ChatKeywords) == chat
    assert get_type_hints(GenerateKeywords) == {name: kind for name, kind in chat.items() if name not in CHAT_ONLY}


def test_help_of_a_function_shows_its_options() -> None:
    @takes(LoadOptions, without=("force",))
    def opens(path: str, **options: Any) -> None:
        """Open."""

    page = opens.__doc__
    assert page is not None
    assert "    ctx_size: int = 0 (tokens)\n        context size in tokens (0: the model's own, up to 4096)\n" in page
    told = "maximum number of CPU threads; a busy machine uses fewer [all processors]"
    assert f"    threads: int | None = None\n        {told}\n" in page
    assert "prediction heads), or auto (whichever makes the answer faster) [auto]" in page
    assert "force" not in page
    assert "options" not in inspect.signature(opens).parameters
