"""Suggest the known name for a misspelled one: options, commands, settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_ALIKE = 0.75  # minimum similarity, unless the name is a prefix of a known name


def closest(name: str, known: Iterable[str]) -> str:
    """Return the known name that starts with `name`, else the most similar name, else "".

    Dashes, underscores, slashes and case are ignored. Names of one letter only match themselves.
    """
    wanted = _bare(name)
    by_letters: dict[str, str] = {}
    for each in known:
        by_letters.setdefault(_bare(each), each)
    if wanted in by_letters:
        return by_letters[wanted]
    longer = [letters for letters in by_letters if len(wanted) > 1 and letters.startswith(wanted)]
    if longer:
        return by_letters[min(longer, key=len)]
    near = [(_alike(wanted, letters), letters) for letters in by_letters if len(letters) > 1]
    alike, letters = max(near, default=(0.0, ""))
    return by_letters[letters] if alike >= _ALIKE else ""


def either(names: Sequence[str]) -> str:
    """Return names as a choice: "a, b or c"."""
    return " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _bare(name: str) -> str:
    return name.strip("-/").replace("_", "-").lower()


def _alike(one: str, other: str) -> float:
    """Return the similarity from 0 to 1. Transposed letters count as a full match."""
    from difflib import SequenceMatcher  # imported late, since every start imports this module

    return 1.0 if sorted(one) == sorted(other) else SequenceMatcher(None, one, other).ratio()
