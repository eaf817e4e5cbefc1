"""Loads a GGUF's weights to a backend: chooses the context size, the placement of layers, and the KV cache."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from time import thread_time

from localllm.backends import open_backend
from localllm.backends.base import (
    Backend,
    CacheTypes,
    DeviceBackend,
    Executable,
    Limits,
    Progress,
    SharingExecutable,
)
from localllm.backends.hybrid.backend import HybridBackend
from localllm.backends.hybrid.offload import Offload, Planner, arrange
from localllm.backends.hybrid.offload import bind as bind_to
from localllm.base.errors import LocalLLMError
from localllm.base.machine.memory import memory
from localllm.base.machine.processor import threads_for, usable_threads
from localllm.base.notices import Notice, NotUsed, Setting
from localllm.engine import SLACK, BlockPool, CacheChoice, Engine, MediaFacts, choose_types
from localllm.engine.cache_types import cache_bytes
from localllm.gguf import GGUFFile
from localllm.loading.recording import Recording
from localllm.loading.splitting import CPU_STAGES, Splitter, Whole, check_splitting
from localllm.models import (
    Config,
    MediaInput,
    Pooler,
    PoolingHead,
    architecture_of,
    read_config,
)
from localllm.options import LoadOptions
from localllm.options.diffusion import CANVAS
from localllm.plan import BLOCK, CacheLayer, Experts, Plan, Tensor, Value, summarize

BATCH_ROWS = 512  # maximum rows per forward pass; longer prompts are split
DEFAULT_CONTEXT = 4096  # default context size in tokens, if the trained context is at least this
WINDOW_PAST = 1024  # extra tokens cached in sliding-window layers: the maximum rollback
LOGIT_BYTES = 64 << 20  # maximum bytes of logits per batch
EXACT = ("cpu", CPU_STAGES)  # backends whose results do not depend on the number of rows
STATE_COPIES = 6  # state blocks of recurrent layers per additional sequence, for prefix reuse
MEMORY_SHARE = 0.8  # fraction of the free memory used for a server's weights and KV cache
UNKNOWN_MEMORY = 8 << 30  # bytes assumed if the system does not report its memory
STATE_BYTES = 1 << 30  # maximum bytes for the state blocks of recurrent layers, unless a step needs more
LEAST_ROWS = 128  # minimum rows per forward pass, however large the recurrent states


@dataclass(frozen=True, slots=True)
class BoundModel:
    """A model's plan bound to a backend, with its KV cache."""

    config: Config
    plan: Plan
    context: int  # context size in tokens
    cache: CacheChoice
    engine: Engine
    device: str
    placed: str  # which layers run on which device, if a GPU is used or was requested
    close: Callable[[], None]
    pooler: Pooler | None  # set if the plan ends in embeddings
    head: PoolingHead | None = None  # set if the plan ends in logits, and the engine can also return hidden states
    exact: bool = False  # whether results do not depend on the number of rows
    backend: Backend | None = None  # where the encoders of pictures and sound can run, too; None: on several devices

    @property
    def executable(self) -> Executable:
        return self.engine.executable


