"""Files that shrink while in use: data read at opening stays valid, and later reads give a one-line error.

The tests run in a child process, because SIGBUS would kill a process that reads a shrunk file through a memory mapping.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from localllm.gguf import write_gguf
from tests.localllm.support import REPOSITORY, write_model
from tests.models.kit import KIT

BEGIN = "import os, sys, numpy as np, localllm; from localllm.gguf import open_gguf; path = sys.argv[1]; "


def _run(code: str, path: Path) -> str:
    words = [sys.executable, "-c", BEGIN + code, str(path)]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", cwd=REPOSITORY, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    """Write a byte-level BPE vocabulary whose merges start several pages into the file."""
    letters = [chr(c) for c in range(33, 127)]
    merges = [f"{a} {b}" for a in letters for b in letters]
    tokens = [*letters, *(merge.replace(" ", "") for merge in merges)]
    path = tmp_path / "v.gguf"
    keys = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.ones(len(tokens), np.int32),
        "tokenizer.ggml.merges": merges,
    }
    write_gguf(path, keys, [])
    return path


def test_metadata_and_the_tokenizer_need_the_file_no_more(vocabulary: Path) -> None:
    code = (
        "from localllm.tokenizer import Tokenizer; file = open_gguf(path); keys = file.metadata;"
        "words = Tokenizer.from_metadata(keys); os.truncate(path, 100); merges = keys['tokenizer.ggml.merges'];"
        "print(len(words.encode('hello')), merges[-1], len(merges.to_list()), len(keys['tokenizer.ggml.tokens']))"
    )
    assert _run(code, vocabulary) == "3 ~ ~ 8836 8930\n"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_model_goes_on_and_a_later_read_is_an_error(backend: str, tmp_path: Path) -> None:
    """A model still runs after its file shrinks, because backends copy the weights at opening.

    Later tensor reads raise an error.
    """
    path = write_model(tmp_path / "m.gguf")
    code = (
        f"model = localllm.load(path, backend='{backend}', ctx_size=64); session = model.session();"
        "a = session.evaluate([5, 6, 7], logits=True).copy(); session.rewind(0); os.truncate(path, 100);"
        "b = session.evaluate([5, 6, 7], logits=True); print(np.array_equal(a, b));"
        "tensor = list(model.file.tensors.values())[-1]\n"
        "try: tensor.read(0, 1)\n"
        "except localllm.LocalLLMError as error: print(error)"
    )
    same, error = _run(code, path).splitlines()
    assert same == "True"
    assert error.startswith(f"{path}: tensor '")
    assert "cannot be read: the file was cut at" in error


def test_a_file_that_shrinks_while_it_is_opened_is_an_error(vocabulary: Path) -> None:
    """The file shrinks after its size was queried and before the header is read."""
    code = (
        "from pathlib import Path; from localllm.gguf.header import read_header; from localllm.gguf.file import _Shard;"
        "shard = _Shard(Path(path)); os.truncate(path, 5000)\n"
        "try: read_header(shard.path, shard.size, shard.read_into)\n"
        "except localllm.LocalLLMError as error: print(error)"
    )
    cut = "the file was cut at 5000 while in use; restore the complete file and load the model again"
    assert _run(code, vocabulary) == f"{vocabulary}: magic: cannot be read: {cut}\n"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_table_that_stays_in_the_file_is_missed_in_one_line_and_no_step_is_half_done(
    backend: str, tmp_path: Path
) -> None:
    """A forward pass gives a one-line error if it needs an embedding table that stays in the file, and the file has
    shrunk.

    The session continues from its last token once the file is whole again.
    """
    path = KIT["qwen4exp-8of40"].write(tmp_path / "m.gguf")
    code = (
        f"model = localllm.load(path, backend='{backend}', ctx_size=64); session = model.session();"
        "truth = model.session().evaluate([5, 6, 7, 8], logits=True)[3].copy();"
        "session.evaluate([5, 6, 7], logits=False); whole = open(path, 'rb').read(); os.truncate(path, 100)\n"
        "try: session.evaluate([8], logits=True)\n"
        "except localllm.LocalLLMError as error: print(error)\n"
        "open(path, 'r+b').write(whole); print(len(session.tokens));"
        "print(np.array_equal(session.evaluate([8], logits=True)[0], truth))"
    )
    error, held, same = _run(code, path).splitlines()
    assert error.startswith(f"{path}: tensor 'per_layer_token_embd.weight': cannot be read: the file was cut at ")
    assert error.endswith("; restore the complete file and load the model again")
    assert (held, same) == ("3", "True")
