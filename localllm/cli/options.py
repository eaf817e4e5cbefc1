"""The option groups of the commands. Names and short forms are llama.cpp's (common/arg.cpp, llama-bench), defaults are
those of the program itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from localllm.cli.complete import backends, cache_types, files, models, types
from localllm.cli.declare import Declared, above, gpu_layers, one_of, option, pair, size, whole, wholes
from localllm.cli.sampling import sampling
from localllm.sampling.options import SamplerOptions
from localllm.speculation.options import KINDS, MOST_DRAFTED

KEYS_HELP = "format of the keys in the cache: f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0, fp8, or auto"
VALUES_HELP = "format of the values there"
LAYERS_HELP = "layers on a graphics card: the last N, the output counting as one; all; or auto, as many as fit"
EXPERTS_HELP = "keep the experts of the first N layers on the CPU"
DEVICE_HELP = "which card: its number or part of its name, as localllm devices lists them"

# Who guesses ahead, for the commands that can let somebody.
DRAFT_MODEL = partial(
    option,
    "",
    "-md",
    "--model-draft",
    "--spec-draft-model",
    metavar="MODEL",
    help="a smaller model that guesses ahead",
    complete=models,
)
SPEC = partial(
    option, "", "--spec", metavar="WHO", read=one_of(*KINDS), shown="off; auto with -md",
    help="who guesses ahead: off, ngram (the text so far), draft, or auto, whichever pays",
)  # fmt: skip
DRAFT_MAX = partial(
    option,
    MOST_DRAFTED,
    "--draft-max",
    "--draft",
    "--draft-n",
    metavar="N",
    read=whole(1),
    help="most tokens guessed ahead",
)


@dataclass(frozen=True, slots=True)
class ModelName:
    """Which model: MODEL or -m MODEL."""

    words: tuple[str, ...] = option(
        (), help="a GGUF file, or a model in the box: demo, draft", metavar="MODEL", complete=models
    )
    model: str = option("", "-m", "--model", metavar="MODEL", help="the model, as an option", complete=models)


@dataclass(frozen=True, slots=True)
class Loading:
    """How a model is opened."""

    ctx_size: int = option(
        0,
        "-c",
        "--ctx-size",
        "--ctx",
        metavar="N",
        read=whole(0),
        help="tokens of context; 0: as trained, at most 4096",
    )
    threads: int | None = option(
        None, "-t", "--threads", metavar="N", read=whole(1), help="CPU threads", shown="all processors"
    )
    backend: str = option(
        "auto", "--backend", metavar="NAME", help="auto, cpu, cuda, opencl, or reference (slow)", complete=backends
    )
    gpu_layers: int | str = option(
        "auto", "-ngl", "--gpu-layers", "--n-gpu-layers", metavar="N", read=gpu_layers, help=LAYERS_HELP
    )
    cpu_moe: int = option(0, "-ncmoe", "--n-cpu-moe", metavar="N", read=whole(0), help=EXPERTS_HELP)
    device: str = option("", "-dev", "--device", metavar="DEVICE", help=DEVICE_HELP)
    cache_type_k: str = option("f16", "-ctk", "--cache-type-k", metavar="TYPE", help=KEYS_HELP, complete=cache_types)
    cache_type_v: str = option("f16", "-ctv", "--cache-type-v", metavar="TYPE", help=VALUES_HELP, complete=cache_types)

    def of_load(self) -> dict[str, Any]:
        """These options as `localllm.load` takes them."""
        return {
            "backend": self.backend, "threads": self.threads, "ctx": self.ctx_size,
            "cache_type_k": self.cache_type_k, "cache_type_v": self.cache_type_v,
            "layers": self.gpu_layers, "host_experts": self.cpu_moe, "device": self.device,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Opening(Loading):
    """How a model is opened to write."""

    model_draft: str = DRAFT_MODEL()
    spec: str = SPEC()
    draft_max: int = DRAFT_MAX()
    force: bool = option(
        False, "--force", help="take a cache type that harms the model; with run, replace a saved --prompt-cache"
    )

    def of_load(self) -> dict[str, Any]:
        speculation = {"draft": self.model_draft, "speculate": self.spec or None, "draft_max": self.draft_max}
        return Loading.of_load(self) | speculation | {"force": self.force}


@dataclass(frozen=True, slots=True)
class Measuring(Loading):
    """How a model is opened to be measured on a text."""

    ctx_size: int = option(512, "-c", "--ctx-size", "--ctx", metavar="N", read=whole(4), help="tokens of a window")

    def of_load(self) -> dict[str, Any]:
        return Loading.of_load(self) | {"force": True}  # what harms is measured here


@dataclass(frozen=True, slots=True)
class Answering:
    """What an answer is made of, sampling apart."""

    predict: int = option(
        -1, "-n", "--predict", "--n-predict", metavar="N", read=whole(-2), help="most tokens of an answer; -1: no limit"
    )
    system_prompt: str = option(
        "", "-sys", "--system-prompt", metavar="TEXT", help="what the model is told before all else"
    )
    stop: tuple[str, ...] = option(
        (), "-r", "--reverse-prompt", metavar="TEXT", repeat=True, help="end the answer before this text; repeatable"
    )
    ignore_eos: bool = option(False, "--ignore-eos", help="go on where the model would end")
    parse_special_in_content: bool = option(
        False, "--parse-special-in-content", help="control tokens written in messages count as such; unsafe"
    )

    @property
    def max_tokens(self) -> int | None:
        return self.predict if self.predict >= 0 else None


@dataclass(frozen=True, slots=True)
class Keeping:
    """A conversation in a file."""

    prompt_cache: str = option(
        "",
        "--prompt-cache",
        metavar="FILE",
        complete=files,
        help="begin with the text and cache kept in FILE, and keep them there",
    )
    prompt_cache_ro: bool = option(False, "--prompt-cache-ro", help="only read that file")


@dataclass(frozen=True, slots=True)
class Chat:
    context_shift: bool = option(
        False, "--context-shift", help="drop the oldest turns where the context is full; otherwise you are asked"
    )
    no_stats: bool = option(False, "--no-stats", help="no statistics after the answers")


@dataclass(frozen=True, slots=True)
class Run:
    words: tuple[str, ...] = option(
        (), help="the model, and what to say to it", metavar="MODEL [PROMPT]", complete=models
    )
    model: str = option("", "-m", "--model", metavar="MODEL", help="the model, as an option", complete=models)
    prompt: str = option("", "-p", "--prompt", metavar="TEXT", help="the prompt, as an option")
    file: str = option("", "-f", "--file", metavar="FILE", complete=files, help="read the prompt from a file")
    raw: bool = option(False, "--raw", help="continue the prompt as it is, without a chat template")
    stats: bool = option(False, "-v", "--stats", help="statistics on stderr at the end")
    prompt_cache_all: bool = option(False, "--prompt-cache-all", help="keep the answer in the prompt cache too")


@dataclass(frozen=True, slots=True)
class Show:
    ctx_size: int = option(
        0,
        "-c",
        "--ctx-size",
        "--ctx",
        metavar="N",
        read=whole(0),
        help="context of the memory plan; 0: as `chat` has it",
    )
    cache_type_k: str = option("f16", "-ctk", "--cache-type-k", metavar="TYPE", help=KEYS_HELP, complete=cache_types)
    cache_type_v: str = option("f16", "-ctv", "--cache-type-v", metavar="TYPE", help=VALUES_HELP, complete=cache_types)
    tensors: bool = option(False, "--tensors", help="list every tensor")
    formats: bool = option(False, "--formats", help="the formats that can be read, written and run; no MODEL")
    archs: bool = option(False, "--archs", help="the architectures that can be run; no MODEL")
    json: bool = option(False, "--json", help="all of it as JSON")


@dataclass(frozen=True, slots=True)
class Devices:
    json: bool = option(False, "--json", help="all of it as JSON")


@dataclass(frozen=True, slots=True)
class Bench:
    prompts: tuple[int, ...] = option(
        (512,), "-p", "--n-prompt", metavar="N,...", read=wholes(0), help="tokens of a prompt (pp)", shown="512"
    )
    answers: tuple[int, ...] = option(
        (128,), "-n", "--n-gen", metavar="N,...", read=wholes(0), help="tokens decoded (tg)", shown="128"
    )
    depths: tuple[int, ...] = option(
        (0,), "-d", "--n-depth", metavar="N,...", read=wholes(0), help="tokens in the cache before", shown="0"
    )
    threads: tuple[int | None, ...] = option(
        (None,), "-t", "--threads", metavar="N,...", read=wholes(1), help="CPU threads", shown="all processors"
    )
    repetitions: int = option(5, "-r", "--repetitions", metavar="N", read=whole(1), help="runs of each test")
    output: str = option(
        "md", "-o", "--output", metavar="KIND", read=one_of("md", "json", "csv"), help="md, json or csv"
    )
    backend: str = option(
        "auto", "--backend", metavar="NAME", help="auto, cpu, cuda, opencl, or reference (slow)", complete=backends
    )
    gpu_layers: int | str = option(
        "auto", "-ngl", "--gpu-layers", "--n-gpu-layers", metavar="N", read=gpu_layers, help=LAYERS_HELP
    )
    cpu_moe: int = option(0, "-ncmoe", "--n-cpu-moe", metavar="N", read=whole(0), help=EXPERTS_HELP)
    device: str = option("", "-dev", "--device", metavar="DEVICE", help=DEVICE_HELP)
    cache_type_k: str = option("f16", "-ctk", "--cache-type-k", metavar="TYPE", help=KEYS_HELP, complete=cache_types)
    cache_type_v: str = option("f16", "-ctv", "--cache-type-v", metavar="TYPE", help=VALUES_HELP, complete=cache_types)
    model_draft: str = DRAFT_MODEL()
    spec: str = SPEC()
    draft_max: int = DRAFT_MAX()
    no_warmup: bool = option(False, "--no-warmup", help="no run before those that count")

    @property
    def speculates(self) -> bool:
        return (self.spec or ("auto" if self.model_draft else "off")) != "off"

    def of_load(self) -> dict[str, Any]:
        """What `localllm.load` takes of these options, apart from what tests decide."""
        return {
            "backend": self.backend, "cache_type_k": self.cache_type_k, "cache_type_v": self.cache_type_v,
            "layers": self.gpu_layers, "host_experts": self.cpu_moe, "device": self.device,
            "draft": self.model_draft, "speculate": self.spec or None, "draft_max": self.draft_max,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Perplexity:
    file: str = option(
        "", "-f", "--file", metavar="FILE", complete=files, help="the text; without it, what is piped in"
    )
    chunks: int = option(
        0, "--chunks", metavar="N", read=whole(0), help="most windows; 0: all of the text", shown="all"
    )
    kld: str = option(
        "",
        "--kld",
        metavar="BASE",
        complete=files,
        help="compare with a model, or with a file that --save-base or llama.cpp wrote",
    )
    save_base: str = option(
        "",
        "--save-base",
        metavar="FILE",
        complete=files,
        help="write the log-probabilities, in the format of --kl-divergence-base",
    )
    force: bool = option(False, "--force", help="overwrite the FILE of --save-base")
    json: bool = option(False, "--json", help="all of it as JSON")


@dataclass(frozen=True, slots=True)
class Imatrix:
    file: str = option(
        "", "-f", "--file", metavar="FILE", complete=files, help="the text; without it, what is piped in"
    )
    output: str = option(
        "imatrix.gguf",
        "-o",
        "--output",
        metavar="FILE",
        complete=files,
        help="what to write; a name in .dat gives the older format",
    )
    chunks: int = option(
        0, "--chunks", metavar="N", read=whole(0), help="most windows; 0: all of the text", shown="all"
    )
    process_output: bool = option(False, "--process-output", help="of the output matrix too")
    force: bool = option(False, "--force", help="overwrite FILE")


@dataclass(frozen=True, slots=True)
class Quantize:
    words: tuple[str, ...] = option((), help="from, to, and the type to write", metavar="IN [OUT] TYPE", complete=types)
    force: bool = option(False, "--force", help="overwrite OUT")
    dry_run: bool = option(False, "--dry-run", help="only show what every tensor would become, and the size")
    allow_requantize: bool = option(
        False, "--allow-requantize", help="quantize what is quantized already, which loses more than from F16"
    )
    imatrix: str = option(
        "",
        "--imatrix",
        metavar="FILE",
        complete=files,
        help="importance matrix, ours or llama.cpp's; auto: measure one on -f",
    )
    method: str = option(
        "",
        "--method",
        metavar="NAME",
        read=one_of("awq", "gptq"),
        help="awq or gptq: fit the weights to the text of -f",
    )
    fit: int = option(
        0, "--fit", metavar="SIZE", read=size, help="instead of TYPE: the best mix in a file of this size (6GB, 700MiB)"
    )
    max_kld: float = option(
        0.0, "--max-kld", metavar="X", read=above(0), help="instead of TYPE: the smallest file with this KL divergence"
    )
    pure: bool = option(False, "--pure", help="the same format for all matrices")
    tensor_type: tuple[tuple[str, str], ...] = option(
        (),
        "--tensor-type",
        metavar="REGEX=FORMAT",
        read=pair("REGEX=FORMAT"),
        repeat=True,
        help="the format of tensors whose name matches; repeatable, the first that does counts",
    )
    output_tensor_type: str = option("", "--output-tensor-type", metavar="FORMAT", help="format of output.weight")
    token_embedding_type: str = option("", "--token-embedding-type", metavar="FORMAT", help="format of the embeddings")
    leave_output_tensor: bool = option(False, "--leave-output-tensor", help="keep output.weight as it is")
    report: bool = option(
        False, "--report", help="show the error of every tensor; with a text, perplexity before and after"
    )
    file: str = option("", "-f", "--file", metavar="FILE", complete=files, help="the text to measure on")
    test: str = option(
        "",
        "--test",
        metavar="FILE",
        complete=files,
        help="another text for perplexity and divergence",
        shown="that of -f",
    )
    chunks: int = option(
        0, "--chunks", metavar="N", read=whole(0), help="most windows; 0: all of the text", shown="all"
    )
    threads: int | None = option(
        None, "-t", "--threads", metavar="N", read=whole(1), help="CPU threads", shown="all processors"
    )


_TITLES = {
    "ModelName": "which model",
    "Opening": "opening a model",
    "Measuring": "opening a model to measure it",
    "Answering": "the answer",
    "Keeping": "keeping a conversation",
    "SamplerOptions": "sampling",
}


def title(group: type[Any]) -> str:
    """What a group of options is about."""
    return _TITLES.get(group.__name__, "options")


def declared(group: type[Any]) -> Iterator[tuple[str, Any, Declared]]:
    """(field, default, option) of a group."""
    if group is SamplerOptions:
        yield from sampling()
        return
    for each in fields(group):
        yield each.name, each.default, each.metadata["option"]
