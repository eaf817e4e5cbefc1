"""The hashes of 105 small models equal `golden.json` under every condition."""

from __future__ import annotations

import pytest
from llvmlite import binding as llvm

from tests import golden

WHY = """
{found}

These bits were the same since the file was made. If the change is meant, remake the file with
`python -m tests.golden`; the commit that changes an entry must say why in its message.
"""


def changes(name: str, found: golden.Found) -> list[str]:
    expected = golden.kept()[name]
    return [
        f"{name}, {condition}: {what} are {bits}, not {expected[what]}"
        for condition, entry in found.items()
        for what, bits in entry.items()
        if bits != expected[what]
    ]


def check(changed: list[str]) -> None:
    if changed:
        pytest.fail(WHY.format(found="\n".join(changed)), pytrace=False)


def test_every_model_has_an_entry() -> None:
    assert list(golden.kept()) == list(golden.CASES)


@pytest.mark.parametrize("name", golden.CASES)
def test_bits(name: str) -> None:
    check(changes(name, golden.measure(golden.CASES[name])))


def test_bits_on_avx2() -> None:
    if not {"avx2", "fma", "f16c"} <= {name for name, on in llvm.get_host_cpu_features().items() if on}:
        pytest.skip("this processor does not run AVX2")
    found = golden.on_avx2(sorted(golden.ON_AVX2))
    check([line for name, entry in found.items() for line in changes(name, {"AVX2": entry})])
