"""The import rules of the layout (CONTRIBUTING.md) hold in every source file."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import localllm

ROOT = Path(__file__).resolve().parent.parent
TOP = ("quant", "plan", "models", "backends")  # rooms that are folders of the repository
PACKAGES = ("localllm", *TOP)

# Rooms from the bottom up. A room imports only rooms listed above it; `base` imports none.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("base",),
    ("quant",),
    ("plan",),
    ("models", "backends", "gguf", "options", "sandbox", "hub"),
    ("tokenizer", "engine", "media"),
    ("template", "sampling", "embedding", "convert"),
    ("generation",),
    ("output",),
    ("constrained", "reply"),
    ("loading",),
    ("saved", "diffusion", "cluster"),
    ("chat",),
    ("model",),
    ("evaluation", "explain"),
    ("quantize", "server"),
    ("distributed",),
    ("cli",),
)
SHARED = ("localllm.base.printable", "localllm.base.notices", "localllm.base.files")  # modules TOP may import
ARROWS = 198  # imports from one room to another; lower this when the number falls

# Third-party packages besides NumPy. The longest matching path prefix decides; other files import none.
FOREIGN: dict[str, set[str]] = {
    "quant/compiled": {"numba", "llvmlite"},
    "backends/cpu": {"llvmlite"},
    "backends/opencl": {"pyopencl"},
    "backends/cuda": {"pycuda"},
    "localllm/template": {"jinja2"},
    "localllm/sandbox": {"tokenizers"},
    "localllm/constrained": {"llguidance"},
    "localllm/server": {"msgspec", "starlette", "uvicorn", "prometheus_client"},
    "localllm/hub": {"huggingface_hub"},
    "localllm/convert": {"gguf"},
    "localllm/media": {"PIL", "soundfile"},
    "localllm/cluster": {"zmq"},
    "localllm/distributed": {"ray", "zmq"},
    "localllm/cli": {"rich", "typer", "platformdirs"},
    "localllm/cli/plots": {"matplotlib"},
    "localllm/cli/top": {"rich", "prometheus_client"},
    "localllm/cli/chat": {"platformdirs", "prompt_toolkit"},
}
NO_NUMPY = ("localllm/base", "localllm/options", "localllm/sandbox", "localllm/hub")
FILES = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if path.relative_to(ROOT).parts[1] not in PACKAGES  # without the links inside localllm/
)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module(path: Path, root: Path = ROOT) -> str:
    """Return the import name of a file. All rooms are subpackages of localllm."""
    parts = path.relative_to(root).with_suffix("").parts
    inside = root == ROOT and parts[0] != "localllm"
    return ".".join(("localllm", *parts) if inside else parts).removesuffix(".__init__")


def room(module: str) -> str:
    """Return the room of a module: a folder or file in localllm, or "" for `localllm` and `__main__`."""
    found = f"{module}.".split(".")[1] if module.startswith("localllm.") else ""
    return "" if found == "__main__" else found


@cache
def imports(path: Path, *, only_at_import: bool = False) -> frozenset[str]:
    """Return the modules that a file imports. With `only_at_import`, only imports that run when the file is
    imported.
    """
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            inside = node.module == "localllm"  # the imported name is a room or a public name
            found |= {
                localllm._HOMES.get(alias.name, f"localllm.{alias.name}") if inside else node.module
                for alias in node.names
                if not (inside and alias.name == "__version__")
            }
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        if not (only_at_import and lazy):
            nodes += ast.iter_child_nodes(node)
    return frozenset(found)


# -- rooms -----------------------------------------------------------------------------------------------------------


def arrows() -> dict[str, set[str]]:
    """Return the rooms that each room imports, including lazy imports and imports for type checkers."""
    found: dict[str, set[str]] = {}
    for path in FILES:
        here = room(module(path))
        if here:
            found.setdefault(here, set()).update({room(each) for each in imports(path)} - {here, ""})
    return found


def test_a_room_imports_only_those_below_it() -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    found = arrows()
    assert found.keys() == floor.keys()
    assert [(a, b) for a, into in found.items() for b in into if floor[b] >= floor[a]] == []


def test_the_top_level_rooms_import_only_three_parts_of_base() -> None:
    for path in FILES:
        if name(path).startswith(TOP):
            shared = {each for each in imports(path) if room(each) == "base"}
            assert all(each.startswith(SHARED) for each in shared), path


def test_the_number_of_arrows_does_not_grow() -> None:
    found = arrows()
    count = sum(map(len, found.values()))
    print(f"{len(found)} rooms, {count} arrows")
    assert count <= ARROWS


def test_the_docstring_of_a_room_says_what_it_may_import_and_where_to_begin() -> None:
    for here, into in arrows().items():
        path = ROOT / ("" if here in TOP else "localllm") / here / "__init__.py"
        if path.exists():
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            found = re.search(r"^May import: (.+?)\.\nBegin with: (.+?)\Z", text, re.MULTILINE | re.DOTALL)
            assert found is not None, path
            allowed = set(re.sub(r"\(.*?\)", "", found[1]).replace("\n", " ").replace(" ", "").split(","))
            assert allowed in (into, {"thestandardlibraryonly"}, {"allroomsbelow"}), path
            files = re.findall(r"[\w/]+\.py", found[2])
            assert files, path
            assert [each for each in files if not (path.parent / each).exists()] == [], path


# -- packages, and when they are imported ----------------------------------------------------------------------------


def test_a_file_imports_the_packages_of_its_place() -> None:
    known, wrong = {*sys.stdlib_module_names, "localllm"}, []
    for path in FILES:
        place = max((p for p in FOREIGN if name(path).startswith(p + "/")), key=len, default="")
        numpy = set() if name(path).startswith(NO_NUMPY) else {"numpy"}
        allowed = known | FOREIGN.get(place, set()) | numpy
        wrong += [(name(path), m) for m in imports(path) if m.split(".")[0] not in allowed]
    assert wrong == []


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 50
    assert {name(path).split("/")[0] for path in FILES} == set(PACKAGES)


def test_nothing_imports_the_command_line() -> None:
    for path in FILES:
        if not name(path).startswith("localllm/cli/") and name(path) != "localllm/__main__.py":
            assert not any(module.startswith("localllm.cli") for module in imports(path)), path


def test_what_compiles_is_imported_when_it_is_called() -> None:
    for path in FILES:
        if not name(path).startswith("quant/compiled/"):
            early = imports(path, only_at_import=True)
            assert not {m for m in early if m.startswith(("localllm.quant.compiled", "numba"))}, path


def test_a_backend_is_imported_when_it_is_opened() -> None:
    for path in FILES:
        if not name(path).startswith(("backends/", "quant/compiled/")):
            early = {
                m for m in imports(path, only_at_import=True) if m.startswith(("localllm.backends.cpu", "llvmlite"))
            }
            allowed = {"localllm.backends.cpu.backend"} if name(path) == "localllm/cli/commands/bench.py" else set()
            assert early <= allowed, path


def test_the_hub_is_imported_when_a_model_is_fetched() -> None:
    for path in FILES:
        early = imports(path, only_at_import=True)
        assert not {m for m in early if m.startswith("huggingface_hub")}, path
        if name(path) not in ("localllm/hub/client.py", "localllm/hub/pull.py"):
            assert not {m for m in imports(path) if m.startswith("huggingface_hub")}, path


def test_the_line_editor_is_imported_when_a_terminal_is_asked() -> None:
    for path in FILES:
        early = imports(path, only_at_import=True)
        assert not {m for m in early if m.startswith("prompt_toolkit")}, path
        if name(path) != "localllm/cli/chat/editor.py":
            assert not {m for m in imports(path) if m.startswith("prompt_toolkit")}, path


def test_the_environment_is_configuration_for_the_command_line_alone() -> None:
    for path in FILES:
        if not name(path).startswith("localllm/cli/"):
            assert "LOCALLLM_" not in path.read_text(encoding="utf-8"), path
            assert not {m for m in imports(path) if m.startswith(("tomllib", "platformdirs"))}, path


@pytest.mark.parametrize(("code", "found"), [("import a.b", {"a.b"}), ("def f():\n  from c import d", {"c"})])
def test_imports_are_found_wherever_they_stand(tmp_path: Path, code: str, found: set[str]) -> None:
    (tmp_path / "m.py").write_text(code)
    assert imports(tmp_path / "m.py") == found
    assert imports(tmp_path / "m.py", only_at_import=True) == {m for m in found if m != "c"}


# -- circles ---------------------------------------------------------------------------------------------------------


def graph(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return the modules among `files` that each file imports, including lazy imports and imports for type checkers."""
    found: dict[str, set[str]] = {}
    for importer, path in files.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= (inside & files.keys()) or {node.module}
        found[importer] = names & files.keys() - {importer}
    return found


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """Return modules that form an import cycle, or an empty list."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_one_another_in_a_circle() -> None:
    files = {module(path): path for path in FILES}
    edges = graph(files)
    assert {"localllm.engine", "localllm.tokenizer"} <= edges["localllm.generation.core"]  # imported by package name
    assert "localllm.generation.speculation.setup" in edges["localllm.loading.predictor"]  # for type checkers only
    assert circle(edges) == []


@pytest.mark.parametrize(
    "late", ["import b", "from b import x", "def f():\n  import b", "if TYPE_CHECKING:\n  from b import x"]
)
def test_a_circle_is_found_however_it_hides(tmp_path: Path, late: str) -> None:
    for name, text in (("a", late), ("b", "from c import y"), ("c", "import a"), ("d", "import a")):
        (tmp_path / f"{name}.py").write_text(text)
    files = {module(path, tmp_path): path for path in tmp_path.iterdir()}
    assert set(circle(graph(files))) == {"a", "b", "c"}
    (tmp_path / "c.py").write_text("")
    assert circle(graph(files)) == []
