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
VALUES_HELP = "format of the values in the cache"
LAYERS_HELP = "layers on the GPU: the last N (the output counts as one), all, or auto (as many as fit)"
EXPERTS_HELP = "keep the experts of the first N layers on the CPU"
DEVICE_HELP = "which device: its number or part of its name (see localllm devices)"

# Speculation, for the commands that can use it.
DRAFT_MODEL = partial(
    option,
    "",
    "-md",
    "--model-draft",
    "--spec-draft-model",
    metavar="MODEL",
    help="a smaller model that drafts tokens",
    complete=models,
)
SPEC = partial(
    option, "", "--spec", metavar="KIND", read=one_of(*KINDS), shown="off; auto with -md",
    help="drafter: off, ngram (the text so far), draft (-md), or auto (whichever pays)",
)  # fmt: skip
DRAFT_MAX = partial(
    option,
    MOST_DRAFTED,
    "--draft-max",
    "--draft",
    "--draft-n",
    metavar="N",
    read=whole(1),
    help="maximum number of drafted tokens",
)


@dataclass(frozen=True, slots=True)
class ModelName:
    """MODEL or -m MODEL."""

    words: tuple[str, ...] = option(
        (), help="a GGUF file, or a built-in model (demo, draft)", metavar="MODEL", complete=models
    )
    model: str = option("", "-m", "--model", metavar="MODEL", help="same as MODEL", complete=models)


