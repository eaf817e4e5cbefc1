"""The option groups of the commands that measure, plan and create models: bench, cluster, perplexity, imatrix and
quantize.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain, product

from localllm.cli.options import PromptOptions, ShowOptions, path
from localllm.options import LoadOptions, OptionError, Options, RayOptions, group, option, same
from localllm.options.kinds import (
    LAYERS,
    PATH,
    SIZE,
    TEXT,
    Kind,
    above,
    integer,
    listed,
    one_of,
    optional,
    pair_of,
    several,
)
from localllm.options.load import CACHE_OPTIONS, CACHE_TYPE, FORCED, NEAREST_RULE

MOST_PIXELS = 50_000_000  # of a picture, as files have (`localllm.media.decode.MediaLimits`)
PICTURES = (".svg", ".png", ".html")
_list = partial(same, LoadOptions, metavar="N,...")  # bench measures every value of a list
_CACHE_TYPES = listed(CACHE_TYPE)


def _prompt_and_answer(text: str) -> tuple[int, int]:
    """Parse a llama-bench test: "512,128" is a prefill of 512 tokens and a decode of 128."""
    try:
        prompt, answer = (integer(1).read(part) for part in text.split(","))
    except (OptionError, ValueError):
        raise OptionError(f"{text!r} is not two whole numbers such as 512,128") from None
    return prompt, answer


def _picture_sizes(text: str) -> tuple[tuple[int, int], ...]:
    """Parse the sizes of pictures, such as "448x448,1920x1080"."""
    found = []
    for part in text.split(","):
        try:
            width, height = (integer(1).read(side) for side in part.lower().split("x"))
        except (OptionError, ValueError):
            raise OptionError(f"{part!r} is not a width and a height in pixels such as 1024x768") from None
        if width * height > MOST_PIXELS:
            raise OptionError(f"{part!r} has more than {MOST_PIXELS // 10**6} million pixels; give a smaller size")
        found.append((width, height))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class BenchOptions(Options):
    n_prompt: tuple[int, ...] = option(
        (512,), "-p", "--n-prompt", kind=listed(integer(0)), unit="tokens", shown="512",
        help="prompt tokens to evaluate (pp)",
    )  # fmt: skip
    n_gen: tuple[int, ...] = option(
        (128,), "-n", "--n-gen", kind=listed(integer(0)), unit="tokens", shown="128", help="tokens to decode (tg)"
    )
    pg: tuple[tuple[int, int], ...] = option(
        (), "-pg", kind=several(Kind(_prompt_and_answer, lambda value: "", "PP,TG")), repeat=True, unit="tokens",
        help="also time a prompt of PP tokens and the decoding of TG tokens together (repeatable)",
    )  # fmt: skip
    n_depth: tuple[int, ...] = option(
        (0,), "-d", "--n-depth", kind=listed(integer(0)), unit="tokens", shown="0", help="tokens already in the cache"
    )
    image: tuple[tuple[int, int], ...] = option(
        (), "--image", kind=several(Kind(_picture_sizes, lambda value: "", "WxH")), repeat=True,
        finish=lambda uses: tuple(dict.fromkeys(chain.from_iterable(uses))), unit="pixels",
        help="also time pictures of this size: preprocessing, encoding, first token, a second turn (repeatable)",
    )  # fmt: skip
    threads: tuple[int | None, ...] = _list("threads", default=(None,), kind=listed(optional(integer(1))))
    repetitions: int = option(5, "-r", "--repetitions", kind=integer(1), help="runs per test")
    output: str = option(
        "md", "-o", "--output", kind=one_of("md", "json", "jsonl", "csv", "sql"), metavar="KIND",
        help="output format: md, json, jsonl, csv or sql",
    )  # fmt: skip
    against: str = option(
        "", "--against", metavar="PROGRAM",
        help="alternate with llama-bench and show the ratio: a program on the PATH, or a path",
    )  # fmt: skip
    plot: str = path(
        "--plot", help="draw the results and the roofs of this machine: FILE.svg, .png or .html (needs matplotlib)"
    )
    compare: str = path("--compare", metavar="OLD", help="show the ratio to an older run saved with -o json or jsonl")
    gpu_layers: tuple[int | str, ...] = _list("gpu_layers", default=("auto",), kind=listed(LAYERS))
    cache_type_k: tuple[str, ...] = _list("cache_type_k", default=("f16",), kind=_CACHE_TYPES, metavar="TYPE,...")
    cache_type_v: tuple[str, ...] = _list("cache_type_v", default=("f16",), kind=_CACHE_TYPES, metavar="TYPE,...")
    load: LoadOptions = group(
        LoadOptions,
        without=("ctx_size", "threads", "gpu_layers", "cache_type_k", "cache_type_v", "force"),
    )
    force: bool = same(LoadOptions, "force", help=f"{FORCED} overwriting the --plot FILE, {NEAREST_RULE}")
    machines: RayOptions = group(RayOptions)
    no_warmup: bool = option(False, "--no-warmup", help="skip the warm-up run")
    verbose: bool = option(False, "-v", "--verbose", help="report on stderr what is not measured, and why")

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.plot and not self.plot.lower().endswith(PICTURES):
            raise OptionError(
                f"--plot {self.plot}: give a name that ends in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}"
            )
        if self.against and (self.plot or self.compare):
            raise OptionError("--against excludes --plot and --compare; plot a separate run")
        if self.against and self.image:
            raise OptionError("--against excludes --image, because llama-bench reads no pictures")
        if self.machines.ray and self.image:
            raise OptionError("--ray excludes --image, because the encoder is measured in one process")
        if self.load.mmproj and not self.image:
            raise OptionError("--mmproj needs --image WxH, the sizes of the pictures to measure")

    @property
    def speculates(self) -> bool:
        return self.load.speculation.asked

    @property
    def loads(self) -> list[LoadOptions]:
        """Return load options for every combination of the lists. The last list varies fastest."""
        names = ("gpu_layers", "cache_type_k", "cache_type_v")
        return [
            self.load.changed(dict(zip(names, values, strict=True)))
            for values in product(self.gpu_layers, self.cache_type_k, self.cache_type_v)
        ]


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A machine that the user describes. 0: as on this computer."""

    name: str
    memory: int = 0  # bytes
    bandwidth: float = 0.0  # bytes per second
    same: bool = False  # another stage on this computer


