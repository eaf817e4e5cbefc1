"""Opens the mmproj file of a model: the given file, or a file in the same folder with a similar name."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, NotUsed, Setting, said
from localllm.gguf import GGUFFile, open_gguf
from localllm.loading.resolve import resolve
from localllm.models import architecture_of, is_mmproj, read_config
from localllm.options import LoadOptions
from localllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from localllm.loading.multimodal import Multimodal

OFF = ("off", "none")
_MOST_TRIED = 16  # maximum number of files that are compared
_PLAIN = re.compile(r"(^|[-._])(model|gguf|i?q\d\w*|bf16|fp?16|fp?32|ud|mxfp4\w*|\d{5}-of-\d{5})(?=[-._]|$)")


def open_multimodal(file: GGUFFile, tokenizer: Tokenizer | None, options: LoadOptions) -> Multimodal | None:
    """Return the encoders for a model; None if there are none, or if they are off.

    Raises LocalLLMError if the given file does not fit the model. A file that was only found in its folder is left out,
    with a warning.
    """
    if str(options.mmproj) in OFF:
        return None
    architecture = architecture_of(file.metadata)
    kind = "an encoder" if architecture.encoder or architecture.decoder else "a diffusion model"
    reads = tokenizer is not None and not (architecture.encoder or architecture.decoder or architecture.diffusion)
    if not reads:
        if options.mmproj:
            problem = f": {file.path} reads no pictures or sound, because it is {kind}; leave it out"
            raise LocalLLMError(Notice(Setting("mmproj", options.mmproj), problem))
        return None
    assert tokenizer is not None
    beside = [] if options.mmproj else mmproj_beside(Path(file.path))
    if not (options.mmproj or beside):
        return None
    from localllm.loading.multimodal import Multimodal, text_model  # models of text alone start faster without it

    text = text_model(read_config(file.metadata, architecture.name), architecture, tokenizer.special)

    def opened(path: str | os.PathLike[str]) -> Multimodal:
        encoders = open_gguf(path)
        try:
            _check_kind(encoders)
            return Multimodal(encoders, text, tokenizer.bos, options.image_min_tokens, options.image_max_tokens)
        except BaseException:
            encoders.close()
            raise

    if options.mmproj:
        return opened(resolve(options.mmproj))
    problems = []
    for path in beside:
        try:
            return opened(path)
        except LocalLLMError as error:
            problems.append(error)
    if problems:
        told = Notice("pictures and sound are off: ", said(problems[0]), "; ", Setting("mmproj", "off"), " hides this")
        warnings.warn(told, NotUsed, stacklevel=3)
    return None


def _check_kind(file: GGUFFile) -> None:
    if not is_mmproj(file.metadata):
        problem = f"{file.path}: not an mmproj file, but a model; give the file of its encoders, mmproj-*.gguf"
        raise LocalLLMError(problem)


def mmproj_beside(model: Path) -> list[Path]:
    """Return the mmproj files in the model's folder that have no other model's name, the best first.

    `mmproj-F16.gguf` has no name, and `mmproj-NAME-F16.gguf` belongs to models whose file name begins with NAME. Of
    several formats, 16 bits come first.
    """
    own = _named(model.name)
    files = sorted(path for path in model.parent.glob("*.gguf") if "mmproj" in path.name.lower())
    found = []
    for path in files[:_MOST_TRIED]:
        name = _named(re.sub(r"mmproj", "", path.name, flags=re.IGNORECASE))
        if path.name != model.name and own.startswith(name):
            found.append((-len(name), not re.search(r"f16", path.name, re.IGNORECASE), path.name, path))
    return [path for *_, path in sorted(found)]


def _named(name: str) -> str:
    """Return the letters and digits of a file name, without formats of weights."""
    stem = name.lower().removesuffix(".gguf")
    while (shorter := _PLAIN.sub("", stem)) != stem:
        stem = shorter
    return re.sub(r"[^a-z0-9]", "", stem)
