"""A name selects one file in the stores of four programs, in a documented order. No file is copied."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from localllm.hub import NotHere, StoreError, everything, find, locate
from localllm.hub.search import matches, nearest_models
from localllm.loading.resolve import FolderError, resolve
from tests.localllm.hub.stores import GGUF, blob, hub_model, llama_model, lm_studio_model, ollama_model, places


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Create models in every store."""
    hub_model(tmp_path, "ann/Small-GGUF", "Small-Q4_K_M.gguf", "Small-Q8_0.gguf", "mmproj-F16.gguf", "README.md")
    hub_model(tmp_path, "ann/Big-GGUF", *(f"Q8_0/Big-Q8_0-{n:05d}-of-00002.gguf" for n in (1, 2)))
    hub_model(tmp_path, "ann/Text", "config.json", "model.safetensors")
    llama_model(tmp_path, "bob/Mid-GGUF", "Mid-Q5_K_M.gguf")
    ollama_model(tmp_path, "registry.ollama.ai/library/llama3.2/1b", "Q8_0")
    ollama_model(tmp_path, "registry.ollama.ai/library/qwen3/latest")
    ollama_model(tmp_path, "registry.ollama.ai/carl/own/v1")
    ollama_model(tmp_path, "hf.co/dora/Tale-GGUF/Q4_0", "unknown")
    lm_studio_model(tmp_path, "eve/Song-GGUF/Song-Q6_K.gguf")
    lm_studio_model(tmp_path, "eve/Song-GGUF/mmproj-Song.gguf")
    lm_studio_model(tmp_path, "loose.gguf")
    return tmp_path


def test_every_store_is_listed_with_its_names(home: Path) -> None:
    assert [(each.name, each.store, each.label, len(each.paths)) for each in everything(places(home))] == [
        ("ann/Big-GGUF:Q8_0", "Hugging Face", "Q8_0", 2),
        ("ann/Small-GGUF:Q4_K_M", "Hugging Face", "Q4_K_M", 1),
        ("ann/Small-GGUF:Q8_0", "Hugging Face", "Q8_0", 1),
        ("bob/Mid-GGUF:Q5_K_M", "llama.cpp", "Q5_K_M", 1),
        ("hf.co/dora/Tale-GGUF:Q4_0", "Ollama", "Q4_0", 1),
        ("carl/own:v1", "Ollama", "Q4_K_M", 1),
        ("llama3.2:1b", "Ollama", "Q8_0", 1),
        ("qwen3:latest", "Ollama", "Q4_K_M", 1),
        ("eve/Song-GGUF:Q6_K", "LM Studio", "Q6_K", 1),
        ("loose", "LM Studio", "", 1),
    ]
    assert all(not each.problem and each.bytes >= len(GGUF) and each.used for each in everything(places(home)))


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("ann/Small-GGUF:Q4_K_M", "Small-Q4_K_M.gguf"),
        ("ANN/small-gguf:q4", "Small-Q4_K_M.gguf"),
        ("ann/Small-GGUF:Small-Q8_0.gguf", "Small-Q8_0.gguf"),
        ("hf.co/ann/Small-GGUF:q8_0", "Small-Q8_0.gguf"),
        ("Small-GGUF:Q8", "Small-Q8_0.gguf"),
        ("Small-Q8_0.gguf", "Small-Q8_0.gguf"),
        ("small-q8_0", "Small-Q8_0.gguf"),
        ("ann/Big-GGUF", "Q8_0/Big-Q8_0-00001-of-00002.gguf"),
        ("Big-Q8_0", "Q8_0/Big-Q8_0-00001-of-00002.gguf"),
        ("bob/Mid-GGUF", "bob_Mid-GGUF_Mid-Q5_K_M.gguf"),
        ("bob/Mid-GGUF:Q5_K_M", "bob_Mid-GGUF_Mid-Q5_K_M.gguf"),
        ("eve/Song-GGUF:Q6_K", "eve/Song-GGUF/Song-Q6_K.gguf"),
        ("loose", "loose.gguf"),
    ],
)
def test_a_model_has_a_full_name_and_short_ones(home: Path, name: str, ending: str) -> None:
    assert str(locate(name, places(home))).endswith(ending)


