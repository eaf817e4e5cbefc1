"""Run third-party load tools against localllm serve: servebench and llama-benchy from PyPI.

    python benchmarks/load_tools.py MODEL [-t 2] [--clients 1,4,8] [--input 256] [--output 64]
    [--servebench PATH] [--llama-benchy PATH]

Install each tool in a separate environment. Each runs against a separate server with one slot per client. The outputs
go to benchmarks/results/servebench.txt and llama_benchy.txt, after the command lines. Both tools count tokens by the
server's `usage`. llama-benchy cuts its prompts from a text with the model's tokenizer. This program supplies both: the
pages of docs/ as the text, and a tokenizer.json written from the GGUF, which must have byte-level BPE.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BOOK = "http://localhost/docs"  # never requested: the tool finds the text in its download cache
ERRORS = re.compile(r"Traceback|HTTP [45]\d\d|incomplete stream|Error|\bfailed: [1-9]")


@dataclass(frozen=True, slots=True)
class Tool:
    """A program, the path of its report, and its options for a server's address."""

    program: str
    result: str
    words: Sequence[str]
    home: Path


def write_tokenizer(model: str, folder: Path) -> None:
    """Write tokenizer.json for a model with byte-level BPE."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from localllm.gguf import open_gguf
    from localllm.loading.resolve import resolve

    with open_gguf(resolve(model)) as file:
        data = file.metadata
    kind = data["tokenizer.ggml.model"]
    if kind != "gpt2":
        raise SystemExit(f"{model}: its tokenizer is {kind}; this needs byte-level BPE (gpt2)")
    ids = {token: number for number, token in enumerate(data["tokenizer.ggml.tokens"])}
    merges = [(first, second) for first, _, second in (merge.partition(" ") for merge in data["tokenizer.ggml.merges"])]
    made = Tokenizer(models.BPE(ids, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))


def write_book(home: Path) -> None:
    """Put a text into llama-benchy's download cache."""
    cache = home / ".cache" / "llama-benchy"
    cache.mkdir(parents=True)
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    (cache / f"{hashlib.md5(BOOK.encode()).hexdigest()}.txt").write_text(text)


@contextmanager
def serving(words: Sequence[str], log: Path) -> Iterator[str]:
    """Context manager around a running server; yields its address."""
    with log.open("wb") as to:
        process = subprocess.Popen([sys.executable, "-m", "localllm", *words], cwd=ROOT, stdout=to, stderr=to)
    try:
        while not (found := re.search(r"listening on (http://\S+)", log.read_text())):
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
        yield found[1]
    finally:
        process.terminate()
        process.wait()


def run(tool: Tool, serve: Sequence[str]) -> bool:
    """Run a tool against a separate server and store its output. Return whether the output reports no error."""
    found = shutil.which(tool.program)
    if found is None:
        print(f"{tool.program} is not installed; give its path")
        return False
    with serving(serve, tool.home / "server.log") as url:
        environment = {**os.environ, "HOME": str(tool.home), "COLUMNS": "160", "HF_HUB_OFFLINE": "1"}
        words = [word.replace("URL", f"{url}/v1") for word in tool.words]
        done = subprocess.run([found, *words], env=environment, capture_output=True, text=True, cwd=tool.home)
    said = done.stdout + (done.stderr if done.returncode else "")
    shown = " ".join(tool.words).replace(str(tool.home), "HOME")
    top = f"localllm {' '.join(serve)}\n{Path(tool.program).name} {shown}\n\n"
    (RESULTS / tool.result).write_text(top + "\n".join(line.rstrip() for line in said.splitlines()) + "\n")
    told = (tool.home / "server.log").read_text()
    good = done.returncode == 0 and not ERRORS.search(said) and "Traceback" not in told
    print(f"{tool.program}: {'complete' if good else 'NOT COMPLETE'}; see {RESULTS / tool.result}")
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clients", default="1,4,8")
    parser.add_argument("--input", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--servebench", default="servebench")
    parser.add_argument("--llama-benchy", default="llama-benchy")
    arguments = parser.parse_args()
    clients, prompt, answer = arguments.clients.split(","), str(arguments.input), str(arguments.output)
    parallel = str(max(map(int, clients)))
    context = str(2 * (arguments.input + arguments.output) + 256)
    serve = ["serve", arguments.model, "--port", "0", "-t", str(arguments.threads), "-np", parallel, "-c", context]
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        write_tokenizer(arguments.model, Path(second))
        write_book(Path(second))
        name = Path(arguments.model).name.removesuffix(".gguf")
        tools = [
            Tool(arguments.servebench, "servebench.txt", (
                "run", "--url", "URL", "--model", name, "--concurrency", arguments.clients, "--input-len", prompt,
                "--output-len", answer, "--seed", "1", "--out", f"{first}/run.json",
            ), Path(first)),
            Tool(arguments.llama_benchy, "llama_benchy.txt", (
                "--base-url", "URL", "--model", name, "--tokenizer", second, "--book-url", BOOK, "--pp", prompt,
                "--tg", answer, "--exact-tg", "--concurrency", *clients, "--depth", "0", prompt,
                "--enable-prefix-caching", "--skip-coherence",
            ), Path(second)),
        ]  # fmt: skip
        results = [run(tool, serve) for tool in tools]
    raise SystemExit(not all(results))


if __name__ == "__main__":
    main()
