"""The test models: a GGUF header and llama.cpp's logits are stored, and the weights are computed from a rule.

Every weight is a fixed function of the tensor's name and the weight's index. So a model takes 25 KB, not megabytes.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from localllm.gguf import open_gguf
from localllm.plan import BLOCK
from tests.models.support import Driver, MemoryWeight, nmse

EMBEDDINGS = {  # architectures that multiply the embedding by a large factor
    "gemma": 1 / 4, "gemma2": 1 / 4, "gemma3": 1 / 4, "gemma3n": 1 / 4, "gemma4": 1 / 4, "gemma-embedding": 1 / 4,
    "afmoe": 1 / 16, "grok": 1 / 32,
}  # fmt: skip
# Post-norm encoders, whose layers need small weights.
WEAK = ("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3")
DIFFUSION = ("dream", "llada", "rnd1")
SCALES = ("layer_output_scale", "altup_correct_scale", "time_mix_k_k", "time_mix_k_a")
PLAIN = (
    "token_embd", "position_embd", "attn_sinks", "token_types", "time_mix_first.", "time_mix_decay.", "time_mix_a0.",
    "time_mix_v0.", "time_mix_r_k.",
)  # fmt: skip


def values(name: str, shape: tuple[int, ...], architecture: str, seed: int = 1) -> np.ndarray:
    """Return the float32 weights of a tensor in row-major `shape`. The first matching rule applies."""
    bits = np.random.PCG64(zlib.crc32(name.encode()) * 1000003 + seed).random_raw(math.prod(shape))
    u = (bits >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1.0  # [-1, 1)
    last, columns = name.rpartition(".")[2], shape[-1]
    v = u * (math.sqrt(3.0) * _gain(name, architecture) / math.sqrt(columns))
    if name.endswith("ffn_gate_inp.scale"):
        v = math.sqrt(columns) * (1 + 0.25 * u)
    elif last in ("scale", "input_scale", "scales") or any(part in name for part in SCALES) or _connection(name):
        v = 1 + 0.25 * u
    elif last == "ssm_a":
        v = -(0.25 + 0.75 * abs(u))
    elif "exp_probs_b" in name:
        v = 0.1 * u
    elif last == "bias":
        v = 0.3 * u
    elif "norm" in name or "_ln" in name:
        v = 1 + 0.25 * u
    elif name.startswith(("rope_freqs", "rope_factors_")) or ".rope_freqs" in name:
        v = 1 + 3 * abs(u)
    elif "conv1d" in name or "shortconv.conv" in name:
        v = 0.8 * u
    elif name == "token_embd.weight":
        v = EMBEDDINGS.get(architecture, 1.0) * u
    elif any(part in name for part in PLAIN) or last == "ssm_d" or name == "hrm.z_l_init":
        v = u
    elif "mix_lerp" in name:
        v = 0.5 + 0.5 * u
    elif "time_mix_w0." in name:
        v = u - 2
    return v.astype(np.float32).reshape(shape)


def chosen(name: str, shape: tuple[int, ...], experts: int, seed: int = 1) -> np.ndarray:
    """Return an int32 table of experts by token (vocabulary, used), with consecutive experts for each token."""
    bits = np.random.PCG64(zlib.crc32(name.encode()) * 1000003 + seed).random_raw(shape[0])
    first = (bits >> np.uint64(40)).astype(np.int64)[:, None]
    return ((first + np.arange(shape[1])) % experts).astype(np.int32)


def _connection(name: str) -> bool:
    """Return whether the tensor is a scale of hyper-connections."""
    return "hc_" in name and name.endswith("_scale.weight")


def _gain(name: str, architecture: str) -> float:
    if name.startswith(("enc.", "dec.")) and name.endswith("attn_q.weight"):
        return 0.25
    return 0.5 if architecture in WEAK and (".ffn_down" in name or ".attn_output." in name) else 2.0


LIMIT = 1e-6  # maximum NMSE against llama.cpp, which reads GELU from a float16 table; models without it stay below 1e-9
COARSE = {
    "gemma3n": 0.05,  # exact GELU has a larger effect, because many operations follow each GELU
    "gemma4": 2e-5,
    "t5-gated": 1e-5,
    # llama.cpp runs sparse attention only with flash attention, which causes an error of 5e-6.
    "minimax-m3-3of10": 2e-5,
}
CHAOTIC = {  # models that amplify errors even with the float16 GELU
    "gemma3n": 1e-4,  # 22 layers that amplify rounding
    "minimax-m3-3of10": COARSE["minimax-m3-3of10"],
}

NEVER = -1e38  # logits up to this represent minus infinity

SPACE = 128 << 20  # bytes for the tensors, more than any model needs; a hole in a file takes no disk space


@dataclass(frozen=True)
class KitModel:
    """A test model, given by the path of its stored header and results."""

    path: Path

    @cached_property
    def stored(self) -> dict[str, np.ndarray]:
        with np.load(self.path) as file:
            return dict(file)

    @property
    def prompt(self) -> int:
        """Return the number of tokens that llama.cpp evaluated in one batch. The others followed one by one."""
        return int(self.stored["prompt_len"].item())

    def limit(self, limits: dict[str, float] = COARSE) -> float:
        """Return the largest allowed error against llama.cpp's results."""
        return next((limit for name, limit in limits.items() if self.path.stem.startswith(name)), LIMIT)

    @property
    def tokens(self) -> list[int]:
        return [int(token) for token in self.stored["tokens"]]

    @property
    def room(self) -> int:
        """Return the number of KV cache positions for all tokens, rounded up to whole blocks."""
        return -(-(len(self.text) + len(self.tokens)) // BLOCK) * BLOCK

    @property
    def text(self) -> list[int]:
        """Return the encoder's tokens, if the model has an encoder. The decoder gets the others."""
        return [int(token) for token in self.stored.get("enc_tokens", ())]

    def error(self, logits: np.ndarray) -> float:
        """Return the largest normalized mean squared error of a token, except where llama.cpp differs from the trained
        model.
        """
        theirs, given = self.stored["logits"], slice(None)
        if theirs.min() <= NEVER:  # tokens that llama.cpp masks
            given = theirs[0] > NEVER
            assert np.isneginf(logits[:, ~given]).all()
        errors = nmse(logits[:, given], theirs[:, given])
        return float(errors[self.stored.get("rows", slice(None))].max())

    def logits(self, driver: Driver) -> np.ndarray:
        """Return the logits of all tokens (T, vocabulary), evaluated as by llama.cpp: the prompt, then one by one.

        llama.cpp has no KV cache for diffusion models, so each later token was a separate text.
        """
        text, prompt = self.text, self.tokens[: self.prompt]
        if text:
            driver.borders = [len(text)]
        results = [driver.step([(0, text + prompt)], range(len(text), len(text + prompt)))]
        for token in self.tokens[self.prompt :]:
            if self.path.stem.startswith(DIFFUSION):
                driver.lengths[0] = 0
            results.append(driver.step([(0, [token])]))
        return np.concatenate(results)

    def write(self, path: Path, seed: int = 1) -> Path:
        """Write the model as a GGUF."""
        file = open_gguf(self._header(path))
        try:
            architecture = str(file.metadata["general.architecture"])
            infos = [(name, tuple(tensor.shape), tensor.format) for name, tensor in file.tensors.items()]
            experts = file.metadata.get(f"{architecture}.expert_count", 0)
        finally:
            file.close()
        with path.open("r+b") as out:
            out.seek(len(self.stored["header"]))
            for name, shape, format in infos:
                if format == "I32":
                    data = chosen(name, shape, experts, seed).tobytes()
                else:
                    data = values(name, shape, architecture, seed).astype("<f4").tobytes()
                out.write(data + bytes(-len(data) % 32))
            out.truncate()
        return path

    def _header(self, path: Path) -> Path:
        """Return a GGUF with the header, and a hole in place of the tensors."""
        with path.open("wb") as out:
            out.write(self.stored["header"].tobytes())
            out.truncate(len(self.stored["header"]) + SPACE)
        return path

    @property
    def architecture(self) -> str:
        """Return the name of the architecture in the header."""
        with TemporaryDirectory() as folder, open_gguf(self._header(Path(folder) / "model.gguf")) as file:
            return str(file.metadata["general.architecture"])

    def loaded(self, seed: int = 1) -> tuple[dict[str, Any], dict[str, MemoryWeight]]:
        """Return the metadata and all tensors, in memory."""
        with TemporaryDirectory() as folder:
            file = open_gguf(self.write(Path(folder) / "model.gguf", seed))
            try:
                tensors = {
                    name: MemoryWeight(name, t.format, tuple(t.shape), t.read(0, math.prod(t.shape[:-1])))
                    for name, t in file.tensors.items()
                }
                return dict(file.metadata), tensors
            finally:
                file.close()


def _models(folder: Path) -> dict[str, KitModel]:
    return {path.stem: KitModel(path) for path in sorted(folder.glob("*.npz"))}


KIT = _models(Path(__file__).parent / "kit_models")
EMBEDDERS = _models(Path(__file__).parent / "kit_models" / "embeddings")  # their stored results are embeddings
# llama.cpp deviates from the trained models here.
DEPARTURES = _models(Path(__file__).parent / "kit_models" / "departures")