@pytest.mark.parametrize(
    ("name", "manifest"),
    [
        ("llama3.2:1b", "registry.ollama.ai/library/llama3.2/1b"),
        ("llama3.2", "registry.ollama.ai/library/llama3.2/1b"),
        ("qwen3", "registry.ollama.ai/library/qwen3/latest"),
        ("qwen3:latest", "registry.ollama.ai/library/qwen3/latest"),
        ("carl/own:v1", "registry.ollama.ai/carl/own/v1"),
        ("hf.co/dora/Tale-GGUF:Q4_0", "hf.co/dora/Tale-GGUF/Q4_0"),
        ("dora/Tale-GGUF", "hf.co/dora/Tale-GGUF/Q4_0"),
    ],
)
def test_a_model_of_ollama_is_its_blob(home: Path, name: str, manifest: str) -> None:
    expected = blob(home / "elsewhere", GGUF + manifest.encode()).replace(":", "-")
    assert locate(name, places(home)) == home / ".ollama/models/blobs" / expected


def test_stores_are_searched_in_order_and_full_names_before_short_ones(home: Path) -> None:
    lm_studio_model(home, "ann/Small-GGUF/Small-Q8_0.gguf")
    lm_studio_model(home, "zoe/Small-GGUF/Small-Q8_0.gguf")
    assert find("ann/Small-GGUF:Q8_0", everything(places(home))).store == "Hugging Face"
    assert find("Small-GGUF:Q8_0", everything(places(home))).store == "Hugging Face"
    assert find("zoe/Small-GGUF", everything(places(home))).store == "LM Studio"
    ollama_model(home, "registry.ollama.ai/library/small-q8_0/latest")
    # the name matches Ollama's full name, but only a file name in other stores
    assert find("small-q8_0", everything(places(home))).store == "Ollama"


def test_an_ambiguous_name_lists_what_it_may_mean(home: Path) -> None:
    with pytest.raises(StoreError, match=r"give one of ann/Small-GGUF:Q4_K_M, ann/Small-GGUF:Q8_0$"):
        locate("ann/Small-GGUF", places(home))
    ollama_model(home, "registry.ollama.ai/library/llama3.2/3b")
    with pytest.raises(StoreError, match=r"llama3.2 is ambiguous: give one of llama3.2:1b, llama3.2:3b$"):
        locate("llama3.2", places(home))
    hub_model(home, "ann/Twins", *(f"{n:02d}-Q4_0.gguf" for n in range(20)))
    with pytest.raises(StoreError, match=r"ann/Twins:07-Q4_0 and 12 more$"):
        locate("ann/Twins:Q4_0", places(home))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("./model.gguf", "No such file: ./model.gguf"),
        ("sub/dir/model.gguf", "No such file: sub/dir/model.gguf"),
        (
            "ann/Small-GGUF:Q2_K",
            "ann/Small-GGUF:Q2_K is not on this computer; here is ann/Small-GGUF:Q4_K_M, ann/Small",
        ),
        ("new/Model-GGUF", "new/Model-GGUF is not on this computer; `localllm pull new/Model-GGUF` downloads it"),
        ("lama3.2:1b", "did you mean llama3.2:1b?"),
        ("nothing", "No such file or model: nothing; `localllm list` shows"),
        (":", "No such file or model: :; `localllm list`"),
        (":1b", "No such file or model: :1b"),
        ("a\x1b[2Jb", r"No such file or model: a\x1b[2Jb"),
    ],
)
def test_an_unknown_name_says_what_to_do(home: Path, name: str, told: str) -> None:
    with pytest.raises(NotHere) as caught:
        locate(name, places(home))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelled_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model-Q8_0.gguf").touch()
    with pytest.raises(NotHere, match=r"did you mean .*/model-Q8_0\.gguf\?$"):
        locate(str(tmp_path / "modell-Q8_0.gguf"), places(tmp_path))


def test_of_several_commits_that_of_main_counts(tmp_path: Path) -> None:
    hub_model(tmp_path, "ann/New", "a-Q4_0.gguf", commit="1" * 40, data=b"old")
    hub_model(tmp_path, "ann/New", "a-Q4_0.gguf", commit="2" * 40, data=b"new")
    hub_model(tmp_path, "ann/New", "b-Q8_0.gguf", commit="1" * 40, main=False)
    found = everything(places(tmp_path))
    assert [(each.name, each.path.parent.name) for each in found] == [
        ("ann/New:Q4_0", "2" * 40),
        ("ann/New:Q8_0", "1" * 40),
    ]


def test_an_incomplete_model_is_named_with_what_is_missing(tmp_path: Path) -> None:
    folder = hub_model(tmp_path, "ann/Big", *(f"b-Q8_0-{n:05d}-of-00003.gguf" for n in (1, 3)))
    with pytest.raises(NotHere, match=r"ann/Big:Q8_0 \(Hugging Face\): part 2 of the model is missing"):
        locate("ann/Big", places(tmp_path))
    next((folder / "blobs").iterdir()).unlink()
    with pytest.raises(NotHere, match="its file is missing"):
        locate("ann/Big", places(tmp_path))


