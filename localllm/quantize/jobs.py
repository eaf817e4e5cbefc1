"""Plan a quantization before anything is written: a job per tensor, sizes, metadata, and errors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import numpy as np

from localllm.base.errors import LocalLLMError
from localllm.base.notices import FILE, Notice, Setting
from localllm.gguf import NewTensor, file_size
from localllm.gguf.header import Stored
from localllm.gguf.layout import shape_problem, tensor_bytes
from localllm.quant import FORMATS
from localllm.quant.mixes import FLOATS, MIXES, FormatChoice, MixOptions, QuantMix, allows, choose_formats, in_order
from localllm.quantize.calibration.imatrix import Imatrix
from localllm.quantize.source import Source, geometry_of

QUANTIZATION_VERSION = 2  # version of ggml's formats, for general.quantization_version
_VERSION_KEY, _TYPE_KEY = "general.quantization_version", "general.file_type"
IMPOSSIBLE_WITHOUT = ("IQ1_S", "IQ2_XXS", "IQ2_XS")  # formats whose search requires importance, for any tensor
_IMATRIX_BYTES = 127  # longest name that llama-quantize stores


class QuantizeError(LocalLLMError):
    """The model cannot be quantized as requested. The one-line message states the tensor, the reason and a remedy."""


@dataclass(frozen=True, slots=True)
class Job:
    """One tensor: its format and bytes before and after quantization."""

    name: str
    shape: tuple[int, ...]  # row-major
    before: str
    after: str
    bytes_before: int
    bytes_after: int
    wanted: str  # the mix's format if `after` is a fallback, else the same as `after`
    needs_imatrix: bool = False

    @property
    def values(self) -> int:
        return prod(self.shape)

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def experts(self) -> int:
        """Number of stacked matrices, each with its own importance."""
        return prod(self.shape[:-2]) if len(self.shape) > 2 else 1

    @property
    def changes(self) -> bool:
        return self.before != self.after


def plan_jobs(
    source: Source, mix: QuantMix, options: MixOptions, fixed: Mapping[str, str] = MappingProxyType({})
) -> list[Job]:
    """Return a job for every tensor, in llama-quantize's writing order. No tensor is read.

    `fixed` gives formats that do not follow from the mix.
    """
    tensors = _tensors(source)
    choices = choose_formats(mix, geometry_of(source.stored), tensors, options)
    own = {name: FormatChoice(name, format, format, False) for name, format in fixed.items()}
    return [_job(tensor, own.get(choice.name, choice)) for tensor, choice in zip(tensors, choices, strict=True)]


def copy_jobs(source: Source) -> list[Job]:
    """Return jobs that keep every tensor unchanged."""
    return [_job(tensor, FormatChoice(tensor[0], tensor[2], tensor[2], False)) for tensor in _tensors(source)]


def given_jobs(source: Source, formats: Mapping[str, str]) -> list[Job]:
    """Return jobs that give each tensor its format in `formats`, or keep the tensor."""
    found = []
    for name, shape, now in _tensors(source):
        format_name = formats.get(name, now)
        found.append(_job((name, shape, now), FormatChoice(name, format_name, format_name, False)))
    return found


def quantizable(source: Source) -> list[tuple[str, tuple[int, ...], str]]:
    """Return the tensors (name, shape, format) whose format can be chosen."""
    architecture = geometry_of(source.stored).architecture
    return [tensor for tensor in _tensors(source) if allows(tensor[0], tensor[1], architecture)]


def _tensors(source: Source) -> list[tuple[str, tuple[int, ...], str]]:
    if not source.tensors:
        raise QuantizeError(f"{source.path}: has a vocabulary but no weights; there is nothing to quantize")
    found = source.tensors
    return [(name, found[name].shape, found[name].format) for name in in_order(found)]


def _job(tensor: tuple[str, tuple[int, ...], str], choice: FormatChoice) -> Job:
    name, shape, now = tensor
    problem = shape_problem(shape, FORMATS[choice.format])
    if problem:
        raise QuantizeError(f"{name}: cannot be {choice.format}: {problem}")
    before, after = (tensor_bytes(shape, FORMATS[f])[1] for f in (now, choice.format))
    return Job(name, shape, now, choice.format, before, after, choice.wanted, choice.needs_imatrix)


def check_jobs(jobs: Sequence[Job], important: Collection[str], allow_requantize: bool) -> None:
    """Raise QuantizeError for the first tensor that must not or cannot be converted, with the reason and a remedy.

    `important` has the tensors that an importance matrix covers, or will cover.
    """
    for job in jobs:
        if not job.changes:
            continue
        if job.before not in FLOATS and not allow_requantize:
            problem = f"{job.name}: already quantized ({job.before}), and quantizing twice loses more"
            advice = ("start from F16, BF16 or F32, or add ", Setting("allow_requantize", True))
            raise QuantizeError(Notice(problem, "; ", *advice))
        if (job.needs_imatrix or job.after in IMPOSSIBLE_WITHOUT) and job.name not in important:
            lacks = "the given one does not include it" if important else "there is none"
            problem = f"{job.name}: {job.after} requires an importance matrix, and {lacks}"
            ways = (Setting("imatrix", FILE), ", or ", Setting("imatrix", "auto"), " to measure one")
            raise QuantizeError(Notice(problem, "; give ", *ways))
        if FORMATS[job.after].quantize is None:
            can = ", ".join(f.name for f in FORMATS.values() if f.quantize)
            raise QuantizeError(f"{job.name}: {job.after} cannot be written; supported: {can}")


def metadata(
    stored: Mapping[str, Stored], file_type: int | None, imatrix: Imatrix | None, imatrix_file: str
) -> dict[str, Stored]:
    """Return the metadata keys of the new file: the keys of the old file, and the keys that llama-quantize adds, in its
    order.

    `file_type` None keeps the value of the old file, if any.
    """
    found = dict(stored)
    found.pop(_VERSION_KEY, None)
    kept = found.pop(_TYPE_KEY, None)
    found[_VERSION_KEY] = np.uint32(QUANTIZATION_VERSION)
    if file_type is not None:
        found[_TYPE_KEY] = np.uint32(file_type)
    elif kept is not None:
        found[_TYPE_KEY] = kept
    if imatrix is None:
        return found
    about: dict[str, Stored] = {"file": _short(imatrix_file)}
    if imatrix.datasets:
        about["dataset"] = _short(imatrix.datasets[0])
    about["entries_count"] = np.uint32(len(imatrix.entries))
    if imatrix.chunks > 0:
        about["chunks_count"] = np.uint32(imatrix.chunks)
    for key, value in about.items():
        found.pop(f"quantize.imatrix.{key}", None)
        found[f"quantize.imatrix.{key}"] = value
    return found


def _short(text: str) -> str:
    return text.encode("utf-8", "replace")[:_IMATRIX_BYTES].decode("utf-8", "ignore")


def file_type_of(jobs: Sequence[Job]) -> int:
    """Return general.file_type for freely chosen formats: the type whose main format holds the most weights."""
    held: dict[str, int] = {}
    for job in jobs:
        held[job.after] = held.get(job.after, 0) + job.values
    most = max(held, key=lambda name: held[name])
    rows = [mix for mix in MIXES.values() if mix.format == most]
    return rows[-1].file_type if rows else MIXES["F16"].file_type


def size_of(source: Source, jobs: Sequence[Job]) -> int:
    """Return the size of the file in bytes, without keys about an importance matrix."""
    new = [NewTensor(job.name, job.after, job.shape, b"") for job in jobs]
    return file_size(source.path, metadata(source.stored, 0, None, ""), new)