def bind(
    file: GGUFFile,
    options: LoadOptions,
    progress: Progress | None = None,
    observe: bool = False,
    weights: Mapping[str, Tensor] | None = None,
    embeddings: bool = False,
    sequences: int = 0,
    memory: int = 0,
    drafter: GGUFFile | None = None,
    split: Splitter | None = None,
    media: MediaInput | None = None,
    most_cache: int = 0,
) -> BoundModel:
    """Load the weights to a backend and allocate the KV cache. `weights` replaces tensors of the GGUF.

    With `embeddings`, the plan ends in embeddings instead of logits; the plan of an encoder-only model always does.
    `sequences` is for servers: this number of sequences share the KV cache and, if memory allows, each may fill the
    context. `memory` is the maximum number of bytes for weights, KV cache and encoders, 0: a share of the free memory;
    `most_cache` for the KV cache. `drafter` is another GGUF, whose prediction heads draft for this model. `split` runs
    the layers in several processes. `media` says which embeddings of pictures and sound the model takes besides tokens.
    """
    if split is not None:
        check_splitting(options)
    offload = Offload(options.gpu_layers, options.n_cpu_moe, options.device)
    offload.check(options.backend)
    free = partial(split.free_memory, options) if split is not None else free_memory
    whole, cache, limits_at = whole_of(
        file, options, weights, embeddings, sequences, memory, drafter, free, media, most_cache
    )
    recording, plan, limits = whole.recording, whole.plan, whole.limits
    context, architecture = recording.context, architecture_of(file.metadata)
    config = read_config(file.metadata, architecture.name)
    pooler = None
    if embeddings or architecture.encoder:
        pooler = Pooler(config, PoolingHead.of(config, architecture, file.tensors))
    if options.check_tensors:
        for tensor in (dict(drafter.tensors if drafter is not None else ()) | file.tensors).values():
            tensor.check_finite()

    def planner(gpu: DeviceBackend, name: str) -> Planner:
        return Planner(gpu, name, plan, limits_at, context, cache.types)

    def bound(backend: Backend) -> Executable:
        pools = sequences > 0 and backend.name in EXACT
        return backend.bind(plan, limits, cache.types, progress, kept(plan, observe, pools))

    threads = threads_for(options.threads)

    interruptible: list[Executable] = []

    def close() -> None:
        for each in (*interruptible, executable):
            each.close()
        opened.close()

    def assembled(line: str) -> BoundModel:
        exact = opened.name in EXACT
        windowed = BlockPool(limits.window_blocks, BLOCK, plan.window) if limits.window_blocks else None
        pool = BlockPool(limits.blocks, BLOCK, windowed=windowed)
        start = config.decoder.start if config.decoder is not None and pooler is None else None
        pools = sequences > 0 and exact and plan.normed is not None and not plan.encodes
        engine = Engine(executable, pool, replace(limits, positions=context), start, plan.normed if pools else None)
        engine.draft_heads = plan.drafts
        engine.media = MediaFacts(plan.media, plan.axes, plan.spans)
        if plan.spans and sequences > 1 and isinstance(executable, SharingExecutable):  # so that the others do not wait
            engine.interruptible = executable.interruptible()
            interruptible.append(engine.interruptible)
        if opened.name == "cpu":  # the stepping thread does its share; while it is preempted, nothing is done
            engine.clock = thread_time
        head = PoolingHead.of(config, architecture, file.tensors) if pools else None
        where = None if split is not None or isinstance(opened, HybridBackend) else opened
        found = opened.describe(), line, close, pooler, head, exact, where
        return BoundModel(config, plan, context, cache, engine, *found)

    line = ""
    if split is not None:
        divided = split.backend(whole, threads)
        line = split.line
        if divided is not None:
            opened = divided
            try:
                executable = bound(opened)
            except BaseException:
                opened.close()
                raise
            return assembled(line)
    backend = open_backend(options.backend, threads, options.device, checked=not options.force)
    if plan.drafts and isinstance(backend, DeviceBackend) and not planner(backend, "").undivided(offload):
        plan = Recording(context, media=media).plan(
            file, weights=weights
        )  # layers on the GPU save more time than drafts
    chosen = options.backend != "auto" or bool(options.device) or bool(offload.asked)
    arranged = arrange(backend, offload, planner, threads)
    arranged, executable = bind_to(arranged, bound, not chosen, threads)
    opened = arranged.backend
    placed = arranged.line(executable)
    return assembled(f"{line}; {placed}" if line and placed else line or placed)


