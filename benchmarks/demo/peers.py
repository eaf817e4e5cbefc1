"""Print the results of llama.cpp's tools for the bundled models. Tests compare localllm with these results.

    python benchmarks/demo/peers.py FOLDER     (which holds llama-quantize, llama-perplexity and llama-imatrix)

For a new model, enter the results into tests/localllm/quantize/test_conversion.py,
tests/localllm/evaluation/test_likelihood.py and tests/localllm/quantize/calibration/test_imatrix.py. `--write` updates
the first and the last file.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from localllm.quantize.calibration.imatrix import read_imatrix  # noqa: E402
from tests.localllm.quantize import test_conversion  # noqa: E402
from tests.localllm.quantize.calibration import test_imatrix  # noqa: E402

TARGET, DRAFT = (ROOT / "models" / "demo" / name for name in ("demo.gguf", "draft.gguf"))
TEXT = ROOT / "benchmarks" / "demo" / "smalltalk.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument("--write", action="store_true", help="write digests and sums into the tests")
    asked = parser.parse_args()

    def run(tool: str, *words: str | Path) -> str:
        return subprocess.run([asked.tools / tool, *words], check=True, capture_output=True, text=True).stdout

    with tempfile.TemporaryDirectory() as folder:
        out, base, matrix = (Path(folder) / name for name in ("out.gguf", "base.kld", "imatrix.gguf"))
        lines = {}
        for table, pure in ((test_conversion.LLAMA_QUANTIZE, []), (test_conversion.PURE, ["--pure"])):
            for kind in table:
                run("llama-quantize", "--allow-requantize", *pure, TARGET, out, kind)
                lines[kind] = f'"{kind}": "{hashlib.sha256(out.read_bytes()).hexdigest()[:16]}"'
        run("llama-perplexity", "-m", TARGET, "-f", TEXT, "-c", "128", "--kl-divergence-base", base)
        words: list[str | Path] = [
            "-m",
            DRAFT,
            "-f",
            TEXT,
            "-c",
            "128",
            "--kl-divergence-base",
            base,
            "--kl-divergence",
        ]
        compared = ""
        # retry, because llama-perplexity sometimes loses its last lines
        while "Same top p" not in compared[compared.find("Minimum KLD") :]:
            compared = run("llama-perplexity", *words)
        run("llama-imatrix", "-m", TARGET, "-f", TEXT, "-c", "128", "--chunks", "8", "-o", matrix)
        found = read_imatrix(matrix)
        sums = {}
        for name in test_imatrix.LLAMA_CPP:
            values = found.importance(name, 1, found.entries[name].sums.shape[1])
            assert values is not None
            sums[name] = f'"{name}": ({values.sum():.6g}, {values[0, 7]:.6g})'
    print("\n".join([*lines.values(), *sums.values()]), compared[compared.find("=====") :], sep="\n")
    if asked.write:
        _replace(Path(test_conversion.__file__), {rf'"{kind}": "[0-9a-f]{{16}}"': new for kind, new in lines.items()})
        _replace(Path(test_imatrix.__file__), {rf'"{re.escape(name)}": \([^)]*\)': new for name, new in sums.items()})


def _replace(path: Path, pairs: dict[str, str]) -> None:
    text = path.read_text("utf-8")
    for pattern, new in pairs.items():
        text = re.sub(pattern, new, text, count=1)
    path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
