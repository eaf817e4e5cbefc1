"""Train localllm's demo chat model and its draft model, and write both as GGUFs to quantize.

    python benchmarks/demo/train.py target --minutes 60
    python benchmarks/demo/train.py tuned --minutes 15     (mostly tasks)
    python benchmarks/demo/train.py draft --minutes 15     (learns from the target's predictions)
    python benchmarks/demo/train.py export              (F32 files, and a text to quantize them on)

On a busy machine, set OMP_WAIT_POLICY=PASSIVE (measured: 3 times as fast next to four busy processes). Training needs
torch (localllm itself does not) and the texts under --texts. A run resumes from its checkpoint. Its schedule follows
the minutes of active training, so a pause loses nothing. With --tokens the schedule follows the number of tokens, which
makes runs repeatable.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from corpus import Chat, Corpus, encode, train_tokenizer
from network import CONTEXT, RMS_EPS, ROPE_BASE, SHAPES, VOCAB, Params, Shape, initial, logits
from tokenizers import Tokenizer

HERE = Path(__file__).parent
CALIBRATION_CHATS = 600


@dataclass(frozen=True, slots=True)
class Schedule:
    """The training schedule: batch size in tokens, peak learning rates, and the shares of warm-up and decay."""

    minutes: float
    tokens: int | None = None  # length of the run in tokens; None: in minutes
    batch_tokens: int = 8192
    row_tokens: int = 512
    long_share: float = 0.8  # share of the run after which sequences are CONTEXT tokens long
    warmup: float = 0.02
    decay: float = 0.7
    peak: float = 1.0  # factor of the learning rates below
    matrix_rate: float = 0.02
    other_rate: float = 3e-3

    def done(self, active: float, tokens: int) -> float:
        """Return the completed share of the run after `active` seconds and `tokens` tokens."""
        return tokens / self.tokens if self.tokens else active / (60 * self.minutes)

    def rate(self, done: float) -> float:
        """Return the learning-rate factor after the share `done` of the run: warm-up, constant, decay to zero."""
        return self.peak * max(0.0, min(1.0, (done + 1e-3) / self.warmup, (1.0 - done) / self.decay))


def orthogonal(update: torch.Tensor) -> torch.Tensor:
    """Return matrices (n, rows, columns) with their singular values moved towards 1 (Newton-Schulz, as in Muon)."""
    tall = update.shape[1] > update.shape[2]
    x = update.transpose(1, 2) if tall else update
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.transpose(1, 2) if tall else x).float()


class Optimizer:
    """Muon for the layers' matrices (K. Jordan 2024), Adam for the embedding and the norms."""

    def __init__(self, params: Params, schedule: Schedule) -> None:
        self.schedule = schedule
        others = [value for name, value in params.items() if not _is_layer_matrix(name, value)]
        self.adam = torch.optim.Adam(others, lr=schedule.other_rate, betas=(0.9, 0.95), eps=1e-9)
        by_size: dict[tuple[int, ...], list[str]] = {}
        for name, value in params.items():
            if _is_layer_matrix(name, value):
                by_size.setdefault(tuple(value.shape), []).append(name)
        self.groups = list(by_size.values())
        self.params = params
        self.momentum = [torch.zeros(len(names), *params[names[0]].shape) for names in self.groups]

    def step(self, factor: float) -> None:
        """Update the parameters with `factor` times the peak learning rates, and clear the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = self.schedule.other_rate * factor
        self.adam.step()
        with torch.no_grad():
            for names, momentum in zip(self.groups, self.momentum, strict=True):
                gradient = torch.stack([_gradient(self.params[name]) for name in names])
                momentum.lerp_(gradient, 0.05)
                update = orthogonal(gradient.lerp(momentum, 0.95))
                rate = self.schedule.matrix_rate * factor * max(1.0, update.shape[1] / update.shape[2]) ** 0.5
                for name, change in zip(names, update, strict=True):
                    self.params[name].sub_(change, alpha=rate)
        for value in self.params.values():
            value.grad = None

    def state(self) -> dict[str, Any]:
        return {"adam": self.adam.state_dict(), "momentum": self.momentum}

    def load(self, state: dict[str, Any]) -> None:
        self.adam.load_state_dict(state["adam"])
        self.momentum = state["momentum"]


def _is_layer_matrix(name: str, value: torch.Tensor) -> bool:
    return name.startswith("blk.") and value.ndim == 2


def _gradient(value: torch.Tensor) -> torch.Tensor:
    assert value.grad is not None
    return value.grad


class Batches:
    """Endless sequences of training tokens: epoch after epoch, each shuffled and cut regardless of chat boundaries."""

    def __init__(
        self,
        epochs: Callable[[int], list[Chat]],
        tokenizer: Tokenizer,
        seed: int,
        position: tuple[int, int] = (0, 0),
    ) -> None:
        self.epochs, self.tokenizer, self.seed = epochs, tokenizer, seed
        self.epoch, self.offset = position
        self._load()

    def _load(self) -> None:
        self.tokens, self.weights = encode(self.tokenizer, self.epochs(self.seed + self.epoch))

    def take(self, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens (rows, length + 1), whose last column is only a target, and the predictions' loss weights."""
        count = rows * length
        if self.offset + count + 1 > len(self.tokens):
            self.epoch, self.offset = self.epoch + 1, 0
            self._load()
        at = self.offset + length * np.arange(rows)[:, None] + np.arange(length + 1)
        self.offset += count
        return torch.from_numpy(self.tokens[at].astype(np.int64)), torch.from_numpy(self.weights[at[:, 1:]])