def whole_of(
    file: GGUFFile,
    options: LoadOptions,
    weights: Mapping[str, Tensor] | None = None,
    embeddings: bool = False,
    sequences: int = 0,
    memory: int = 0,
    drafter: GGUFFile | None = None,
    free: Callable[[], int] | None = None,
    media: MediaInput | None = None,
    most_cache: int = 0,
) -> tuple[Whole, CacheChoice, Callable[[int], Limits]]:
    """Return a model before it is placed, its cache types with a note, and its limits for other context sizes.

    `bind` explains the arguments; `free` returns the free memory, for `sequences`.
    """
    config = read_config(file.metadata, architecture_of(file.metadata).name)
    diffuses = architecture_of(file.metadata).diffusion and not embeddings
    most = CANVAS if diffuses else config.context_length if sequences else DEFAULT_CONTEXT
    context = _within_positions(context_of(options.ctx_size, config, most), file, options)
    speculation = options.speculation
    drafts = speculation.may_use_head and not speculation.model_draft and not embeddings
    heads = speculation.most_drafted if drafts or drafter is not None else 0
    recording = Recording(context, embeddings, heads, media)
    span = media.span if media is not None else 0
    if span > context:
        problem = f"a picture takes up to {span} tokens, but the context holds {context}; raise "
        raise LocalLLMError(Notice(problem, Setting("ctx_size")))
    plan = recording.plan(file, drafter, weights)
    held = dict(drafter.tensors if drafter is not None else ()) | file.tensors

    def limits_at(context: int) -> Limits:
        return limits_of(context, plan, max(1, sequences), diffuses, span)

    limits = limits_at(context)
    weight_bytes = sum(tensor.nbytes for tensor in held.values()) - summarize(plan).table_bytes
    if options.backend in ("auto", "cpu"):
        weight_bytes += panels_add(plan)
    asked = CacheTypes(*options.cache_types)
    cache = choose_types(asked, plan, limits, weight_bytes, options.force or options.any_cache)
    if sequences:
        most = int(MEMORY_SHARE * (free or free_memory)())
        most = min(most, memory) if memory else most
        room = most - weight_bytes - (media.reserved if media is not None else 0)
        if plan.spans and sequences > 1 and options.backend in ("auto", "cpu"):  # for `Engine.interruptible`
            room -= interruptible_bytes(plan, replace(limits, rows=span, logit_rows=1), cache.types, options.threads)
        room = min(room, most_cache) if most_cache else room
        limits = fit_limits(limits, plan, cache.types, room, bool(options.ctx_size))
        if limits.positions < context:
            recording = replace(recording, context=limits.positions)
            plan = recording.plan(file, drafter, weights)
    return Whole(file, drafter, recording, plan, limits, cache.types, options), cache, limits_at


def panels_add(plan: Plan) -> int:
    """Return the bytes by which weights are larger in the CPU's memory than in the file."""
    from localllm.backends.cpu.weights import stored_bytes  # imports the CPU's kernels

    return sum(stored_bytes(weight) - weight.bytes for weight in plan.weights.values())


def interruptible_bytes(plan: Plan, limits: Limits, types: CacheTypes, threads: int | None) -> int:
    """Return the memory that steps in slices use besides the other steps, on the CPU."""
    from localllm.backends.cpu.budget import step_memory  # imports the CPU's kernels

    usable = usable_threads()
    return step_memory(plan, limits, min(threads or usable, usable), types)


def kept(plan: Plan, observe: bool, pools: bool = False) -> list[Value]:
    """Return the values that stay readable after a step. `pools`: with the hidden states that embeddings pool."""
    found = observed(plan) if observe else []
    found += [value for head in plan.drafts for value in (head.hidden, head.logits, head.following)]
    if pools and plan.normed is not None:
        found.append(plan.normed)
    return list({value.index: value for value in found}.values())


def observed(plan: Plan) -> list[Value]:
    """Return the inputs of matrix products and the outputs of experts, which can then be read after a step along with
    the routing.
    """
    found = {value.index: value for op in plan.operations for value, _ in op.products}
    found |= {op.out.index: op.out for op in plan.operations if isinstance(op, Experts)}
    return list(found.values())


