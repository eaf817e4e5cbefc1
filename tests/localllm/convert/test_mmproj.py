"""`quantize FOLDER --mmproj OUT` writes llama.cpp's bytes, and the encoders give the embeddings of transformers."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from localllm import load
from localllm.backends.reference import ReferenceBackend
from localllm.cli.commands.show_encoders import encoders
from localllm.convert import ConvertError, EncoderCheckpoint
from localllm.gguf import open_gguf
from localllm.loading.mmproj import mmproj_beside
from tests.localllm.convert import checkpoints
from tests.localllm.convert.hf_multimodal import TEXT
from tests.localllm.convert.mmproj_cases import BREAK, DATA, TYPES, convert, digests, given, stored, tensors_of, write
from tests.localllm.convert.mmproj_mutated import check
from tests.localllm.convert.support import edit_tensors, save, save_zeros, values
from tests.localllm.media_models import png
from tests.localllm.support import localllm, write_model
from tests.models.encoders.support import bound

SPECS = stored()
EMBEDDED = dict(np.load(DATA / "mmproj.npz"))
CONVERTED = [name for name, spec in SPECS.items() if "llama_cpp" in spec]
CLOSE = 5e-6  # relative error of embeddings in F32
KINDS: dict[str, Literal["vision", "audio"]] = {"vision": "vision", "audio": "audio"}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", CONVERTED)
def test_bytes_of_llama_cpp(name: str, kind: str, tmp_path: Path) -> None:
    ours, theirs = digests(convert(SPECS[name], tmp_path, kind)), SPECS[name]["llama_cpp"][kind]
    assert ours["keys"].keys() == theirs["keys"].keys()
    for key, value in theirs["keys"].items():
        assert ours["keys"][key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
    assert ours["tensors"].keys() == theirs["tensors"].keys()
    for tensor, (format, shape, told) in theirs["tensors"].items():
        if isinstance(told, list):  # whose last bits depend on the program that computes them
            told = pytest.approx(told, rel=1e-3 if format != "F32" else 1e-5, abs=2e-4)
        assert ours["tensors"][tensor] == [format, shape, told], tensor


@pytest.mark.parametrize("key", sorted(key.removesuffix(":out") for key in EMBEDDED if key.endswith(":out")))
def test_embeddings_of_transformers(key: str, tmp_path: Path) -> None:
    """With the checkpoint's own formats, the encoder gives the embeddings of the checkpoint's own program."""
    name, kind = key.split(":")
    with open_gguf(convert(SPECS[name], tmp_path, "COPY")) as file:
        with bound(ReferenceBackend(), file.metadata, file.tensors, KINDS[kind]) as encoder:
            own = given(kind, EMBEDDED[f"{key}:shape"])
            found = encoder.encode(list(own) if kind == "vision" else [own])
        if key + ":rows" in EMBEDDED:
            found = found[EMBEDDED[f"{key}:rows"]]
        assert relative(found, EMBEDDED[f"{key}:out"]) < CLOSE


def relative(found: np.ndarray, truth: np.ndarray) -> float:
    assert found.shape == truth.shape
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


@pytest.mark.parametrize("name", [name for name in SPECS if name != "deepseekocr"])
def test_mutated_checkpoints(name: str, tmp_path: Path) -> None:
    """A checkpoint with a missing or strange key or tensor is accepted, or refused in one line."""
    found = [check(name, tmp_path / str(seed), seed) for seed in range(8)]
    assert any(found)


@pytest.mark.parametrize(
    "name",
    [
        "vision_tower.vision_model.encoder.layers.1.self_attn.k_proj.weight",
        "multi_modal_projector.mm_soft_emb_norm.weight",
    ],
)  # fmt: skip
def test_missing_tensors_are_named_as_in_the_checkpoint(name: str, tmp_path: Path) -> None:
    folder = write(SPECS["gemma3"], tmp_path)
    edit_tensors(folder / "model.safetensors", lambda header: header.pop(name))
    with pytest.raises(ConvertError, match=r"missing.*made of ") as error:
        EncoderCheckpoint(folder)
    assert str(error.value).endswith(f"{name.replace('.vision_model', '')})")


def test_missing_settings_are_those_that_transformers_assumes(tmp_path: Path) -> None:
    folder = write(SPECS["smolvlm"], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["vision_config"]["intermediate_size"], config["scale_factor"]
    (folder / "config.json").write_text(json.dumps(config))
    with EncoderCheckpoint(folder) as source:
        assert source.metadata["clip.vision.feed_forward_length"] == 3072
        assert source.metadata["clip.vision.projector.scale_factor"] == 2


def test_the_row_of_img_break_is_that_of_the_token(tmp_path: Path) -> None:
    """llama.cpp's converter leaves it out for the names of the hub's checkpoints, and then so does its encoder."""
    with EncoderCheckpoint(write(SPECS["pixtral"], tmp_path)) as source:
        found = values(source.tensors["v.token_embd.img_break"])
    table = tensors_of(SPECS["pixtral"])["language_model.model.embed_tokens.weight"]
    np.testing.assert_array_equal(found, table[BREAK])


@pytest.mark.parametrize("name", SPECS)
def test_show_of_a_converted_file(name: str, tmp_path: Path) -> None:
    """Preprocessing and encoders accept every converted file, also quantized."""
    with open_gguf(convert(SPECS[name], tmp_path, "Q4_0")) as file:
        for facts in encoders(file).values():
            assert facts["layers"] or name == "gemma4-unified"
            assert min(facts["tokens"].values()) > 0
            assert "problem" not in facts


def test_the_command(tmp_path: Path) -> None:
    folder, out = write(SPECS["qwen2.5vl"], tmp_path / "model"), tmp_path / "mmproj.gguf"
    done = localllm("quantize", folder, "--mmproj", out)
    assert done.returncode == 0, done.stderr
    assert digests(out) == digests(convert(SPECS["qwen2.5vl"], tmp_path / "again", "F16"))
    assert "exists; give another name" in localllm("quantize", folder, "--mmproj", out).stderr
    assert localllm("quantize", folder, "--mmproj", out, "q4_k_m", "--force", "--dry-run").returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "mmproj.gguf", "model"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--mmproj", "OUT", "q9"], "unknown type 'q9'"),
        (["--mmproj", "OUT", "other.gguf", "f16"], "expected FOLDER [TYPE] with --mmproj OUT"),
        (["--mmproj", "OUT", "--fit", "1GB"], "--fit needs a text model"),
        (["--mmproj", "OUT", "--imatrix", "x"], "--imatrix needs a text model"),
    ],
)  # fmt: skip
def test_refused_commands(words: list[str], problem: str, tmp_path: Path) -> None:
    folder = write(SPECS["gemma3"], tmp_path / "model")
    given = [str(tmp_path / "out.gguf") if word == "OUT" else word for word in words]
    done = localllm("quantize", folder, *given)
    assert done.returncode != 0
    assert problem in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("name", ["Gemma3nForConditionalGeneration", "LlamaForCausalLM", "\x1b[2J"])
def test_other_classes_are_refused_by_name(name: str, tmp_path: Path) -> None:
    write(SPECS["gemma3"] | {"config": SPECS["gemma3"]["config"] | {"architectures": [name]}}, tmp_path)
    with pytest.raises(ConvertError, match="cannot be converted; use an mmproj file") as error:
        EncoderCheckpoint(tmp_path)
    assert name.removeprefix("\x1b") in str(error.value)
    assert "\x1b" not in str(error.value)


def test_llava_of_other_encoders_is_refused(tmp_path: Path) -> None:
    config = copy.deepcopy(SPECS["pixtral"]["config"])
    config["vision_config"]["model_type"] = "clip_vision_model"
    with pytest.raises(ConvertError, match="only encoders of type pixtral"):
        EncoderCheckpoint(write(SPECS["pixtral"] | {"config": config}, tmp_path))


def test_a_huge_kernel_is_not_read(tmp_path: Path) -> None:
    """A tensor that conversion reads as a whole has a limit. The file has no content, so it takes no space."""
    spec = SPECS["qwen2.5vl"]
    folder = write(spec | {"tensors": []}, tmp_path)
    shapes = {name: shape for name, shape, _ in spec["tensors"]}
    save_zeros(folder / "model.safetensors", shapes | {"visual.patch_embed.proj.weight": (8192, 3, 2, 112, 112)})
    with pytest.raises(ConvertError, match="more than any model's"):
        EncoderCheckpoint(folder)


@pytest.mark.parametrize(
    ("name", "path", "value", "problem"),
    [
        ("qwen3vl", ("vision_config", "depth"), 2_000_000_000, "has 2000000000 layers; supported: at most"),
        ("qwen3vl", ("vision_config", "patch_size"), 90_000_000, "expected an integer from 1 to 256"),
        ("gemma4", ("audio_config", "hidden_size"), 1 << 30, "more than 32 bits"),
        ("qwen3asr", ("thinker_config", "audio_config", "d_model"), 4_000_000, "d_model is 4000000"),
    ],
)  # fmt: skip
def test_huge_numbers_fill_no_memory(
    name: str, path: tuple[str, ...], value: int, problem: str, tmp_path: Path
) -> None:
    config = copy.deepcopy(SPECS[name]["config"])
    table = config
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    folder = write(SPECS[name] | {"config": config}, tmp_path)
    with pytest.raises(ConvertError, match=problem):
        EncoderCheckpoint(folder)


def test_buffers_are_skipped(tmp_path: Path) -> None:
    """Older checkpoints store numbers of positions, which no encoder reads."""
    folder = write(SPECS["gemma3"], tmp_path)
    name = "vision_tower.vision_model.embeddings.position_ids"
    more = {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
    edit_tensors(folder / "model.safetensors", lambda header: header.update(more))
    with EncoderCheckpoint(folder) as source:
        assert len(source.tensors) == len(SPECS["gemma3"]["tensors"])


def test_a_converted_file_reads_a_picture(tmp_path: Path) -> None:
    """From the folder to the embeddings of a picture in a prompt, which equal the encoder over the prepared pixels."""
    model = write_model(tmp_path / "tiny-Q8_0.gguf")
    out = convert(SPECS["gemma3"], tmp_path, "COPY")
    (tmp_path / "a.png").write_bytes(png())
    with load(model, backend="cpu", threads=1, spec="off", mmproj=str(out)) as opened:
        chunks = opened.media("a <__media__> b", str(tmp_path / "a.png"))
        (picture,) = [chunk for chunk in chunks if chunk.kind == "image"]
        found = picture.embeddings
    assert len(found) == 16  # mm_tokens_per_image
    with open_gguf(out) as file, bound(ReferenceBackend(), file.metadata, file.tensors, "vision") as encoder:
        assert relative(found, encoder.encode(picture.tensors)) < 1e-5


def test_converting_the_text_names_the_command_for_the_encoders(tmp_path: Path) -> None:
    """The printed command runs, and the model finds its file."""
    name, folder, out = "Idefics3ForConditionalGeneration", tmp_path / "my model", tmp_path / "my-Q8_0.gguf"
    config = json.loads((checkpoints.write(name, folder) / "config.json").read_text())
    text = {key: tensor for key, tensor in checkpoints.tensors_of(name).items() if TEXT.match(key)}
    done = localllm("quantize", folder, tmp_path / "x.gguf", "Q8_0", "--dry-run")
    assert "note: --mmproj cannot convert its encoders: " in done.stderr
    words = {path.name: path.read_bytes() for path in folder.glob("tokenizer*")}
    write(SPECS["idefics3"], folder)
    for file, content in words.items():
        (folder / file).write_bytes(content)
    seen = json.loads((folder / "config.json").read_text()) | {"text_config": config["text_config"]}
    (folder / "config.json").write_text(json.dumps(seen))
    save(folder / "model.safetensors", text | tensors_of(SPECS["idefics3"]))
    done = localllm("quantize", folder, out, "Q8_0")
    assert done.returncode == 0, done.stderr
    start = "note: to convert its encoders of pictures and sound, run: "
    [command] = [line.removeprefix(start) for line in done.stderr.splitlines() if line.startswith(start)]
    assert command == f"localllm quantize '{folder}' --mmproj {tmp_path}/mmproj-my-F16.gguf"
    assert localllm(*shlex.split(command)[1:]).returncode == 0
    assert mmproj_beside(out) == [tmp_path / "mmproj-my-F16.gguf"]
