"""Write the tiny T5 test models as GGUFs with a vocabulary, and store the answers that llama-completion gives for them.

The answers are from llama.cpp of 2026-10-01, with GGUFs of `write_t5`: llama-completion -m FILE -p PROMPT -n 20 --temp
0 -no-cnv -t 1 -ctk f32 -ctv f32 -fa off --special
"""

from __future__ import annotations

from pathlib import Path

from tests.localllm.test_embedding import write_t5
from tests.models.kit import KIT

# Prompt, and the first generated tokens after the decoder's start token.
ANSWERS = {
    "a cat and dogs": "<extra_id_5><extra_id_37><extra_id_60> f<extra_id_5><extra_id_7><extra_id_7><extra_id_40>"
    "<extra_id_5><extra_id_7><extra_id_12><extra_id_17>y<extra_id_39>e",
    "one two three": " uv d<extra_id_17> w<extra_id_19><extra_id_46><extra_id_9><extra_id_48><extra_id_24>"
    "<extra_id_56><extra_id_59><extra_id_9><extra_id_50>v<extra_id_62><extra_id_55><extra_id_3><extra_id_24>"
    "<extra_id_56>",
}
START, END = 0, 1


def write(folder: Path, name: str = "t5-gated") -> Path:
    """Write the test model of this name as a GGUF."""
    return write_t5(folder / f"{name}.gguf", name, KIT[name])
