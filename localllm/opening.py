"""Load the weights of a file to a backend: choose the size of the context, what runs where, and the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from localllm.backends import open_backend
from localllm.backends.base import CacheTypes, Card, Executable, Limits, Progress
from localllm.backends.hybrid.offload import Offload, Planner, arrange
from localllm.cache import SLACK, BlockPool, CacheChoice, choose_types
from localllm.engine import Engine
from localllm.gguf import GGUFFile
from localllm.models import Config, Head, Pooler, architecture_of, read_config, record
from localllm.options import LoadOptions
from localllm.plan import BLOCK, CacheLayer, Experts, Plan, Tensor, Value

BATCH_ROWS = 512  # maximum rows per forward pass; longer prompts are split
DEFAULT_CONTEXT = 4096  # tokens, if the model was trained on at least as many and the user sets no size
WINDOW_PAST = 1024  # tokens that layers with a window keep beyond it: how far an answer can be rolled back
LOGIT_BYTES = 64 << 20  # maximum rows of logits per batch
STATE_BYTES = 1 << 30  # of the blocks of recurrent layers, if a step does not need more
LEAST_ROWS = 128  # per forward pass, however big states are


@dataclass(frozen=True, slots=True)
class Bound:
    """A model's plan on a backend, with its cache."""

    config: Config
    plan: Plan
    context: int  # tokens
    cache: CacheChoice
    engine: Engine
    device: str
    placed: str  # what runs where, if a GPU is used or was requested
    close: Callable[[], None]
    pooler: Pooler | None  # of a plan that ends in embeddings

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
) -> Bound:
    """Load the weights to a backend and allocate the cache. `weights` replace the tensors of the file.

    With `embeddings` the plan ends in embeddings instead of logits, as that of an encoder always does.
    """
    architecture = architecture_of(file.metadata)
    config = read_config(file.metadata, architecture.name)
    context = context_of(options.ctx_size, config)
    plan = record(config, architecture, weights or file.tensors, context, embeddings)
    pooler = None
    if embeddings or architecture.encoder:
        pooler = Pooler(config, Head.of(config, architecture, file.tensors))
    offload = Offload(options.gpu_layers, options.n_cpu_moe, options.device)
    offload.check(options.backend)

    def limits_at(context: int) -> Limits:
        return limits_of(context, plan)

    limits = limits_at(context)
    held = sum(tensor.nbytes for tensor in file.tensors.values())
    asked = CacheTypes(options.cache_type_k, options.cache_type_v)
    cache = choose_types(asked, plan, limits, held, options.force or options.any_cache)

    def planner(card: Card, name: str) -> Planner:
        return Planner(card, name, plan, limits_at, context, cache.types)

    backend = open_backend(options.backend, options.threads, options.device)
    arranged = arrange(backend, offload, planner, options.threads)
    opened = arranged.backend
    try:
        executable = opened.bind(plan, limits, cache.types, progress, observed(plan) if observe else ())
    except BaseException:
        opened.close()
        raise
    windowed = BlockPool(limits.window_blocks, BLOCK, plan.window) if limits.window_blocks else None
    pool = BlockPool(limits.blocks, BLOCK, windowed=windowed)

    def close() -> None:
        executable.close()
        opened.close()

    engine = Engine(executable, pool, replace(limits, positions=context))
    return Bound(config, plan, context, cache, engine, opened.describe(), arranged.line(executable), close, pooler)


def observed(plan: Plan) -> list[Value]:
    """Return the inputs of matrices and the outputs of experts, for reading them and the routing after a step."""
    found = {value.index: value for op in plan.operations for value, _ in op.products}
    found |= {op.out.index: op.out for op in plan.operations if isinstance(op, Experts)}
    return list(found.values())


def limits_of(context: int, plan: Plan) -> Limits:
    """Return the limits for binding a model; some layers may see only the last tokens, or keep a state.

    The states of recurrent layers are big, so models that have them take fewer rows in a step, and keep only as many
    blocks as STATE_BYTES hold, but no fewer than a step and a rollback of SLACK tokens need.
    """
    blocks = -(-context // BLOCK) + 1  # one more than the context, so that a full context can be forked
    logit_rows = max(16, min(BATCH_ROWS, LOGIT_BYTES // (4 * plan.logits.width)))
    if not plan.causal:  # rows read later ones, so a text is one batch
        return Limits(
            context, max(logit_rows, min(context, LOGIT_BYTES // (4 * plan.logits.width))), blocks, blocks * BLOCK
        )
    if not plan.window:
        return Limits(BATCH_ROWS, logit_rows, blocks, blocks * BLOCK)
    size = 4 * sum(BLOCK * own.row + own.state for own in plan.layers if not isinstance(own, CacheLayer))
    rows = BATCH_ROWS
    while rows > LEAST_ROWS and _needed(plan.window, rows) * size > STATE_BYTES:
        rows //= 2
    own = _needed(plan.window, rows)
    past = WINDOW_PAST // BLOCK
    own += min(past, max(0, STATE_BYTES // size - own)) if size else past
    return Limits(rows, min(rows, logit_rows), blocks, blocks * BLOCK, own if own < blocks else 0)


def _needed(window: int, rows: int) -> int:
    """Return how many blocks one sequence needs in layers with a window, to run a step of `rows` rows."""
    return -(-(window + SLACK + rows) // BLOCK) + 2


def context_of(asked: int, config: Config) -> int:
    """Return the tokens of context: as requested, or for 0 as trained, but at most DEFAULT_CONTEXT."""
    return asked or min(config.context_length, DEFAULT_CONTEXT)
