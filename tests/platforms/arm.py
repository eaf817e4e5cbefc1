"""Run tests on an emulated Arm processor: qemu-user, with Debian's interpreter and wheels from the package index.

    apt-get install qemu-user-static && dpkg --add-architecture arm64 && apt-get update     (as root, once)
    python -m tests.platforms.arm FOLDER [PYTEST ARGUMENTS...]

The interpreter and the packages, about 700 MB, are installed into FOLDER if they are missing. Without arguments, the
tests in SUBSET run: conformance of the kernels, and bits that must not depend on threads, chunks or instruction sets.
Every fifth of the tests in SPARSE runs. Code is compiled for the emulated processor (`--cpu`, a name that qemu knows),
so its dot products and half precision run as on hardware. Speed under emulation is meaningless.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
QEMU = "qemu-aarch64-static"
DEBIAN = (
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libssl3", "libffi8", "libbz2-1.0", "liblzma5"),
    *("libsqlite3-0", "libuuid1", "libncursesw6", "libtinfo6", "libreadline8", "libcrypt1", "libnsl2", "libtirpc3"),
    *("libgssapi-krb5-2", "libkrb5-3", "libk5crypto3", "libkrb5support0", "libcom-err2", "libkeyutils1"),
    *("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib"),
)
WHEELS = ("pytest", "hypothesis", "httpx")
PLATFORMS = ("manylinux2014_aarch64", "manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64")
SUBSET = (
    *("tests/backends/test_conformance.py", "tests/backends/test_reproducible.py", "tests/backends/cpu/test_pool.py"),
    *("tests/backends/cpu/test_instruction_sets.py", "tests/models/test_demo.py", "tests/platforms/test_bits.py"),
)
SPARSE = ("-p", "tests.platforms.every", "--every", "tests/backends/test_reproducible.py=5")
STARTS = (  # deselected: these tests start the emulated interpreter, which only qemu can run
    *("--deselect", "tests/backends/cpu/test_pool.py::test_a_program_that_closes_nothing_ends_well"),
    *("--deselect", "tests/backends/cpu/test_pool.py::test_too_many_threads_for_the_memory_are_an_error_that_says_so"),
)

# qemu's processors, and the features to pass to LLVM, which reads the host's /proc/cpuinfo under emulation.
FEATURES = {"neoverse-n1": "+dotprod,+fullfp16,+neon", "cortex-a72": "+neon"}


def dependencies() -> list[str]:
    import tomllib

    return list(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"])


def make(folder: Path) -> None:
    """Unpack the interpreter into `folder`/root and the packages into `folder`/site."""
    packages, root, site = folder / "debian", folder / "root", folder / "site"
    packages.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *(f"{name}:arm64" for name in DEBIAN)], cwd=packages, check=True)
    for package in sorted(packages.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", "--python-version", "3.11"),
            *("--implementation", "cp", "--target", str(site), *platforms, *dependencies(), *WHEELS),
        ],
        check=True,
    )  # fmt: skip


def python(folder: Path, cpu: str, words: list[str]) -> int:
    """Run the emulated interpreter in the repository. Return its exit code."""
    qemu = shutil.which(QEMU)
    assert qemu is not None
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XDG_", "NUMBA_"))}
    environment = {
        **kept, "QEMU_LD_PREFIX": str(folder / "root"), "QEMU_CPU": cpu, "PYTHONHOME": str(folder / "root" / "usr"),
        "PYTHONPATH": f"{ROOT}:{folder / 'site'}", "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": FEATURES[cpu],
        "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    command = [qemu, str(folder / "root" / "usr" / "bin" / "python3.11"), *words]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("folder", type=Path)
    asked.add_argument("--cpu", default="neoverse-n1", choices=FEATURES, help="with or without dot products")
    asked.add_argument("--python", metavar="CODE", help="run this instead of tests")
    given, words = asked.parse_known_args()  # pytest gets the other arguments
    if shutil.which(QEMU) is None:
        print(f"{QEMU} is not installed; apt-get install qemu-user-static", file=sys.stderr)
        return 1
    folder = given.folder.resolve()
    if not (folder / "site" / "pytest").is_dir():
        make(folder)
    if given.python:
        return python(folder, given.cpu, ["-c", given.python])
    return python(folder, given.cpu, ["-m", "pytest", "-q", "-p", "no:xdist", *(words or (*SPARSE, *STARTS, *SUBSET))])


if __name__ == "__main__":
    sys.exit(main())
