"""Some converted files load and decode in llama.cpp. `python -m tests.localllm.convert.llama_cpp` tests every file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.localllm.convert.llama_cpp import REFUSED, REPAIRED, convert, folders, refusals

pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: pip install xllamacpp")

FOLDERS = folders()
FEW = sorted({*REPAIRED, *[name for name in FOLDERS if name not in REFUSED][::20], "dots1"})


@pytest.mark.parametrize("name", FEW)
def test_llama_cpp_runs_what_we_convert(name: str, tmp_path: Path) -> None:
    [reason] = refusals([convert(FOLDERS[name], tmp_path)])
    assert bool(reason) == (name in REFUSED), reason


def test_the_list_names_folders() -> None:
    assert {*REFUSED, *REPAIRED} <= {*FOLDERS}
