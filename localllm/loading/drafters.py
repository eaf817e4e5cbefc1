"""Finds the file that drafts for a model: the draft model, or prediction heads in the folder of the model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from localllm.generation.speculation.errors import SpeculationError
from localllm.gguf import GGUFError, GGUFFile, open_gguf
from localllm.loading.resolve import resolve
from localllm.models import (
    Drafter,
    MediaInput,
    ModelError,
    architecture_of,
    check_fit,
    has_head,
    is_drafter,
    is_heads,
    read_config,
)
from localllm.models import record as record_model
from localllm.models import record_with_drafter as record
from localllm.options import SpeculationOptions
from localllm.plan import Plan, Tensor

BESIDE = "mtp-"  # llama.cpp's converter begins the names of head files with this (`--mtp`)
_MOST_TRIED = 16  # maximum number of files that are opened in the model's folder


def find_drafter(file: GGUFFile, options: SpeculationOptions) -> GGUFFile | None:
    """Return the opened file that drafts for a model and shares its weights; None if a whole model drafts, or none.

    Raises SpeculationError if the file does not fit the model, or is a whole model and `options` ask for heads.
    """
    if not options.may_use_head:
        return None
    if not options.model_draft:
        return _beside(file)
    given = open_gguf(resolve(options.model_draft))
    try:
        if is_drafter(_content(given)):
            return given
        if options.kind == "mtp":
            raise SpeculationError(f"{given.path}: a whole model, not a file of prediction heads; use draft or auto")
    except BaseException:
        given.close()
        raise
    given.close()
    return None


def with_drafter(
    file: GGUFFile, drafter: GGUFFile, tensors: Mapping[str, Tensor], context: int, most: int,
    media: MediaInput | None = None,
) -> Plan:  # fmt: skip
    """Record a model whose tokens a drafter predicts; see `models.record_with_drafter`."""
    architecture = architecture_of(file.metadata)
    try:
        return record(file.metadata, architecture, tensors, _content(drafter), context, most, media)
    except ModelError as error:
        record_model(read_config(file.metadata, architecture.name), architecture, tensors, context)  # may raise its own
        problem = f"{drafter.path}: cannot draft for {file.path}: {error}"
        raise SpeculationError(f"{problem}; use a file made for this model") from None


def _beside(file: GGUFFile) -> GGUFFile | None:
    """Return the head file in the model's folder that fits the model and has the most similar name."""
    architecture = architecture_of(file.metadata)
    if has_head(read_config(file.metadata, architecture.name), architecture, file.tensors):
        return None
    path = Path(file.path)
    found = sorted(path.parent.glob(f"{BESIDE}*.gguf"), key=lambda each: _unlike(each.name, path.name))
    for each in found[:_MOST_TRIED]:
        try:
            drafter = open_gguf(each)
        except GGUFError:
            continue
        try:
            if is_heads(_content(drafter)):
                check_fit(file.metadata, architecture, _content(drafter))
                return drafter
        except ModelError:
            pass
        drafter.close()
    return None


def _unlike(name: str, model: str) -> tuple[int, str]:
    pairs = zip(name.removeprefix(BESIDE), model, strict=False)
    return -len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))), name


def _content(file: GGUFFile) -> Drafter:
    return Drafter(file.metadata, file.tensors)
