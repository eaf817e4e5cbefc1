"""The files that docs/architecture.md names exist, and the files of each walk-through are connected by imports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_imports import FILES, ROOT, graph, module

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
WALKS = {
    part.partition("\n")[0]: re.findall(r"^\d+\. `([^`]+)`", part, re.MULTILINE)
    for part in re.split(r"^## ", PAGE, flags=re.M)[1:]
}


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """Return the modules that each module imports, including modules reached by the name of a package."""
    edges = graph({module(path): path for path in FILES})
    packages = {module(path) for path in FILES if path.name == "__init__.py"}
    return {name: found.union(*(edges[each] for each in found & packages)) for name, found in edges.items()}


def test_there_are_four_walks() -> None:
    assert list(WALKS) == ["A token", "A request", "A tensor", "An option"]
    assert min(map(len, WALKS.values())) >= 7


def test_each_file_that_the_page_names_exists() -> None:
    assert [name for name in re.findall(r"`([\w/]+\.py)`", PAGE) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("walk", WALKS)
def test_each_file_of_a_walk_imports_one_of_it_or_is_imported_by_one(walk: str, imported: dict[str, set[str]]) -> None:
    names = [module(ROOT / Path(name)) for name in WALKS[walk]]
    alone = [
        one
        for one in names
        if not any(one in imported[other] or other in imported[one] for other in names if other != one)
    ]
    assert alone == []
