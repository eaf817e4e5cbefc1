"""Time encoders of pictures with true shapes and random weights, in turn with llama.cpp's (tools/mtmd).

    python benchmarks/encoders.py --shapes smolvlm qwen3vl-2b --sizes 448 1024 [--peer /tmp/oracle] [-t 2] [--rounds 3]
    python benchmarks/encoders.py --shapes gemma4-e4b --sizes 3840x2160 --flash-only --peer /tmp/oracle --rounds 1
    python benchmarks/encoders.py --turns --shapes qwen3vl-2b --sizes 448 [--peer /tmp/oracle] [--rounds 2]
    python benchmarks/encoders.py --table

`--peer` is a folder as ../shared/oracle/build.sh makes it, with libmtmd. Preprocessing and encoding are timed, from
pixels to embeddings, after a first picture that is not timed. Formats are those of llama.cpp's converter: matrices in
F16 or, with `--format Q8_0`, in Q8_0; norms and biases in F32. llama.cpp runs with flash attention and without, whose
scores need 17 GB for Qwen3-VL's largest picture (`--flash-only`).
Speedups are over the faster of the two. `--turns` measures both servers with a text model of true shape in Q4_K_M, each
round in a new process: the time from a request with a PNG to the first token, the same for a second turn about the same
picture, and the peak memory. One JSON line per shape, size and program goes to
benchmarks/results/encoders.jsonl.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import httpx
import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import shapes
from benchmarks.compare import RESULTS, machine
from localllm.backends.cpu.backend import CpuBackend
from localllm.base.machine.memory import peak_memory
from localllm.engine.encoder import Encoder
from localllm.gguf import NewTensor, open_gguf, write_gguf
from localllm.media import EncoderInput, Projector, TextModel
from localllm.models.encoders import encoder_of
from localllm.quant import quantize

HALF = ("patch_embd", "attn", "ffn", "fc", "mm.", "projection")  # names of tensors in F16, unless they are biases
BOUNDS = {"input_min": -8.0, "input_max": 8.0, "output_min": -8.0, "output_max": 8.0}
MARKERS = ("<unk>", "<s>", "</s>", "<|vision_start|>", "<|vision_end|>", "<fake_token_around_image>", "<global-img>")


@dataclass(frozen=True, slots=True)
class Shape:
    """An encoder: its projector type, sizes, and the width of the text model."""

    projector: str
    layers: int
    width: int
    ffn: int
    heads: int
    patch: int
    image: int
    text: int
    keys: dict[str, Any]
    deep: tuple[int, ...] = ()  # layers whose outputs are projected, too
    exact: tuple[str, ...] = ("position",)  # parts of the names of matrices that the converter writes in F32
    vocabulary: str = "qwen2"  # of the files ggml-vocab-*.gguf in llama.cpp's folder `models`, for --turns

    @property
    def architecture(self) -> str:
        return "qwen3vl" if self.projector == "qwen3vl_merger" else "llama"


# Sizes from published configurations: classes of transformers 5.24 (Qwen3VLVisionConfig is the encoder of 8B,
# Gemma4VisionConfig that of the E models, which also clip the inputs and outputs of their products). The 2B's encoder
# is SigLIP 2's large one, SmolVLM2 500M's is SigLIP's base one with 512 pixels.
QWEN = {"clip.vision.spatial_merge_size": 2, "clip.use_gelu": True}
SHAPES = {
    "smolvlm": Shape(
        "idefics3", 12, 768, 3072, 12, 16, 512, 960,
        {"clip.vision.projector.scale_factor": 4, "clip.vision.preproc_image_size": 2048, "clip.use_gelu": True},
        exact=("position", "patch_embd"), vocabulary="llama-bpe",
    ),
    "qwen3vl-2b": Shape("qwen3vl_merger", 24, 1024, 4096, 16, 16, 768, 2048, QWEN, (5, 11, 17)),
    "gemma3-4b": Shape("gemma3", 27, 1152, 4304, 16, 14, 896, 2560, {}, vocabulary="gemma-4"),
    "gemma4-e4b": Shape("gemma4v", 16, 768, 3072, 12, 16, 224, 2560, {}, vocabulary="gemma-4"),
    "qwen3vl-8b": Shape("qwen3vl_merger", 27, 1152, 4304, 16, 16, 768, 4096, QWEN, (8, 16, 24)),
}  # fmt: skip


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the tensors of an mmproj file."""
    width, ffn, text = shape.width, shape.ffn, shape.text
    qwen = shape.projector == "qwen3vl_merger"
    kernel = (width, 3, shape.patch, shape.patch)
    if shape.projector == "gemma4v":
        yield from gemma4_tensors(shape, kernel)
        return
    yield from [("v.patch_embd.weight", kernel), ("v.patch_embd.bias", (width,))]
    if qwen:
        yield "v.patch_embd.weight.1", kernel
    yield "v.position_embd.weight", ((shape.image // shape.patch) ** 2, width)
    for n in range(shape.layers):
        products = {"attn_out": (width, width), "ffn_up": (ffn, width), "ffn_down": (width, ffn)}
        products |= (
            {"attn_qkv": (3 * width, width)} if qwen else dict.fromkeys(("attn_q", "attn_k", "attn_v"), (width,) * 2)
        )
        for name, size in products.items():
            yield from [(f"v.blk.{n}.{name}.weight", size), (f"v.blk.{n}.{name}.bias", size[:1])]
        for name in ("ln1", "ln2"):
            yield from [(f"v.blk.{n}.{name}.weight", (width,)), (f"v.blk.{n}.{name}.bias", (width,))]
    yield from [("v.post_ln.weight", (width,)), ("v.post_ln.bias", (width,))]
    if shape.projector == "gemma3":
        yield from [("mm.soft_emb_norm.weight", (width,)), ("mm.input_projection.weight", (width, text))]
        return
    if not qwen:
        yield "mm.model.fc.weight", (text, width * shape.keys["clip.vision.projector.scale_factor"] ** 2)
        return
    cell = 4 * width
    for n in shape.deep:
        at = f"v.deepstack.{n}"
        yield from [(f"{at}.norm.weight", (cell,)), (f"{at}.norm.bias", (cell,))]
        yield from [(f"{at}.fc1.weight", (cell, cell)), (f"{at}.fc1.bias", (cell,))]
        yield from [(f"{at}.fc2.weight", (text, cell)), (f"{at}.fc2.bias", (text,))]
    yield from [
        ("mm.0.weight", (cell, cell)),
        ("mm.0.bias", (cell,)),
        ("mm.2.weight", (text, cell)),
        ("mm.2.bias", (text,)),
    ]


def gemma4_tensors(shape: Shape, kernel: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, ffn = shape.width, shape.ffn
    yield from [("v.patch_embd.weight", kernel), ("v.position_embd.weight", (2, 10240, width))]
    for n in range(shape.layers):
        products = {"attn_q": (width, width), "attn_k": (width, width), "attn_v": (width, width)}
        products |= {"attn_out": (width, width), "ffn_up": (ffn, width), "ffn_gate": (ffn, width)}
        for name, size in (products | {"ffn_down": (width, ffn)}).items():
            yield f"v.blk.{n}.{name}.weight", size
            yield from [(f"v.blk.{n}.{name}.{bound}", (1,)) for bound in BOUNDS]
        for name in ("ln1", "ln2", "attn_post_norm", "ffn_post_norm"):
            yield f"v.blk.{n}.{name}.weight", (width,)
        for name in ("attn_q_norm", "attn_k_norm"):
            yield f"v.blk.{n}.{name}.weight", (width // shape.heads,)
    yield "mm.input_projection.weight", (shape.text, width)


def new_tensor(
    name: str, size: tuple[int, ...], random: np.random.Generator, exact: tuple[str, ...] = (), format: str = "F16"
) -> NewTensor:
    """Return random values, scaled so that the outputs of products have about the size of their inputs."""
    bound = BOUNDS.get(name.rpartition(".")[2])
    if bound is not None:
        values = np.full(size, bound, np.float32)
    elif len(size) > 1:
        values = random.standard_normal(size, np.float32) / np.float32(np.sqrt(np.prod(size[1:])))
    else:
        values = 0.1 * random.standard_normal(size, np.float32) + np.float32(name.endswith("weight"))
    half = len(size) > 1 and any(part in name for part in HALF) and not any(part in name for part in exact)
    if half and format == "Q8_0" and size[-1] % 32 == 0 and len(size) == 2:
        return NewTensor(name, format, size, quantize(values, format))
    data = values.astype(np.float16) if half else values.astype(np.float32)
    return NewTensor(name, "F16" if half else "F32", size, data.reshape(-1).view(np.uint8))


def write_files(name: str, folder: Path, format: str = "F16") -> tuple[Path, Path]:
    """Write the mmproj file and the small text model without which llama.cpp does not load it."""
    shape, random = SHAPES[name], np.random.default_rng(1)
    ending = "mmproj" if format == "F16" else f"mmproj-{format}"
    exact = shape.exact if format == "F16" else (*shape.exact, "patch_embd")
    projector, text = folder / f"{name}-{ending}.gguf", folder / f"{name}-text.gguf"
    if not projector.exists():
        sizes = {
            "image_size": shape.image, "patch_size": shape.patch, "embedding_length": shape.width,
            "feed_forward_length": shape.ffn, "block_count": shape.layers, "attention.head_count": shape.heads,
            "attention.layer_norm_epsilon": 1e-6, "projection_dim": shape.text,
        }  # fmt: skip
        mean = 0.0 if shape.projector == "gemma4v" else 0.5
        metadata = {
            "general.architecture": "clip", "clip.has_vision_encoder": True, "clip.projector_type": shape.projector,
            "clip.vision.image_mean": np.full(3, mean, np.float32),
            "clip.vision.image_std": np.full(3, 1.0 - mean, np.float32),
        } | {f"clip.vision.{key}": value for key, value in sizes.items()} | shape.keys  # fmt: skip
        if shape.deep:
            deep = np.isin(np.arange(shape.layers), shape.deep)
            metadata["clip.vision.is_deepstack_layers"] = deep
        write_gguf(projector, metadata, [new_tensor(*each, random, exact, format) for each in tensors(shape)])
    if not text.exists():
        write_text(shape, text, random)
    return projector, text


def write_text(shape: Shape, path: Path, random: np.random.Generator) -> None:
    a, width, layers = shape.architecture, shape.text, max(len(shape.deep), 1)
    tokens = [*MARKERS, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [f"<unused{n}>" for n in range(512 - len(tokens))]
    kinds = np.array([2, 3, 3, *[3] * (len(MARKERS) - 3), *[6] * 256, *[5] * (512 - len(MARKERS) - 256)], np.int32)
    metadata: dict[str, Any] = {
        "general.architecture": a, f"{a}.vocab_size": 512, f"{a}.context_length": 8192, f"{a}.embedding_length": width,
        f"{a}.block_count": layers, f"{a}.feed_forward_length": 64, f"{a}.attention.head_count": 2,
        f"{a}.attention.head_count_kv": 2, f"{a}.attention.key_length": 16, f"{a}.attention.value_length": 16,
        f"{a}.rope.dimension_count": 16, f"{a}.attention.layer_norm_rms_epsilon": 1e-6, f"{a}.rope.freq_base": 1e4,
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(512, np.float32), "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    sizes: dict[str, tuple[int, ...]] = {"token_embd.weight": (512, width), "output_norm.weight": (width,)}
    for n in range(layers):
        sizes |= {
            f"blk.{n}.attn_norm.weight": (width,), f"blk.{n}.attn_q.weight": (32, width),
            f"blk.{n}.attn_k.weight": (32, width), f"blk.{n}.attn_v.weight": (32, width),
            f"blk.{n}.attn_output.weight": (width, 32), f"blk.{n}.ffn_norm.weight": (width,),
            f"blk.{n}.ffn_gate.weight": (64, width), f"blk.{n}.ffn_up.weight": (64, width),
            f"blk.{n}.ffn_down.weight": (width, 64),
        }  # fmt: skip
        if a == "qwen3vl":
            sizes |= {f"blk.{n}.attn_q_norm.weight": (16,), f"blk.{n}.attn_k_norm.weight": (16,)}
    if a == "qwen3vl":
        metadata |= {
            "qwen3vl.rope.dimension_sections": np.array([4, 2, 2, 0], np.int32),
            "qwen3vl.n_deepstack_layers": len(shape.deep),
        }
    write_gguf(path, metadata, [new_tensor(*each, random) for each in sizes.items()])


class Ours:
    """The encoder of this checkout, in this process."""

    def __init__(self, name: str, path: Path, threads: int) -> None:
        file = open_gguf(path)
        self.projector = Projector.of(file, TextModel(SHAPES[name].text, SHAPES[name].architecture == "qwen3vl"))
        self.backend = CpuBackend(threads)
        self.encoder = Encoder(self.backend, encoder_of(file.metadata, file.tensors, "vision"))

    def encode(self, pixels: np.ndarray) -> tuple[int, float, float, int]:
        """Return tokens, seconds of preprocessing and of encoding, and the largest resident size in KiB."""
        began = perf_counter()
        pieces = [part for part in self.projector.picture([pixels]) if isinstance(part, EncoderInput)]
        prepared = perf_counter()
        tokens = sum(len(self.encoder.encode(piece.tensors, piece.flags.numbers)) for piece in pieces)
        return tokens, prepared - began, perf_counter() - prepared, peak_memory() >> 10


class Peer:
    """llama.cpp's encoder, in a separate process."""

    def __init__(self, program: Path, projector: Path, text: Path, threads: int, flash: bool) -> None:
        command = [str(program), str(projector), str(text), str(threads), str(int(flash))]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def encode(self, pixels: np.ndarray) -> tuple[int, float, float, int]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with tempfile.NamedTemporaryFile() as file:
            file.write(pixels.tobytes())
            file.flush()
            self._child.stdin.write(f"{pixels.shape[1]} {pixels.shape[0]} {file.name}\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline().split()
        assert len(line) == 4, "llama.cpp failed"
        return int(line[0]), float(line[1]), float(line[2]), int(line[3])


def build(folder: Path, out: Path) -> Path:
    """Compile mtmd_time.cpp against the llama.cpp in this folder."""
    source, program = folder / "llama", out / "mtmd_time"
    include = [f"-I{source / each}" for each in ("tools/mtmd", "ggml/include", "include")]
    libraries = [f"-L{folder}/build/bin", *(f"-l{each}" for each in ("mtmd", "llama", "ggml", "ggml-base", "ggml-cpu"))]
    here = Path(__file__).with_suffix("").parent / "mtmd_time.cpp"
    run = f"-Wl,-rpath,{folder}/build/bin"
    subprocess.run(
        ["g++", "-std=c++17", "-O2", "-w", "-DLLAMA_SHARED", *include, here, "-o", program, *libraries, run], check=True
    )
    return program


def picture(size: str) -> np.ndarray:
    """Return a picture with structure of a size like "448x336", or "448" for a square: (height, width, 3) uint8."""
    width, height = (int(part) for part in (size if "x" in size else f"{size}x{size}").split("x"))
    y, x = np.mgrid[:height, :width]
    noise = np.random.default_rng(2).integers(0, 64, (height, width, 3))
    shades = np.stack([x * 255 // width, y * 255 // height, (x ^ y) & 255], -1)
    return (shades * 3 // 4 + noise).clip(0, 255).astype(np.uint8)


def measure(name: str, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    projector, text = write_files(name, folder, arguments.format)
    programs: dict[str, Ours | Peer] = {"localllm": Ours(name, projector, arguments.threads)}
    if arguments.peer:
        program = build(arguments.peer, folder)
        ways = {"llama.cpp": False, "llama.cpp, flash attention": True}
        for label in list(ways)[arguments.flash_only :]:
            flash = ways[label]
            programs[label] = Peer(program, projector, text, arguments.threads, flash)
    rows = []
    for each in programs.values():
        each.encode(picture("256x64"))
    for size in arguments.sizes:
        pixels, seen = picture(size), {label: [] for label in programs}
        for _ in range(arguments.rounds):
            for label, each in programs.items():
                seen[label].append(each.encode(pixels))
        for label, runs in seen.items():
            rows.append({
                "when": datetime.now(UTC).isoformat(timespec="seconds"), "shape": label_of(name, arguments.format),
                "program": label, "size": size,
                "threads": arguments.threads, "tokens": runs[0][0], "preprocess_s": median(run[1] for run in runs),
                "encode_s": median(run[2] for run in runs), "encode_all_s": [run[2] for run in runs],
                "peak_mib": runs[-1][3] >> 10, "machine": machine(),
            })  # fmt: skip
    return rows


def turns(name: str, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measure the turns of both servers with a text model of true shape."""
    from benchmarks.serve import free_port, peak_bytes, server

    projector, text = write_files(name, folder, arguments.format)[0], folder / f"{name}-Q4_K_M.gguf"
    if not text.exists():
        vocab = arguments.vocab
        if vocab is None and arguments.peer:
            vocab = arguments.peer / "llama" / "models" / f"ggml-vocab-{SHAPES[name].vocabulary}.gguf"
        shapes.write(name, shapes.MODELS[name], text, vocab=vocab)
    port, context = free_port(), "8192"
    both = ["-m", str(text), "--mmproj", str(projector), "--port", str(port), "-t", str(arguments.threads)]
    commands = {"localllm": [sys.executable, "-m", "localllm", "serve", *both, "-c", context, "--spec", "off"]}
    if arguments.peer:
        program = arguments.peer / "build" / "bin" / "llama-server"
        commands["llama.cpp"] = [str(program), *both, "-c", context, "-np", "1", "--no-webui"]
    rows = []
    for size in arguments.sizes:
        seen: dict[str, list[tuple[float, float, int]]] = {label: [] for label in commands}
        for _ in range(arguments.rounds):
            for label, command in commands.items():
                with server(command, port) as process:
                    seen[label].append((*two_turns(f"http://127.0.0.1:{port}", size), peak_bytes(process.pid)))
        for label, runs in seen.items():
            rows.append({
                "when": datetime.now(UTC).isoformat(timespec="seconds"), "shape": label_of(name, arguments.format),
                "program": label, "size": size,
                "threads": arguments.threads, "first_token_s": median(run[0] for run in runs),
                "second_turn_s": median(run[1] for run in runs), "rounds": arguments.rounds,
                "peak_mib": max(run[2] for run in runs) >> 20, "machine": machine(),
            })  # fmt: skip
    return rows


def two_turns(url: str, size: str) -> tuple[float, float]:
    """Return the seconds to the first token of two turns about a picture, after a request of text to warm up."""
    data = io.BytesIO()
    Image.fromarray(picture(size)).save(data, "PNG", compress_level=1)
    marker = httpx.get(f"{url}/props").json().get("media_marker", "<__media__>")  # random in llama-server
    png, text, times = base64.b64encode(data.getvalue()).decode(), f"Here is {marker} a picture. What is it?", []

    def ask(prompt: Any) -> str:
        body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
        began = perf_counter()
        answer = httpx.post(f"{url}/completion", json=body, timeout=3600)
        times.append(perf_counter() - began)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["content"])

    ask("Hello there")
    for _ in range(2):
        said = ask({"prompt_string": text, "multimodal_data": [png]})
        text += f"{said} And what is that over there, to the left of it?"
    return times[1], times[2]


def label_of(name: str, format: str) -> str:
    return name if format == "F16" else f"{name}, {format}"


def sides(size: str | int) -> str:
    """Return a size in words; old rows have the side of a square as a number."""
    width, _, height = str(size).partition("x")
    return f"{width} x {height or width}"


def turn_table(rows: list[dict[str, Any]]) -> str:
    """Return the Markdown for docs/media.md: the newest turns of each shape, size and program."""
    newest = {(row["shape"], str(row["size"]), row["program"]): row for row in rows if "second_turn_s" in row}
    lines = [
        "| shape | picture | program | first token (s) | second turn (s) | peak (MiB) |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for (shape, size, program), row in newest.items():
        lines.append(
            f"| {shape} | {sides(size)} | {program} | {row['first_token_s']:.2f} | {row['second_turn_s']:.2f} "
            f"| {row['peak_mib']} |"
        )
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the Markdown for docs/media.md: the newest row of each shape, size and program."""
    newest = {(row["shape"], str(row["size"]), row["program"]): row for row in rows if "encode_s" in row}
    lines = [
        "| shape | picture | tokens | program | preprocess (s) | encode (s) | speedup | peak (MiB) |",
        "|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    for (shape, size, program), row in newest.items():
        peers = [r["encode_s"] for (s, z, p), r in newest.items() if (s, z) == (shape, size) and p != "localllm"]
        ratio = f"{min(peers) / row['encode_s']:.2f}x" if peers and program == "localllm" else ""
        lines.append(
            f"| {shape} | {sides(size)} | {row['tokens']} | {program} | {row['preprocess_s']:.3f} "
            f"| {row['encode_s']:.2f} | {ratio} | {row['peak_mib']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--sizes", nargs="+", default=["448", "1024"], help="sides of squares, or WIDTHxHEIGHT")
    parser.add_argument("--peer", type=Path, help="a folder with llama.cpp's source and build")
    parser.add_argument("--flash-only", action="store_true", help="run llama.cpp with flash attention only")
    parser.add_argument("--format", default="F16", choices=("F16", "Q8_0"), help="of the encoder's matrices")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "encoders")
    parser.add_argument("--out", type=Path, default=RESULTS / "encoders.jsonl")
    parser.add_argument("--vocab", type=Path, help="a GGUF with a tokenizer for --turns; default: the peer's")
    parser.add_argument("--turns", action="store_true", help="measure servers with true text models, not the encoders")
    parser.add_argument("--table", action="store_true", help="print the stored results and measure nothing")
    arguments = parser.parse_args()
    if arguments.table:
        rows = [json.loads(line) for line in arguments.out.read_text().splitlines()]
        print(table(rows), turn_table(rows), sep="\n\n")
        return
    arguments.folder.mkdir(exist_ok=True)
    for name in arguments.shapes:
        rows = (turns if arguments.turns else measure)(name, arguments, arguments.folder)
        with arguments.out.open("a") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
        print((turn_table if arguments.turns else table)(rows))


if __name__ == "__main__":
    main()