def test_llama_cpp_s_newer_layout_is_read_too(tmp_path: Path) -> None:
    hub_model(tmp_path, "ann/Cached", "c-Q4_0.gguf")
    (tmp_path / ".cache/huggingface/hub").rename(tmp_path / ".cache/llama.cpp")
    assert find("ann/Cached", everything(places(tmp_path))).store == "llama.cpp"


def test_a_file_in_two_stores_is_listed_once(tmp_path: Path) -> None:
    hub_model(tmp_path, "ann/Cached", "c-Q4_0.gguf")
    (tmp_path / ".cache/llama.cpp").symlink_to(tmp_path / ".cache/huggingface/hub")
    assert [each.store for each in everything(places(tmp_path))] == ["Hugging Face"]


def test_a_file_of_ollama_with_two_names_is_found_by_both(tmp_path: Path) -> None:
    manifest = ollama_model(tmp_path, "registry.ollama.ai/library/llama3.2/3b")
    manifest.with_name("latest").write_bytes(manifest.read_bytes())
    assert locate("llama3.2", places(tmp_path)) == locate("llama3.2:3b", places(tmp_path))


def test_the_nearest_name_may_be_a_short_one(home: Path) -> None:
    models = everything(places(home))
    assert nearest_models("qwen33", models) == "qwen3:latest"
    assert nearest_models("smal-gguf", models) in ("ann/Small-GGUF:Q4_K_M", "ann/Small-GGUF:Q8_0")
    assert nearest_models("xyzzy", models) == ""
    assert matches("xyzzy", models) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("lama3.2:1b", "did you mean llama3.2:1b? `localllm pull llama3.2:1b` downloads it"),
        ("llama-3.2-3b", "did you mean llama3.2:3b?"),
        ("gemma:2b", "did you mean gemma3:1b, gemma3:4b or gemma3:12b?"),
        ("dmeo", "did you mean demo?"),
        ("wirter", "did you mean writer?"),
    ],
)
def test_a_misspelled_name_is_answered_by_the_near_ones(tmp_path: Path, name: str, meant: str) -> None:
    with pytest.raises(NotHere) as caught:
        locate(name, places(tmp_path), others=("demo", "draft", "writer"))
    assert meant in str(caught.value)


def test_a_near_name_on_this_computer_comes_first(home: Path) -> None:
    with pytest.raises(NotHere, match=r"lama3\.2:3b; did you mean llama3\.2:1b\? `localllm list`"):
        locate("lama3.2:3b", places(home))


@pytest.mark.parametrize("name", ["xyzzy", "mistral", "llava:7b", "qwen4", "phi3", "Hello", "tmp", "3", "a"])
def test_a_name_that_only_resembles_another_model_is_answered_by_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotHere) as caught:
        locate(name, places(tmp_path), others=("demo", "draft"))
    assert "did you mean" not in str(caught.value)


# -- forms of MODEL ------------------------------------------------------------------------------------------------


def test_a_path_comes_first_then_the_box_then_the_stores(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))
    monkeypatch.setenv("HOME", str(home))
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    ollama_model(home, "registry.ollama.ai/library/demo/latest")
    assert resolve("demo").name == "demo.gguf"
    assert resolve("llama3.2:1b").parent.name == "blobs"
    for name in ("demo", "llama3.2:1b"):
        Path(name).write_bytes(GGUF)
        assert resolve(name) == Path(name)
    assert resolve(Path("none")) == Path("none")  # a Path is never looked up by name


def test_a_folder_says_the_next_step(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    assert resolve(str(folder), folders=True) == folder
    with pytest.raises(FolderError, match="a folder without GGUF files"):
        resolve(str(folder))
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()
    with pytest.raises(FolderError, match=rf"`localllm quantize {folder} OUT\.gguf Q4_K_M` makes a file that runs"):
        resolve(folder)
    (folder / "config.json").unlink()
    for number in range(7):
        (folder / f"{number}.gguf").touch()
    with pytest.raises(FolderError, match=r"give one of its files: 0\.gguf, 1\.gguf, .*4\.gguf and 2 more"):
        resolve(folder)


def test_finding_opens_no_weights(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {str(path) for path in home.rglob("*") if path.is_file() and path.read_bytes().startswith(GGUF)}
    opened: list[str] = []
    original = os.open

    def noted(file: Any, *words: Any, **more: Any) -> Any:
        opened.append(os.path.realpath(file) if isinstance(file, str | Path) else "")
        return original(file, *words, **more)

    monkeypatch.setattr(os, "open", noted)
    assert len(everything(places(home))) == 10
    assert len(opened) > 5  # manifests and other small files
    assert not weights & set(opened)