HERE, SAME, MOST_NODES = "here", "same", 8


def nodes_of(text: str) -> tuple[NodeSpec, ...]:
    """Parse a list of nodes such as "here,16GB,8GB@20GB/s"."""
    words = [word.strip() for word in text.split(",")]
    if len(words) > MOST_NODES:
        raise OptionError(f"{len(words)} nodes are given; at most {MOST_NODES} can be planned")
    found = []
    for number, word in enumerate(words, 1):
        memory, at, rate = word.partition("@")
        name = HERE if number == 1 else f"node {number}"
        if word == SAME and number > 1:
            found.append(NodeSpec(f"{SAME} {number}", same=True))
            continue
        try:
            bandwidth = float(SIZE.read(rate.removesuffix("/s"))) if at else 0.0
            found.append(NodeSpec(name, 0 if memory == HERE else SIZE.read(memory), bandwidth))
        except OptionError:
            form = "give here, same, a memory such as 16GB, or memory and bandwidth such as 16GB@20GB/s"
            raise OptionError(f"node {number} is {word!r}: {form}") from None
        if (memory != HERE and not found[-1].memory) or (at and not bandwidth):
            raise OptionError(f"node {number} is {word!r}: memory and bandwidth are above 0")
    return tuple(found)


def _checked_nodes(text: str) -> str:
    nodes_of(text)
    return text


def _rate(text: str) -> float:
    """Parse bytes per second, such as 100MB/s, or bits, such as 1Gbit/s."""
    number, bits, _ = text.removesuffix("/s").partition("bit")
    return float(SIZE.read(number)) / (8 if bits else 1)


@dataclass(frozen=True, slots=True)
class ClusterOptions(Options):
    words: tuple[str, ...] = option(
        (), kind=several(TEXT), argument=True, metavar="plan MODEL", offers="models",
        help="plan, and the model to forecast",
    )  # fmt: skip
    nodes: str = option(
        "here,here", "--nodes", kind=Kind(_checked_nodes, TEXT.problem, "SPEC"),
        help="up to 8 machines, this one first: here (one like this), same (another stage on this one), MEMORY, or "
        "MEMORY@BANDWIDTH, such as here,16GB@20GB/s",
    )  # fmt: skip
    delay: float = option(
        0.2, "--delay", kind=above(0), unit="milliseconds", help="time of a message from one machine to the next"
    )
    network: float = option(
        125e6, "--network", kind=Kind(_rate, lambda value: "", "RATE"), shown="1Gbit/s",
        help="bandwidth of the network, such as 1Gbit/s or 100MB/s",
    )  # fmt: skip
    prompt: int = option(512, "-p", "--prompt", kind=integer(1), unit="tokens", help="length of the prompt")
    load: LoadOptions = group(LoadOptions, only=("ctx_size", "threads", "mmproj", *CACHE_OPTIONS))
    json: bool = same(ShowOptions, "json")