def loss_of(
    params: Params, shape: Shape, tokens: torch.Tensor, weights: torch.Tensor, teacher: tuple[Params, Shape] | None
) -> torch.Tensor:
    """Return the weighted mean cross entropy in nats.

    With a teacher, half of the loss is against the teacher's predictions.
    """
    with torch.autocast("cpu", torch.bfloat16):
        predicted = logits(params, shape, tokens[:, :-1]).flatten(0, 1).float()
    weights = weights.flatten()
    loss = F.cross_entropy(predicted, tokens[:, 1:].flatten(), reduction="none")
    if teacher is not None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            wanted = logits(teacher[0], teacher[1], tokens[:, :-1]).flatten(0, 1).float().softmax(-1)
        loss = 0.2 * loss + 0.8 * F.cross_entropy(predicted, wanted, reduction="none")
    return (loss * weights).sum() / weights.sum()


def evaluate(params: Params, shape: Shape, tokenizer: Tokenizer, corpus: Corpus) -> dict[str, float]:
    """Return nats per token of the assistant's text in held-out chats, by kind of chat."""
    result = {}
    for kind, chats in corpus.held_out().items():
        total, count = 0.0, 0.0
        for chat in chats:
            ids, weights = encode(tokenizer, [chat])
            tokens = torch.from_numpy(ids[: CONTEXT + 1].astype(np.int64))[None]
            said = torch.from_numpy(weights[1 : CONTEXT + 1]) == 1.0
            with torch.no_grad():
                loss = F.cross_entropy(logits(params, shape, tokens[:, :-1])[0], tokens[0, 1:], reduction="none")
            total, count = total + float(loss[said].sum()), count + float(said.sum())
        result[kind] = total / count
    return result


def load_tokenizer(work: Path, corpus: Corpus, seed: int) -> Tokenizer:
    """Return the tokenizer that both models share. The first call trains it on the chats of the first epoch."""
    path = work / "tokenizer.json"
    if not path.exists():
        train_tokenizer(corpus.epoch(seed), VOCAB).save(str(path))
    return Tokenizer.from_file(str(path))


def finished(work: Path) -> Path:
    """Return the target's last checkpoint file."""
    tuned = work / "tuned.pt"
    return tuned if tuned.exists() else work / "target.pt"