def limits_of(context: int, plan: Plan, sequences: int = 1, diffuses: bool = False, span: int = 0) -> Limits:
    """Return the limits for binding a model, considering sliding-window and recurrent layers.

    A diffusion model (`diffuses`) evaluates its whole canvas in one step, and may need the logits of every position.

    A step holds a picture of `span` tokens that see each other, and decode rows of other sequences.

    Recurrent states are large. Models with recurrent layers therefore take fewer rows per step, and their state blocks
    are limited to STATE_BYTES, but not below the needs of one step and a rollback of SLACK tokens.
    """
    blocks = sequences * -(-context // BLOCK) + 1  # one extra, so that a full sequence can be forked
    positions = -(-context // BLOCK) * BLOCK + BLOCK
    logit_rows = max(16, min(BATCH_ROWS, LOGIT_BYTES // (4 * plan.logits.width)))
    if diffuses:
        return Limits(context, context, blocks, positions)
    if plan.encodes:  # a step may contain an encoder's whole text and decoder rows of other sequences
        return Limits(context + 16 * sequences, logit_rows, blocks, positions)
    if not plan.causal:  # bidirectional attention requires a whole text in one batch
        return Limits(context, max(logit_rows, min(context, LOGIT_BYTES // (4 * plan.logits.width))), blocks, positions)
    least = span + 16 * sequences if span else 0
    if not plan.window:
        return Limits(max(BATCH_ROWS, least), logit_rows, blocks, positions)
    size = 4 * sum(BLOCK * own.row + own.state for own in plan.layers if not isinstance(own, CacheLayer))
    rows = BATCH_ROWS
    while rows > LEAST_ROWS and _needed(plan.window, rows) * size > STATE_BYTES:
        rows //= 2
    rows = max(rows, least)
    own = _needed(plan.window, rows) + (sequences - 1) * _needed(plan.window, 0)
    past = sequences * WINDOW_PAST // BLOCK
    if size:
        past = min(past, max(STATE_COPIES * (sequences - 1), STATE_BYTES // size - own, 0))
    own += past
    return Limits(rows, min(rows, logit_rows), blocks, positions, own if own < blocks else 0)


def fit_limits(limits: Limits, plan: Plan, types: CacheTypes, memory: int, exact: bool) -> Limits:
    """Return `limits` with fewer blocks, so that the KV cache fits in `memory` bytes.

    Raises LocalLLMError if nothing fits, or if one full context does not fit and the user set its size (`exact`).
    """
    blocks, positions = limits.blocks, limits.positions
    least = min(blocks, 4 if not exact else positions // BLOCK)
    at_most = bisect_right(
        range(least, blocks), memory, key=lambda n: cache_bytes(plan, replace(limits, blocks=n), types)
    )
    fitting = least + at_most - 1 if cache_bytes(plan, limits, types) > memory else blocks
    if fitting < least:
        need = cache_bytes(plan, replace(limits, blocks=least), types)
        raise LocalLLMError(
            Notice(
                f"the cache needs {need >> 20} MiB, and {max(memory, 0) >> 20} MiB are left by weights and encoders; "
                "use a smaller context (", Setting("ctx_size"), ") or fewer parallel requests",
            )
        )  # fmt: skip
    return replace(limits, blocks=fitting, positions=min(positions, fitting * BLOCK))


def free_memory() -> int:
    """Return the available memory in bytes; UNKNOWN_MEMORY if the system does not report it."""
    found = memory()
    return found.free if found.total else UNKNOWN_MEMORY


def _needed(window: int, rows: int) -> int:
    """Return the number of blocks in a sliding-window layer that a sequence needs for a step of `rows` rows."""
    return -(-(window + SLACK + rows) // BLOCK) + 2


def _within_positions(context: int, file: GGUFFile, options: LoadOptions) -> int:
    """Return the context size, clamped (with a notice) to the number of learned position embeddings.

    Measurements (`any_cache`) need the exact size; for them the plan raises an error instead.
    """
    table = file.tensors.get("position_embd.weight")
    positions = int(table.shape[0]) if table is not None and len(table.shape) == 2 else context
    if not 0 < positions < context or not options.ctx_size or options.any_cache:
        return context
    told = f": the model has only {positions} position embeddings, which limits its context"
    note = Notice(Setting("ctx_size", context), told)
    warnings.warn(note, NotUsed, stacklevel=2)
    return positions


def context_of(asked: int, config: Config, most: int = DEFAULT_CONTEXT) -> int:
    """Return the context size in tokens: `asked`, or for 0 the trained context size capped at `most`."""
    return asked or min(config.context_length, most)
