"""The option groups that only commands use. Names and short forms are llama.cpp's (common/arg.cpp, llama-bench).

`localllm.options` declares the options for loading a model, generation and sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from localllm.base.notices import Notice, Setting
from localllm.options import (
    AnswerOptions,
    LoadOptions,
    OptionError,
    Options,
    RayOptions,
    ServeOptions,
    group,
    option,
    same,
)
from localllm.options.answer import content
from localllm.options.kinds import JSON, PATH, TEXT, Kind, integer, several
from localllm.options.load import CACHE_OPTIONS, FORCED, MEDIA_OPTIONS, NEAREST_RULE
from localllm.options.ray import HOST_AND_PORT

if TYPE_CHECKING:
    from localllm.template import Family

path = partial(option, "", kind=PATH, offers="files")
_words = partial(option, (), kind=several(TEXT), argument=True)


def _reference(text: str) -> str:
    """Return USER/REPO[:QUANT] without a URL prefix."""
    from localllm.hub.errors import StoreError
    from localllm.hub.short_names import wanted_reference

    try:
        return str(wanted_reference(text)) if "/" in text else text  # own_names.py knows names without a slash
    except StoreError as error:
        raise OptionError(str(error)) from None


_REPO = Kind(_reference, TEXT.problem, "REPO")


@dataclass(frozen=True, slots=True)
class ModelName(Options):
    """The model: MODEL or -m MODEL."""

    TITLE: ClassVar[str] = "Model"
    words: tuple[str, ...] = _words(
        help="a GGUF file, a model's name (see localllm list), or a bundled model (demo, draft)",
        metavar="MODEL",
        offers="models",
    )
    model: str = option("", "-m", "--model", metavar="MODEL", offers="models", help="same as MODEL")
    hf_repo: str = option(
        "", "-hf", "-hfr", "--hf-repo", kind=_REPO, offers="models",
        help="a model on the Hugging Face hub, USER/REPO[:QUANT]; downloaded if it is not on this computer",
    )  # fmt: skip

    own_names: Mapping[str, str] = option({}, kind=JSON, help="")  # from the configuration (own_names.py)
    # From the configuration, for commands whose MODEL it does not replace
    default_model: str = option("", help="")
    changed_file: str = option("", help="")  # the configuration file to change, if --config names one

    @property
    def named(self) -> bool:
        """Return whether a model was given."""
        return bool(self.words or self.model or self.hf_repo)


@dataclass(frozen=True, slots=True)
class OpeningOptions(Options):
    """How to load a model for generation."""

    TITLE: ClassVar[str] = LoadOptions.TITLE
    load: LoadOptions = group(LoadOptions, without=("force",))
    force: bool = same(
        LoadOptions,
        "force",
        help=f"{FORCED} using a harmful cache type, {NEAREST_RULE}, using a card that failed its check; "
        "with run, replacing a saved --prompt-cache; with explain, replacing the --html FILE",
    )

    machines: RayOptions = group(RayOptions)

    @property
    def options(self) -> LoadOptions:
        return self.load.changed({"force": self.force})


@dataclass(frozen=True, slots=True)
class MeasuringOptions(Options):
    """How to load a model to measure it on a text."""

    TITLE: ClassVar[str] = LoadOptions.TITLE
    ctx_size: int = same(
        LoadOptions, "ctx_size", default=512, kind=integer(4), shown="512", help="window size in tokens"
    )
    load: LoadOptions = group(
        LoadOptions, without=("ctx_size", "model_draft", "spec", "draft_max", "draft_earlier", "force", *MEDIA_OPTIONS)
    )

    @property
    def options(self) -> LoadOptions:
        """Return the load options. They allow lossy KV cache types, because measuring their loss is useful."""
        return self.load.changed({"ctx_size": self.ctx_size, "any_cache": True, "mmproj": "off"})


@dataclass(frozen=True, slots=True)
class KeepingOptions(Options):
    """How to keep a conversation in a file."""

    TITLE: ClassVar[str] = "Prompt cache"
    prompt_cache: str = path("--prompt-cache", help="load text and cache from FILE and save them there at the end")
    prompt_cache_ro: bool = option(False, "--prompt-cache-ro", help="do not write the --prompt-cache file")


@dataclass(frozen=True, slots=True)
class FormatOptions(Options):
    """How to format a prompt: the chat template and its instructions."""

    TITLE: ClassVar[str] = "Chat format"
    system_prompt_file: str = path("-sysf", "--system-prompt-file", help="read the instructions from a file")
    chat_template: str = same(ServeOptions, "chat_template")
    # The beginning of every conversation with a derived model (derived.py)
    first_messages: tuple[Mapping[str, str], ...] = option((), kind=several(JSON), help="")

    def answering(self, given: AnswerOptions) -> AnswerOptions:
        """Return the answer options with instructions read from the file. Raise OptionError if instructions are given
        in both ways."""
        if not self.system_prompt_file:
            return given
        if given.system_prompt:
            raise OptionError("-sys/--system-prompt and -sysf/--system-prompt-file exclude each other; give one")
        return given.changed({"system_prompt": content(self.system_prompt_file, "system prompt").removesuffix("\n")})

    @property
    def template(self) -> Family | None:
        """Return the format that replaces the chat template in the file. Raise TemplateError if it is unknown or
        unreadable."""
        from localllm.template import given_template

        return given_template(self.chat_template) if self.chat_template else None


@dataclass(frozen=True, slots=True)
class DisplayOptions(Options):
    """How answers look on a terminal."""

    TITLE: ClassVar[str] = "Display"
    plain: bool = option(
        False, "--plain", help="show the model's text unchanged (default on a terminal: wrapped and formatted)"
    )
    hide_think: bool = option(False, "--hide-think", help="show only the length of the model's reasoning")


@dataclass(frozen=True, slots=True)
class ConfigurationOptions(Options):
    """The sources of options other than the command line (`localllm.cli.configuration`)."""

    TITLE: ClassVar[str] = "Configuration"
    preset: str = option(
        "",
        "--preset",
        metavar="NAME",
        offers="presets",
        help="a set of options: creative, precise, coding, or yours",
    )
    config: str = path("--config", help="read this configuration file (default: see localllm config path)")


@dataclass(frozen=True, slots=True)
class ConfigOptions(Options):
    words: tuple[str, ...] = _words(
        help="show the options of one command; path: print the name of the file; check: only look for errors; set and "
        "unset: change an option in the file, such as set model NAME, or set chat.no-history true",
        metavar="[COMMAND|path|check|set KEY VALUE|unset KEY]",
    )
    json: bool = option(False, "--json", help="print everything as JSON")
    preset: str = same(ConfigurationOptions, "preset")
    config: str = same(ConfigurationOptions, "config")


@dataclass(frozen=True, slots=True)
class ChatOptions(Options):
    context_shift: bool = option(
        False, "--context-shift", help="drop the oldest turns when the context is full (default: ask)"
    )
    no_stats: bool = option(False, "--no-stats", help="do not show statistics after answers")
    stats: bool = option(False, "-v", "--verbose", "--stats", help="show all statistics after answers")
    go_on: bool = option(False, "--continue", help="continue the last conversation, even after a crash")
    no_history: bool = option(False, "--no-history", help="do not store messages or the conversation on disk")

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.stats and self.no_stats:
            raise OptionError("-v/--stats and --no-stats exclude each other; give one")


@dataclass(frozen=True, slots=True)
class PromptOptions(ModelName):
    """The model and the prompt."""

    TITLE: ClassVar[str] = Options.TITLE
    words: tuple[str, ...] = _words(help="the model and the prompt", metavar="MODEL [PROMPT]", offers="models")
    prompt: str = option("", "-p", "--prompt", help="same as PROMPT")
    file: str = path("-f", "--file", help="read the prompt from a file (-: from stdin)")
    raw: bool = option(False, "--raw", help="continue the prompt as plain text, without a chat template")
    image: tuple[str, ...] = option(
        (), "--image", kind=several(PATH), repeat=True, metavar="FILE", offers="files",
        help="a picture before the prompt, or for <__media__> in it (repeatable)",
    )  # fmt: skip
    audio: tuple[str, ...] = option(
        (), "--audio", kind=several(PATH), repeat=True, metavar="FILE", offers="files",
        help="a sound, as with --image (repeatable)",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunOptions(PromptOptions):
    stats: bool = option(False, "-v", "--verbose", "--stats", help="show statistics on stderr at the end")
    prompt_cache_all: bool = option(False, "--prompt-cache-all", help="save the answer in the prompt cache too")


@dataclass(frozen=True, slots=True)
class ExplainOptions(PromptOptions):
    html: str = path("-o", "--html", help="also write an HTML page with all details")
    candidates: int = option(8, "--candidates", kind=integer(1), help="number of candidates to list per token")
    json: bool = option(False, "--json", help="print everything, including the answer, as JSON")


@dataclass(frozen=True, slots=True)
class EmbedOptions(ModelName):
    TITLE: ClassVar[str] = Options.TITLE
    words: tuple[str, ...] = _words(help="the model and the texts", metavar="MODEL [TEXT...]", offers="models")
    file: str = path("-f", "--file", help="read texts from a file, one per line")
    pooling: str = same(ServeOptions, "pooling")
    query: str = option("", "--query", kind=TEXT, help="score how well each text matches this query (rerankers)")
    no_normalize: bool = option(False, "--no-normalize", help="do not scale vectors to length 1")
    json: bool = option(False, "--json", help="print everything as JSON")


@dataclass(frozen=True, slots=True)
class ShowOptions(Options):
    ctx_size: int = same(LoadOptions, "ctx_size", help="context size for the memory plan (0: same as chat)")
    load: LoadOptions = group(LoadOptions, only=CACHE_OPTIONS)
    speed: bool = option(False, "--speed", help="forecast the speed of decoding, also of a tiny model or in a pipe")
    tensors: bool = option(False, "--tensors", help="list every tensor")
    formats: bool = option(False, "--formats", help="list the supported weight formats (no MODEL)")
    archs: bool = option(False, "--archs", help="list the supported architectures (no MODEL)")
    json: bool = option(False, "--json", help="print everything as JSON")


@dataclass(frozen=True, slots=True)
class PullOptions(Options):
    words: tuple[str, ...] = _words(
        help="a repository on the hub, and its model to download", metavar="USER/REPO[:QUANT]"
    )
    changed_file: str = same(ModelName, "changed_file")


@dataclass(frozen=True, slots=True)
class SearchOptions(Options):
    words: tuple[str, ...] = _words(help="words in the repository name", metavar="WORDS")
    own_names: Mapping[str, str] = same(ModelName, "own_names")
    limit: int = option(20, "-n", "--limit", kind=integer(1, 100), help="maximum number of models")
    json: bool = same(ShowOptions, "json")


@dataclass(frozen=True, slots=True)
class ListModelsOptions(Options):
    json: bool = same(ShowOptions, "json")


@dataclass(frozen=True, slots=True)
class RemoveOptions(Options):
    words: tuple[str, ...] = _words(help="a name from localllm list", metavar="NAME", offers="models")
    yes: bool = option(False, "-y", "--yes", help="delete without asking")


@dataclass(frozen=True, slots=True)
class DevicesOptions(Options):
    json: bool = same(ShowOptions, "json")


@dataclass(frozen=True, slots=True)
class DoctorOptions(Options):
    clean: bool = option(False, "--clean", help="delete compiled code, and prefixes in --cache-dir; never models")
    yes: bool = option(False, "-y", "--yes", help="with --clean: delete without asking")
    cache_dir: str = same(ServeOptions, "cache_dir", help="also include this --cache-dir of localllm serve")
    gpu: bool = option(False, "--gpu", help="check every kernel on every card and write a report that you can send us")
    output: str = path("-o", "--output", help="with --gpu: the report (default: localllm-gpu-DATE-TIME.json)")
    json: bool = same(ShowOptions, "json")


@dataclass(frozen=True, slots=True)
class TopOptions(Options):
    words: tuple[str, ...] = _words(help="the server's address (default: http://127.0.0.1:8080)", metavar="URL")
    once: bool = option(False, "--once", help="print one screen and exit (default in a pipe)")
    interval: int = option(2, "--interval", kind=integer(1), unit="seconds", help="time between updates")
    api_key: tuple[str, ...] = same(
        ServeOptions, "api_key",
        help=Notice("the server's API key (other users can see it: prefer ", Setting("api_key_file"), ")"),
    )  # fmt: skip
    api_key_file: str = same(ServeOptions, "api_key_file", help="use the first API key in this file")


@dataclass(frozen=True, slots=True)
class WorkerOptions(Options):
    join: str = option(
        "", "--join", kind=HOST_AND_PORT, help="join the cluster at this address (default: start a cluster here)"
    )
    token_file: str = path("--token-file", help="with --join: read the token from a file (default: ask for it)")
    host: str = option(
        "", "--host", metavar="ADDRESS", help="this computer's address for the others (default: local network)"
    )
    port: int = option(
        7380, "--port", kind=integer(1024, (1 << 16) - 100), help="the first of 100 ports that the cluster uses here"
    )

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.token_file and not self.join:
            raise OptionError("--token-file goes with --join; the first computer makes the token itself")


@dataclass(frozen=True, slots=True)
class ModelNames(Options):
    """One or more MODELs."""

    TITLE: ClassVar[str] = "Model"
    words: tuple[str, ...] = same(ModelName, "words")
    model: tuple[str, ...] = option(
        (), "-m", "--model", kind=several(TEXT), repeat=True, metavar="MODEL", offers="models",
        help="same as MODEL (repeatable)",
    )  # fmt: skip
    hf_repo: str = same(ModelName, "hf_repo")