@dataclass(frozen=True, slots=True)
class Loading:
    """How to load a model."""

    ctx_size: int = option(
        0,
        "-c",
        "--ctx-size",
        "--ctx",
        metavar="N",
        read=whole(0),
        help="context size in tokens (0: as trained, maximum 4096)",
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
        """These options as arguments of `localllm.load`."""
        return {
            "backend": self.backend, "threads": self.threads, "ctx": self.ctx_size,
            "cache_type_k": self.cache_type_k, "cache_type_v": self.cache_type_v,
            "layers": self.gpu_layers, "host_experts": self.cpu_moe, "device": self.device,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Opening(Loading):
    """How to load a model that generates text."""

    model_draft: str = DRAFT_MODEL()
    spec: str = SPEC()
    draft_max: int = DRAFT_MAX()
    force: bool = option(
        False, "--force", help="allow a cache type that harms the model; with run, replace a saved --prompt-cache"
    )

    def of_load(self) -> dict[str, Any]:
        speculation = {"draft": self.model_draft, "speculate": self.spec or None, "draft_max": self.draft_max}
        return Loading.of_load(self) | speculation | {"force": self.force}


@dataclass(frozen=True, slots=True)
class Measuring(Loading):
    """How to load a model to measure it on a text."""

    ctx_size: int = option(512, "-c", "--ctx-size", "--ctx", metavar="N", read=whole(4), help="window size in tokens")

    def of_load(self) -> dict[str, Any]:
        return Loading.of_load(self) | {"force": True}  # harmful types may be measured


@dataclass(frozen=True, slots=True)
class Answering:
    """Options of an answer, except sampling."""

    predict: int = option(
        -1, "-n", "--predict", "--n-predict", metavar="N", read=whole(-2), help="maximum answer length (-1: no limit)"
    )
    system_prompt: str = option(
        "", "-sys", "--system-prompt", metavar="TEXT", help="instructions before the conversation"
    )
    stop: tuple[str, ...] = option(
        (), "-r", "--reverse-prompt", metavar="TEXT", repeat=True, help="stop the answer before this text (repeatable)"
    )
    ignore_eos: bool = option(False, "--ignore-eos", help="continue past the end-of-text token")
    parse_special_in_content: bool = option(
        False, "--parse-special-in-content", help="read control tokens in messages (unsafe)"
    )

    @property
    def max_tokens(self) -> int | None:
        return self.predict if self.predict >= 0 else None


@dataclass(frozen=True, slots=True)
class Keeping:
    """How to keep a conversation in a file."""

    prompt_cache: str = option(
        "",
        "--prompt-cache",
        metavar="FILE",
        complete=files,
        help="load text and cache from FILE, and save them there at the end",
    )
    prompt_cache_ro: bool = option(False, "--prompt-cache-ro", help="do not write the --prompt-cache file")


@dataclass(frozen=True, slots=True)
class Chat:
    context_shift: bool = option(
        False, "--context-shift", help="drop the oldest turns when the context is full (default: you choose)"
    )
    no_stats: bool = option(False, "--no-stats", help="show no statistics after answers")


@dataclass(frozen=True, slots=True)
class Run:
    words: tuple[str, ...] = option((), help="the model and the prompt", metavar="MODEL [PROMPT]", complete=models)
    model: str = option("", "-m", "--model", metavar="MODEL", help="same as MODEL", complete=models)
    prompt: str = option("", "-p", "--prompt", metavar="TEXT", help="same as PROMPT")
    file: str = option("", "-f", "--file", metavar="FILE", complete=files, help="read the prompt from a file")
    raw: bool = option(False, "--raw", help="continue the prompt as plain text, without a chat template")
    stats: bool = option(False, "-v", "--stats", help="show statistics on stderr at the end")
    prompt_cache_all: bool = option(False, "--prompt-cache-all", help="save the answer in the prompt cache too")


@dataclass(frozen=True, slots=True)
class Show:
    ctx_size: int = option(
        0,
        "-c",
        "--ctx-size",
        "--ctx",
        metavar="N",
        read=whole(0),
        help="context size for the memory plan (0: same as chat)",
    )
    cache_type_k: str = option("f16", "-ctk", "--cache-type-k", metavar="TYPE", help=KEYS_HELP, complete=cache_types)
    cache_type_v: str = option("f16", "-ctv", "--cache-type-v", metavar="TYPE", help=VALUES_HELP, complete=cache_types)
    tensors: bool = option(False, "--tensors", help="list every tensor")
    formats: bool = option(False, "--formats", help="list the supported weight formats (no MODEL)")
    archs: bool = option(False, "--archs", help="list the supported architectures (no MODEL)")
    json: bool = option(False, "--json", help="print everything as JSON")


@dataclass(frozen=True, slots=True)
class Devices:
    json: bool = option(False, "--json", help="print everything as JSON")


@dataclass(frozen=True, slots=True)
class Bench:
    prompts: tuple[int, ...] = option(
        (512,), "-p", "--n-prompt", metavar="N,...", read=wholes(0), help="prompt tokens to evaluate (pp)", shown="512"
    )
    answers: tuple[int, ...] = option(
        (128,), "-n", "--n-gen", metavar="N,...", read=wholes(0), help="tokens to decode (tg)", shown="128"
    )
    depths: tuple[int, ...] = option(
        (0,), "-d", "--n-depth", metavar="N,...", read=wholes(0), help="tokens already in the cache", shown="0"
    )
    threads: tuple[int | None, ...] = option(
        (None,), "-t", "--threads", metavar="N,...", read=wholes(1), help="CPU threads", shown="all processors"
    )
    repetitions: int = option(5, "-r", "--repetitions", metavar="N", read=whole(1), help="runs per test")
    output: str = option(
        "md", "-o", "--output", metavar="KIND", read=one_of("md", "json", "csv"), help="output format: md, json or csv"
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
    no_warmup: bool = option(False, "--no-warmup", help="skip the warm-up run")

    @property
    def speculates(self) -> bool:
        return (self.spec or ("auto" if self.model_draft else "off")) != "off"

    def of_load(self) -> dict[str, Any]:
        """These options as arguments of `localllm.load`, except those that a test sets."""
        return {
            "backend": self.backend, "cache_type_k": self.cache_type_k, "cache_type_v": self.cache_type_v,
            "layers": self.gpu_layers, "host_experts": self.cpu_moe, "device": self.device,
            "draft": self.model_draft, "speculate": self.spec or None, "draft_max": self.draft_max,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Perplexity:
    file: str = option("", "-f", "--file", metavar="FILE", complete=files, help="the text (default: stdin)")
    chunks: int = option(
        0, "--chunks", metavar="N", read=whole(0), help="maximum number of windows (0: the whole text)", shown="all"
    )
    kld: str = option(
        "",
        "--kld",
        metavar="BASE",
        complete=files,
        help="compare with a model, or with a file from --save-base or llama.cpp",
    )
    save_base: str = option(
        "",
        "--save-base",
        metavar="FILE",
        complete=files,
        help="write log-probabilities in llama.cpp's --kl-divergence-base format",
    )
    force: bool = option(False, "--force", help="overwrite the --save-base FILE")
    json: bool = option(False, "--json", help="print everything as JSON")


@dataclass(frozen=True, slots=True)
class Imatrix:
    file: str = option("", "-f", "--file", metavar="FILE", complete=files, help="the text (default: stdin)")
    output: str = option(
        "imatrix.gguf",
        "-o",
        "--output",
        metavar="FILE",
        complete=files,
        help="output file (.dat: the older format)",
    )
    chunks: int = option(
        0, "--chunks", metavar="N", read=whole(0), help="maximum number of windows (0: the whole text)", shown="all"
    )
    process_output: bool = option(False, "--process-output", help="include the output matrix")
    force: bool = option(False, "--force", help="overwrite FILE")


@dataclass(frozen=True, slots=True)
class Quantize:
    words: tuple[str, ...] = option(
        (), help="the input, the output, and the type to write", metavar="IN [OUT] TYPE", complete=types
    )
    force: bool = option(False, "--force", help="overwrite OUT")
    dry_run: bool = option(False, "--dry-run", help="show what every tensor would become, and the size; write nothing")
    allow_requantize: bool = option(
        False, "--allow-requantize", help="allow quantized input, which loses more than F16 input"
    )
    imatrix: str = option(
        "",
        "--imatrix",
        metavar="FILE",
        complete=files,
        help="importance matrix (ours or llama.cpp's), or auto: measure one on -f",
    )
    method: str = option(
        "",
        "--method",
        metavar="NAME",
        read=one_of("awq", "gptq"),
        help="awq or gptq: fit the weights to the text of -f",
    )
    fit: int = option(
        0, "--fit", metavar="SIZE", read=size, help="instead of TYPE: the best mix for this file size (6GB, 700MiB)"
    )
    max_kld: float = option(
        0.0, "--max-kld", metavar="X", read=above(0), help="instead of TYPE: the smallest file with this KL divergence"
    )
    pure: bool = option(False, "--pure", help="use one format for all matrices")
    tensor_type: tuple[tuple[str, str], ...] = option(
        (),
        "--tensor-type",
        metavar="REGEX=FORMAT",
        read=pair("REGEX=FORMAT"),
        repeat=True,
        help="format of tensors whose names match (repeatable; the first match counts)",
    )
    output_tensor_type: str = option("", "--output-tensor-type", metavar="FORMAT", help="format of output.weight")
    token_embedding_type: str = option("", "--token-embedding-type", metavar="FORMAT", help="format of the embeddings")
    leave_output_tensor: bool = option(False, "--leave-output-tensor", help="keep output.weight unchanged")
    report: bool = option(
        False, "--report", help="show the error of every tensor and, with a text, perplexity before and after"
    )
    file: str = option("", "-f", "--file", metavar="FILE", complete=files, help="text to measure on")
    test: str = option(
        "",
        "--test",
        metavar="FILE",
        complete=files,
        help="another text for perplexity and divergence",
        shown="that of -f",
    )
    chunks: int = option(
        0, "--chunks", metavar="N", read=whole(0), help="maximum number of windows (0: the whole text)", shown="all"
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
    """(field, default, option) for each option of a group."""
    if group is SamplerOptions:
        yield from sampling()
        return
    for each in fields(group):
        yield each.name, each.default, each.metadata["option"]
