"""The import rules of CONTRIBUTING.md hold in every file, judged by its source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GROUND = {"localllm.printable", "localllm.notice", "localllm.regular"}  # importable everywhere; they import nothing
PACKAGES = ("localllm", "models", "backends", "plan", "quant")

# The imports that a file may have besides the standard library. The longest matching prefix of its path applies.
ALLOWED: dict[str, set[str]] = {
    "quant": {"quant", "numpy"},
    "quant/compiled": {"quant", "numpy", "numba", "llvmlite"},
    "plan": {"plan", "quant", "numpy"},
    "models": {"models", "plan", "quant", "numpy"},
    "backends": {"backends", "plan", "quant", "numpy"},
    "backends/cpu": {"backends", "plan", "quant", "numpy", "llvmlite"},
    "backends/opencl": {"backends", "plan", "quant", "numpy", "pyopencl"},
    "backends/cuda": {"backends", "plan", "quant", "numpy", "pycuda"},
    "localllm": {"localllm", "models", "backends", "plan", "quant", "numpy"},
    "localllm/template": {"localllm", "jinja2"},
    "localllm/confined": {"localllm", "tokenizers"},
    "localllm/answer": {"localllm", "numpy", "llguidance"},
    "localllm/server": {"localllm", "models", "numpy", "starlette", "uvicorn", "prometheus_client"},
    "localllm/store": {"localllm", "quant", "huggingface_hub"},
    "localllm/convert": {"localllm", "models", "plan", "quant", "numpy", "gguf"},
    "localllm/cli": {
        *("localllm", "models", "backends", "plan", "quant", "numpy"),
        *("rich", "typer", "platformdirs"),
    },
    "localllm/cli/plots": {"localllm", "matplotlib"},
    "localllm/cli/top": {"localllm", "rich", "prometheus_client"},
    "localllm/cli/chat": {"localllm", "backends", "rich", "platformdirs", "prompt_toolkit"},
}
FILES = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if path.relative_to(ROOT).parts[1] not in PACKAGES  # skip symbolic links
)


def _room(module: str, name: str = "") -> str:
    """Return `module` without the package's name, as rules name the folders."""
    if module in GROUND:
        return "ground"
    inside = f"{module}.{name}" if module == "localllm" and name in PACKAGES else module
    first, _, rest = inside.partition(".")
    return rest if first == "localllm" and rest.split(".")[0] in PACKAGES else inside


def imports(path: Path, *, only_at_import: bool = False) -> set[str]:
    """Return the modules that a file imports. `only_at_import`: only those imported with the file, not in functions."""
    found = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {_room(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            found |= {_room(node.module, alias.name) for alias in node.names}
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        if not (only_at_import and lazy):
            nodes += ast.iter_child_nodes(node)
    return found


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_a_file_imports_what_its_place_allows() -> None:
    known, wrong = {*sys.stdlib_module_names, "ground"}, []
    for path in FILES:
        place = max((p for p in ALLOWED if name(path).startswith(p + "/")), key=len)
        wrong += [(name(path), m) for m in imports(path) if m.split(".")[0] not in known | ALLOWED[place]]
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
            early = {m for m in imports(path, only_at_import=True) if m.startswith(("quant.compiled", "numba"))}
            assert early == set(), path


def test_a_backend_is_imported_when_it_is_opened() -> None:
    for path in FILES:
        if not name(path).startswith(("backends/", "quant/compiled/")):
            early = {m for m in imports(path, only_at_import=True) if m.startswith(("backends.cpu", "llvmlite"))}
            allowed = {"backends.cpu.backend"} if name(path) == "localllm/cli/commands/bench.py" else set()
            assert early <= allowed, path


def test_the_hub_is_imported_when_a_model_is_fetched() -> None:
    for path in FILES:
        early = imports(path, only_at_import=True)
        assert not {m for m in early if m.startswith("huggingface_hub")}, path
        if name(path) not in ("localllm/store/hub.py", "localllm/store/pull.py"):
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


# -- cycles ----------------------------------------------------------------------------------------------------------


def module(path: Path, root: Path = ROOT) -> str:
    """Return the import name of a file; all rooms are in localllm."""
    parts = path.relative_to(root).with_suffix("").parts
    inside = root == ROOT and parts[0] != "localllm"
    return ".".join(("localllm", *parts) if inside else parts).removesuffix(".__init__")


def graph(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return the import graph among `files`, with imports in functions and for type checkers."""
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


def circle(files: Mapping[str, Path]) -> list[str]:
    """Return an import cycle; nothing without one."""
    try:
        TopologicalSorter(graph(files)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_one_another_in_a_circle() -> None:
    files = {module(path): path for path in FILES}
    edges = graph(files)
    assert {"localllm.engine", "localllm.tokenizer"} <= edges[
        "localllm.generation.core"
    ]  # names, and modules of packages
    assert "localllm.speculation.setup" in edges["localllm.predictor"]  # imported only for type checkers
    assert circle(files) == []


@pytest.mark.parametrize(
    "late", ["import b", "from b import x", "def f():\n  import b", "if TYPE_CHECKING:\n  from b import x"]
)
def test_a_circle_is_found_however_it_hides(tmp_path: Path, late: str) -> None:
    for name, text in (("a", late), ("b", "from c import y"), ("c", "import a"), ("d", "import a")):
        (tmp_path / f"{name}.py").write_text(text)
    files = {module(path, tmp_path): path for path in tmp_path.iterdir()}
    assert set(circle(files)) == {"a", "b", "c"}
    (tmp_path / "c.py").write_text("")
    assert circle(files) == []