@dataclass(frozen=True, slots=True)
class PerplexityOptions(Options):
    file: str = path("-f", "--file", help="the text (default: stdin)")
    chunks: int = option(
        0,
        "--chunks",
        kind=integer(0),
        unit="windows",
        shown="all",
        help="maximum number of windows (0: the whole text)",
    )
    ppl_stride: int = option(
        0, "--ppl-stride", kind=integer(0), unit="tokens", shown="off",
        help="start a window every N tokens and score only its last N (0: no overlap)",
    )  # fmt: skip
    kld: str = path("--kld", metavar="BASE", help="compare with a model, or with a file from --save-base or llama.cpp")
    save_base: str = path("--save-base", help="write log-probabilities in llama.cpp's --kl-divergence-base format")
    force: bool = same(LoadOptions, "force", help=f"{FORCED} overwriting the --save-base FILE, {NEAREST_RULE}")
    json: bool = same(ShowOptions, "json")


@dataclass(frozen=True, slots=True)
class ImatrixOptions(Options):
    file: str = same(PerplexityOptions, "file")
    output: str = option(
        "imatrix.gguf", "-o", "--output", kind=PATH, offers="files", help="output file (.dat: the older format)"
    )
    chunks: int = same(PerplexityOptions, "chunks")
    process_output: bool = option(False, "--process-output", help="include the output matrix")
    force: bool = same(LoadOptions, "force", help=f"{FORCED} overwriting FILE, {NEAREST_RULE}")


@dataclass(frozen=True, slots=True)
class QuantizeOptions(Options):
    words: tuple[str, ...] = same(
        PromptOptions, "words", metavar="IN [OUT] TYPE", offers="types",
        help="the input, the output, and the type to write",
    )  # fmt: skip
    mmproj: str = path(
        "--mmproj", metavar="OUT", help="write the encoders of pictures and sound in the folder IN to this mmproj file"
    )
    force: bool = same(LoadOptions, "force", help=f"{FORCED} overwriting OUT, {NEAREST_RULE}")
    dry_run: bool = option(False, "--dry-run", help="only show the new format of every tensor and the resulting size")
    allow_requantize: bool = option(
        False, "--allow-requantize", help="allow quantized input, which loses more than F16 input"
    )
    imatrix: str = path(
        "--imatrix", help="importance matrix from localllm or llama.cpp, or auto: measure one on the -f text"
    )
    method: str = option("", "--method", kind=one_of("awq", "gptq"), help="awq or gptq: fit the weights to the -f text")
    fit: int = option(
        0, "--fit", kind=SIZE, unit="bytes", shown="",
        help="instead of TYPE: the best mix for this file size (6GB, 700MiB)",
    )  # fmt: skip
    max_kld: float = option(
        0.0, "--max-kld", kind=above(0), shown="", help="instead of TYPE: the smallest file within this KL divergence"
    )
    pure: bool = option(False, "--pure", help="use one format for all matrices")
    tensor_type: tuple[tuple[str, str], ...] = option(
        (), "--tensor-type", kind=several(pair_of("REGEX=FORMAT")), repeat=True,
        help="format of tensors whose names match (repeatable; the first match is used)",
    )  # fmt: skip
    output_tensor_type: str = option("", "--output-tensor-type", metavar="FORMAT", help="format of output.weight")
    token_embedding_type: str = option("", "--token-embedding-type", metavar="FORMAT", help="format of the embeddings")
    leave_output_tensor: bool = option(False, "--leave-output-tensor", help="keep output.weight unchanged")
    report: bool = option(
        False, "--report", help="show the error of every tensor and, with a text, perplexity before and after"
    )
    file: str = same(PerplexityOptions, "file", help="text to measure on")
    test: str = path("--test", shown="the -f text", help="a separate text for perplexity and divergence")
    chunks: int = same(PerplexityOptions, "chunks")
    threads: int | None = same(LoadOptions, "threads")
