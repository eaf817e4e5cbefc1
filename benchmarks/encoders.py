"""Time encoders of pictures with true shapes and random weights, in turn with llama.cpp's (tools/mtmd).

    python benchmarks/encoders.py --shapes smolvlm qwen3vl-2b --sizes 448 1024 [--peer /tmp/oracle] [-t 2] [--rounds 3]
    python benchmarks/encoders.py --shapes gemma4-e4b --sizes 3840x2160 --flash-only --peer /tmp/oracle --rounds 1
    python benchmarks/encoders.py --turns --shapes qwen3vl-2b --sizes 448 [--peer /tmp/oracle] [--rounds 2]
    python benchmarks/encoders.py --table

`--peer` is a folder as ../shared/oracle/build.sh makes it, with libmtmd. Preprocessing and encoding are timed, from
pixels to embeddings, after a first picture that is not timed. Matrices are in F16 (`--format`: in Q8_0), and norms and
biases in F32, as llama.cpp's converter writes them. llama.cpp runs with flash attention and without, whose
scores need 17 GB for Qwen3-VL's largest picture (`--flash-only`). Speedups are over the faster of the two.

`--turns` measures both servers with a text model of true shape in Q4_K_M, each round in a new process: the time from a
request with a PNG to the first token, the same for a second turn about the same picture, and the peak memory. One JSON
line per shape, size and program goes to benchmarks/results/encoders.jsonl.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import subprocess
import sys
import tempfile
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
from benchmarks.encoder_files import SHAPES, write_files
from localllm.backends.cpu.backend import CpuBackend
from localllm.base.machine.memory import peak_memory
from localllm.engine.encoder import Encoder
from localllm.gguf import open_gguf
from localllm.media import EncoderInput, Projector, TextModel
from localllm.models.encoders import encoder_of


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
        self.process = self._child.pid

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