def load_checkpoint(path: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    return checkpoint


def train(role: str, schedule: Schedule, work: Path, corpus: Corpus, seed: int) -> None:
    """Train the target, tune it on tasks, or train the draft on the target's predictions. Resume from a checkpoint."""
    shape, path = SHAPES["draft" if role == "draft" else "target"], work / f"{role}.pt"
    tokenizer = load_tokenizer(work, corpus, seed)
    params = load_checkpoint(work / "target.pt")["params"] if role == "tuned" else initial(shape, seed)
    teacher: tuple[Params, Shape] | None = None
    if role == "draft":
        target = load_checkpoint(finished(work))
        teacher = (target["params"], SHAPES["target"])
        for name, value in params.items():  # initialized from the target's first layer, cut to the draft's sizes
            value.copy_(target["params"][name][tuple(slice(size) for size in value.shape)])
    state: dict[str, Any] = {"active": 0.0, "tokens": 0, "loss": math.log(VOCAB), "position": (0, 0)}
    saved = load_checkpoint(path) if path.exists() else None
    if saved:
        params, state = saved["params"], saved["state"]
    for value in params.values():
        value.requires_grad_()
    optimizer = Optimizer(params, schedule)
    if saved:
        optimizer.load(saved["optimizer"])
    epochs = corpus.tuning if role == "tuned" else corpus.epoch
    batches = Batches(epochs, tokenizer, seed, state["position"])
    print(f"{role}: {sum(v.numel() for v in params.values()):,} parameters, {len(batches.tokens):,} tokens an epoch")

    step, typical, last_save = 0, 0.0, time.monotonic()
    while (done := schedule.done(state["active"], state["tokens"])) < 1.0:
        began = time.monotonic()
        length = schedule.row_tokens if done < schedule.long_share else CONTEXT
        loss = loss_of(params, shape, *batches.take(schedule.batch_tokens // length, length), teacher)
        torch.autograd.backward(loss)
        optimizer.step(schedule.rate(done))
        took = time.monotonic() - began
        if step > 0:
            took = min(took, 3 * typical)  # a longer step means that the process was paused
        typical = took if step == 0 else 0.9 * typical + 0.1 * took
        step += 1
        state["active"] += took
        state["tokens"] += schedule.batch_tokens
        state["loss"] += 0.02 * (loss.item() - state["loss"])
        state["position"] = (batches.epoch, batches.offset)
        if step % 20 == 0:
            speed = schedule.batch_tokens / typical
            print(f"{done:6.1%} loss {state['loss']:.3f} {state['tokens']:,} tokens {speed:.0f} tok/s", flush=True)
        if time.monotonic() - last_save > 120:
            save(path, params, optimizer, state)
            last_save = time.monotonic()
    state["held_out"] = evaluate({k: v.detach() for k, v in params.items()}, shape, tokenizer, corpus)
    save(path, params, optimizer, state)
    print(f"{role}: {state}")


def export(role: str, work: Path, path: Path) -> None:
    """Write a trained model as a GGUF."""
    from export import write  # imported here, because only this part needs localllm

    shape = SHAPES[role]
    checkpoint = load_checkpoint(finished(work) if role == "target" else work / "draft.pt")
    sizes: dict[str, int | float] = {
        "context_length": CONTEXT,
        "embedding_length": shape.width,
        "block_count": shape.layers,
        "feed_forward_length": shape.ffn,
        "vocab_size": VOCAB,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": RMS_EPS,
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": ROPE_BASE,
    }
    name = "localllm demo" if role == "target" else "localllm demo draft"
    description = "A tiny chat model trained on dialogues, tasks and stories; a demonstration, see its README.md"
    params = {key: value.numpy() for key, value in checkpoint["params"].items()}
    write(path, name, description, sizes, params, Tokenizer.from_file(str(work / "tokenizer.json")))
    print(f"{path}: {path.stat().st_size:,} bytes")


def write_calibration(path: Path, corpus: Corpus, seed: int) -> None:
    """Write chats of the training text as plain text with role names, for calibration in localllm's quantizer."""
    chats = corpus.epoch(seed)[:CALIBRATION_CHATS]
    turns = ["".join(f"<|im_start|>{role}<|im_sep|>{text}<|im_end|>" for role, text in chat) for chat in chats]
    path.write_text("<|endoftext|>" + "<|endoftext|>".join(turns), "utf-8")
    print(f"{path}: {path.stat().st_size:,} bytes")


def save(path: Path, params: Params, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Write a checkpoint. An interrupted write leaves the old checkpoint intact."""
    plain = {name: value.detach() for name, value in params.items()}
    torch.save({"params": plain, "optimizer": optimizer.state(), "state": state}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and export localllm's demo model")
    parser.add_argument("what", choices=("target", "tuned", "draft", "export"))
    parser.add_argument("--minutes", type=float, default=60.0, help="active training time")
    parser.add_argument("--tokens", type=int, help="train for this many tokens instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=Path, default=HERE.parents[2] / "shared/data/text")
    parser.add_argument("--work", type=Path, default=HERE.parents[1] / "build/demo", help="checkpoints and tokenizer")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(options.texts, HERE)
    if options.what == "export":
        for role in SHAPES:
            export(role, options.work, options.work / f"{role}.gguf")
        write_calibration(options.work / "calibration.txt", corpus, options.seed)
        return
    schedule = Schedule(options.minutes, options.tokens)
    if options.what == "tuned":
        schedule = replace(schedule, peak=0.4, decay=1.0)
    train(options.what, schedule, options.work, corpus, options.seed)


if __name__ == "__main__":
    main()
