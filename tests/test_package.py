"""The installed files are one import package, complete from the wheel, the sdist, and checkouts with and without
links.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name not in ("localllm", "tests"))
SUFFIXES = (".py", ".cl", ".gguf", ".typed", ".html", ".css", ".js", ".svg", ".LICENSE")
SOURCES = ("localllm", *ROOMS, "pyproject.toml", "README.md", "LICENSE")
HELLO = (
    "import models; assert models.MINE; import localllm; model = localllm.load('demo'); "
    "print(''.join(p.text for p in model.generate('Hello', max_tokens=4)), localllm.__file__)"
)


def tracked() -> list[str]:
    """Return the repository's files that make up the package."""
    listed = subprocess.run(["git", "ls-files", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if not (ROOT / name).is_symlink()]


def build(kind: str, source: Path, target: Path) -> Path:
    """Build a distribution of `source` with the build backend."""
    code = f"import sys; from hatchling.build import build_{kind}; print(build_{kind}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, target], cwd=source, capture_output=True, text=True, check=True)
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkout of the package's files without links."""
    copy = tmp_path_factory.mktemp("checkout")
    try:
        names = tracked()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def linked(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkout of the package's files with links, as git creates them on most systems."""
    copy = tmp_path_factory.mktemp("linked") / "localllm"
    shutil.copytree(checkout, copy)
    for room in ROOMS:
        (copy / "localllm" / room).symlink_to(Path("..", room))
    return copy


def modules(names: list[str]) -> list[str]:
    ours = [name for name in names if name.startswith("localllm/")]  # without the metadata, which repeats the licences
    return sorted(name for name in ours if name.endswith(SUFFIXES))


def expected(checkout: Path) -> list[str]:
    """Return the files that must be in the wheel: the checkout's files, with every room inside localllm."""
    files = [path.relative_to(checkout) for path in checkout.rglob("*") if path.is_file()]
    inside = [f if f.parts[0] == "localllm" else Path("localllm", f) for f in files if len(f.parts) > 1]
    return modules([path.as_posix() for path in inside])


def talk(home: Path, folder: Path) -> str:
    """Run the model in the box with `home` as the installed package, next to an unrelated package named `models`."""
    (folder / "models").mkdir(exist_ok=True)
    (folder / "models" / "__init__.py").write_text("MINE = True\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    packages = [path for path in sys.path if path.endswith("site-packages")]
    path = os.pathsep.join([str(folder), str(home), *packages])
    done = subprocess.run(
        [sys.executable, "-S", "-c", HELLO],
        cwd=folder,
        env=clean | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("links", [False, True], ids=["no links", "links"])
def test_the_wheel_holds_every_module_once_and_nothing_beside_localllm(
    links: bool, checkout: Path, linked: Path, tmp_path: Path
) -> None:
    wheel = build("wheel", linked if links else checkout, tmp_path)
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]
    subprocess.run([*install, tmp_path / "installed", wheel], check=True, timeout=120)
    assert modules(names) == expected(checkout)
    assert {name.split("/")[0] for name in names} == {"localllm", f"{wheel.name.split('-py3')[0]}.dist-info"}
    assert str(tmp_path / "installed") in talk(tmp_path / "installed", tmp_path)


def test_the_sdist_makes_the_same_wheel(checkout: Path, linked: Path, tmp_path: Path) -> None:
    source = build("sdist", linked, tmp_path)
    with tarfile.open(source) as file:
        file.extractall(tmp_path, filter="data")
    wheel = build("wheel", tmp_path / source.name.removesuffix(".tar.gz"), tmp_path)
    with zipfile.ZipFile(wheel) as file:
        assert modules(file.namelist()) == expected(checkout)


@pytest.mark.parametrize("links", [False, True], ids=["no links", "links"])
def test_a_checkout_runs_beside_somebody_elses_models(
    links: bool, checkout: Path, linked: Path, tmp_path: Path
) -> None:
    home = linked if links else checkout
    assert str(home) in talk(home, tmp_path)
