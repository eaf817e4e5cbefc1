"""Parse the names of GGUF files: the quantization, the part number of a split model, and files that are not models.

Only names are parsed, because reading the header of every file in a repository or folder would take seconds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

ENDING = ".gguf"
_SPLIT = re.compile(r"(?P<prefix>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})", re.DOTALL)
_LABEL = re.compile(
    r"(?:^|[-._/ ])"
    r"((?:UD-)?(?:I?Q[1-9](?:_[0-9A-Z]{1,3}){0,3}|TQ[1-9]_[0-9]|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32))"
    r"(?=$|[-._/ ])",
    re.IGNORECASE,
)
# Multimodal projectors, importance matrices, vocabularies, and draft heads for another model.
_NO_MODEL = re.compile(r"mmproj|imatrix|^ggml-vocab-|^(mtp|eagle3|dflash|dspark)-", re.IGNORECASE)

_VARIED = "ud-"  # prefix of labels of mixtures whose quantization varies by layer


class Labelled(Protocol):
    """A model that can be selected by its quantization or file name."""

    @property
    def label(self) -> str: ...  # quantization in upper case, or ""
    @property
    def files(self) -> Iterable[str]: ...  # file names that refer to this model


Choice = TypeVar("Choice", bound=Labelled)


@dataclass(frozen=True, slots=True)
class Variant:
    """One model of a folder or a repository: a GGUF file, or the parts of a split GGUF file."""

    name: str  # path within the folder, without part number and ".gguf"
    label: str  # quantization from the name, in upper case, or ""
    parts: tuple[str, ...]  # paths within the folder, in order
    missing: tuple[int, ...] = ()  # numbers of missing parts, from 1; a few at most

    @property
    def files(self) -> tuple[str, ...]:
        return (self.name, *self.parts)


def label_of(name: str) -> str:
    """Return the quantization in a file's name, such as Q4_K_M, or ""."""
    found: list[str] = _LABEL.findall(name)
    return found[-1].upper().replace("FP16", "F16").replace("FP32", "F32") if found else ""


def is_model(path: str) -> bool:
    """Return whether a file with this name is a model or part of one."""
    return path.lower().endswith(ENDING) and not _NO_MODEL.search(path.rpartition("/")[2])


def is_encoders(path: str) -> bool:
    """Return whether a file with this name has the encoders of pictures and sound of a model (an mmproj file)."""
    return path.lower().endswith(ENDING) and "mmproj" in path.rpartition("/")[2].lower()


def variants(paths: Iterable[str]) -> list[Variant]:
    """Return the models among these files, sorted by name; other files are skipped."""
    groups: dict[tuple[str, int], dict[int, str]] = {}
    for path in paths:
        if is_model(path):
            stem = path[: -len(ENDING)]
            split = _SPLIT.fullmatch(stem)
            prefix, index, count = (
                (split["prefix"], int(split["index"]), int(split["count"])) if split else (stem, 1, 1)
            )
            if 1 <= index <= count:
                groups.setdefault((prefix, count), {})[index] = path
    found = []
    for (prefix, count), parts in sorted(groups.items()):
        missing = [number for number in range(1, min(count, len(parts) + 4) + 1) if number not in parts]
        found.append(Variant(prefix, label_of(prefix), tuple(parts[i] for i in sorted(parts)), tuple(missing[:4])))
    return found


def matching(given: Sequence[Choice], quant: str) -> list[Choice]:
    """Return the models that `quant` matches: a file name, a quantization, or the start of a quantization (Q4).

    Case is ignored. An exact match hides prefix matches. If `quant` is "", return all models.
    """
    wanted = quant.lower()
    if not wanted:
        return list(given)
    rules: tuple[Callable[[str, set[str]], bool], ...] = (
        lambda label, files: wanted in files,
        lambda label, files: label == wanted,
        lambda label, files: label.removeprefix(_VARIED) == wanted,
        lambda label, files: f"{label}_".startswith((f"{wanted}_", f"{_VARIED}{wanted}_")),
    )
    facts = [(each, each.label.lower(), _file_names(each)) for each in given]
    for rule in rules:
        if found := [each for each, label, files in facts if rule(label, files)]:
            return found
    return []


def _file_names(each: Labelled) -> set[str]:
    """Return the lower-case file names, with and without folders."""
    full = {file.lower() for file in each.files}
    return full | {file.rpartition("/")[2] for file in full}


def titles(repo: str, given: Sequence[Variant]) -> dict[Variant, str]:
    """Return the shortest unique name of each variant: USER/REPO:QUANT, or a file name in place of QUANT. Without a
    repository, it is the file name."""
    labels = Counter(each.label for each in given)

    def rest(each: Variant) -> str:
        if each.label and labels[each.label] == 1:
            return f":{each.label}"
        return "" if len(given) == 1 else f":{each.name}"

    return {each: repo + rest(each) if repo else each.name for each in given}
