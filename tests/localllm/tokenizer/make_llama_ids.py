"""Write data/llama_ids.json: a checksum of llama.cpp's token ids for each of TEXTS, under every test vocabulary.

The command needs llama.cpp's program llama-tokenize:

    python -m tests.localllm.tokenizer.make_llama_ids PATH/TO/llama-tokenize
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localllm.gguf.writer import write_gguf
from tests.localllm.tokenizer.vocabularies import KEY, SEPARATOR, TEXTS, vocabularies

DATA = Path(__file__).parent / "data" / "llama_ids.json"


def ids_of(program: str, metadata: Mapping[str, Any], folder: Path) -> list[list[int]]:
    model, text = folder / "vocabulary.gguf", folder / "text"
    write_gguf(model, {"general.architecture": "llama", **metadata}, [], overwrite=True)
    text.write_bytes(SEPARATOR.join(TEXTS).encode())
    command = [program, "-m", model, "-f", text, "--ids", "--no-bos", "--no-escape", "--log-disable"]
    made = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    lists: list[list[int]] = [[]]
    for token in json.loads(made):
        if token == metadata[KEY + "tokens"].index(SEPARATOR):
            lists.append([])
        else:
            lists[-1].append(token)
    assert len(lists) == len(TEXTS)
    return lists


def checksum(ids: list[int]) -> str:
    return f"{zlib.crc32(struct.pack(f'<{len(ids)}i', *ids)):08x}"


def main() -> None:
    found: dict[str, list[str]] = {}  # checksums of all texts -> names of the vocabularies that give them
    with tempfile.TemporaryDirectory() as folder:
        for name, metadata in vocabularies().items():
            lists = ids_of(sys.argv[1], metadata, Path(folder))
            found.setdefault(" ".join(map(checksum, lists)), []).append(name)
    rows = [{"names": names, "crc32": sums} for sums, names in found.items()]
    DATA.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
