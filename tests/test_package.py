"""The installed files form one complete import package, from the wheel, the sdist, a git URL, and checkouts with and
without symbolic links.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name not in ("localllm", "tests"))
SOURCES = ("localllm", *ROOMS, "pyproject.toml", "README.md", "LICENSE", "tests/__init__.py")
OTHERS = ("tests", "benchmarks", "docs", "mine")  # folders next to the package that are not part of it
HELLO = (
    "import models; assert models.MINE; import localllm; model = localllm.load('demo'); "
    "print(''.join(p.text for p in model.generate('Hello', max_tokens=4)), localllm.__file__)"
)

FOUND = """
import importlib, os, sys
import localllm
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(f"localllm.{name}")
    except ModuleNotFoundError:
        continue
    print(name, os.path.realpath(os.path.dirname(module.__file__ or module.__path__[0])))
"""


def tracked() -> list[str]:
    """Return the repository's files that belong to the package."""
    listed = subprocess.run(["git", "ls-files", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if not (ROOT / name).is_symlink()]


def build(kind: str, source: Path, target: Path) -> Path:
    """Build a distribution of `source` with the build backend."""
    code = f"import sys; from hatchling.build import build_{kind}; print(build_{kind}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, target], cwd=source, capture_output=True, text=True, check=True)
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkout of the package's files without symbolic links."""
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
def texts(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkout as git creates it on Windows, where links become text files that name their target."""
    copy = tmp_path_factory.mktemp("texts") / "localllm"
    shutil.copytree(checkout, copy)
    git = ["git", "-c", "core.symlinks=false", "checkout-index", f"--prefix={copy}/", "-f", "--"]
    subprocess.run([*git, *(f"localllm/{room}" for room in ROOMS)], cwd=ROOT, check=True)
    return copy


@pytest.fixture(scope="module")
def linked(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkout with symbolic links, as git creates it on most systems."""
    copy = tmp_path_factory.mktemp("linked") / "localllm"
    shutil.copytree(checkout, copy)
    for room in ROOMS:
        (copy / "localllm" / room).symlink_to(Path("..", room))
    return copy


def files(names: list[str]) -> list[str]:
    return sorted(name for name in names if name.startswith("localllm/"))  # not the metadata


def expected(checkout: Path) -> list[str]:
    """Return the files that the wheel must contain: the checkout's files, with every room inside localllm."""
    found = [path.relative_to(checkout) for path in checkout.rglob("*") if path.is_file()]
    inside = [Path("localllm", f) if f.parts[0] in ROOMS else f for f in found]
    return files([path.as_posix() for path in inside])


def install(source: str | Path, target: Path) -> None:
    """Install into an empty folder, with this environment's packages and build backend."""
    flags = ["-q", "--no-deps", "--no-index", "--no-build-isolation", "--no-compile"]  # compiling takes 2 s
    command = [sys.executable, "-m", "pip", "install", *flags, "--target", target, source]
    subprocess.run(command, check=True, timeout=120)


def talk(home: Path, folder: Path) -> str:
    """Run the bundled model with the package in `home`, next to an unrelated package named `models`."""
    (folder / "models").mkdir(exist_ok=True)
    (folder / "models" / "__init__.py").write_text("MINE = True\n")
    return python(HELLO, path=[folder, home], folder=folder)


def found(home: Path, folder: Path) -> dict[str, Path]:
    """Return the rooms and other folders that can be imported from localllm in `home`, each with the path of
    its files.
    """
    for name in OTHERS:
        (home / name).mkdir(exist_ok=True)
    (home / "mine" / "__init__.py").touch()
    printed = python(FOUND, *ROOMS, *OTHERS, path=[home], folder=folder)
    return {name: Path(place) for name, place in (line.split(" ", 1) for line in printed.splitlines())}


def python(code: str, *arguments: str, path: Sequence[Path], folder: Path) -> str:
    """Run `code` in a Python whose import path starts with `path`, and return its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    packages = [entry for entry in sys.path if entry.endswith("site-packages")]
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, *arguments],
        cwd=folder,
        env=clean | {"PYTHONPATH": os.pathsep.join([*map(str, path), *packages])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["checkout", "texts", "linked"])
def test_the_wheel_holds_every_module_once_and_nothing_beside_localllm(
    kind: str, checkout: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    wheel = build("wheel", request.getfixturevalue(kind), tmp_path)
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    install(wheel, tmp_path / "installed")
    assert files(names) == expected(checkout)
    assert {name.split("/")[0] for name in names} == {"localllm", f"{wheel.name.split('-py3')[0]}.dist-info"}
    installed = (tmp_path / "installed").resolve()
    assert str(installed) in talk(installed, tmp_path)
    assert found(installed, tmp_path) == {room: installed / "localllm" / room for room in ROOMS}


def test_a_git_url_installs_every_file(checkout: Path, linked: Path, tmp_path: Path) -> None:
    bare = tmp_path / "localllm.git"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost", "-C", linked]
    for step in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "All"], ["clone", "-q", "--bare", ".", bare]):
        subprocess.run([*git, *step], check=True, timeout=60)
    shutil.rmtree(linked / ".git")
    install(f"git+{bare.as_uri()}", tmp_path / "installed")
    installed = (tmp_path / "installed").resolve()
    found = [path.relative_to(installed) for path in installed.rglob("*") if path.is_file()]
    assert files([path.as_posix() for path in found if path.parent.name != "__pycache__"]) == expected(checkout)
    assert str(installed) in talk(installed, tmp_path)
    told = python("from localllm.__main__ import main; main()", "--version", path=[installed], folder=tmp_path)
    assert told.startswith("localllm ")


def test_the_sdist_makes_the_same_wheel(checkout: Path, linked: Path, tmp_path: Path) -> None:
    source = build("sdist", linked, tmp_path)
    with tarfile.open(source) as file:
        file.extractall(tmp_path, filter="data")
    wheel = build("wheel", tmp_path / source.name.removesuffix(".tar.gz"), tmp_path)
    with zipfile.ZipFile(wheel) as file:
        assert files(file.namelist()) == expected(checkout)
    home = (tmp_path / source.name.removesuffix(".tar.gz")).resolve()
    assert (home / "tests" / "__init__.py").exists()
    assert found(home, tmp_path) == {room: home / room for room in ROOMS}


@pytest.mark.parametrize("kind", ["checkout", "texts", "linked"])
def test_a_checkout_runs_beside_somebody_elses_models(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    home = request.getfixturevalue(kind)
    assert str(home) in talk(home, tmp_path)


@pytest.mark.parametrize("kind", ["checkout", "texts", "linked"])
def test_a_checkout_has_the_four_rooms_and_no_other_folder_in_localllm(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    home = request.getfixturevalue(kind).resolve()
    assert found(home, tmp_path) == {room: home / room for room in ROOMS}
