"""`localllm show`: print the contents of a model file, and the memory needed for a context. Weights are not read.

A model that cannot run (unsupported architecture or format) is shown with the reason.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from localllm.backends import BackendError
from localllm.backends.base import F16_CACHE, CacheTypes
from localllm.backends.cache import CACHE_TYPES
from localllm.backends.checks import check_cache
from localllm.base.errors import LocalLLMError
from localllm.base.machine.processor import usable_threads
from localllm.cli.commands.show_encoders import beside, encoder_rows, encoders
from localllm.cli.flags import typed
from localllm.cli.forecast import DecodeSpeed, cost_of, planned
from localllm.cli.options import ShowOptions
from localllm.cli.terminal.console import fitted, room
from localllm.cli.terminal.formatting import in_columns, parameters, rate_text, size
from localllm.engine.cache_types import choose_types, harm
from localllm.gguf import GGUFFile, StringArray, open_gguf
from localllm.loading.resolve import resolve
from localllm.models import (
    ARCHITECTURES,
    Config,
    ModelError,
    architecture_of,
    is_mmproj,
    read_config,
    record,
    record_mtp_heads,
)
from localllm.plan import Plan, summarize
from localllm.sampling.defaults import file_defaults
from localllm.sandbox import Confined
from localllm.tokenizer import Tokenizer, has_tokenizer

# Minimum bytes per token for a forecast that was not asked for: smaller models are instant, and their forecast is wrong
# by half (benchmarks/results/forecast.jsonl).
FORECAST = 50 * 10**6
_SHOWN_ITEMS, _SHOWN_CHARACTERS = 8, 100  # maximum items of a long array, maximum characters of a long text


def show(own: ShowOptions, name: str) -> None:
    """Print the facts of a model file. Raise GGUFError if the file cannot be read."""
    from localllm.template import renderer

    with renderer() as confined, open_gguf(resolve(name)) as file:
        confined.start()  # start now; the result is needed later
        cache = CacheTypes(*own.load.cache_types)
        facts = describe(file, own.ctx_size, own.tensors, cache, confined)
        on_terminal = sys.stdout.isatty() and not own.json
        if own.speed or (on_terminal and facts["memory"].get("read_per_token", 0) >= FORECAST):
            facts["speed"] = _told(lambda: _speed(file, own.ctx_size, cache))
    if own.json:
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(_lines(facts, room())))


def describe(
    file: GGUFFile,
    ctx_size: int,
    every_tensor: bool,
    cache: CacheTypes = F16_CACHE,
    confined: Confined | None = None,
) -> dict[str, Any]:
    """Return the facts of a model file as JSON values. A fact that cannot be determined is {"problem": reason}.

    `confined` is the process that checks the chat template (default: a new process).
    """
    facts: dict[str, Any] = {
        "file": str(file.path),
        "bytes": file.size,
        "gguf_version": file.version,
        "parts": len(file.paths),
        "model": _told(lambda: _model(file)),
        "tokenizer": _told(lambda: _tokenizer(file)),
        "sampling": _sampling(file),
        "memory": _told(lambda: _memory(file, ctx_size, cache)),
        "formats": _by_format(file),
        "chat_template": _told(lambda: _template(file, confined)),  # last, since the template process is still starting
        "metadata": {key: _abbreviated(value) for key, value in file.metadata.items()},
    }
    if is_mmproj(file.metadata):
        facts["encoders"] = _told(lambda: encoders(file))
        facts["model"] = {"problem": "none; encoders of pictures or sound, for --mmproj"}
        facts["memory"] = {"problem": "the encoders' is above"}
    else:
        facts["mmproj"] = beside(file)
    if every_tensor:
        facts["tensors"] = [
            {"name": t.name, "format": t.format, "shape": list(t.shape), "bytes": t.nbytes}
            for t in file.tensors.values()
        ]
    return facts


def _told(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return part()
    except (LocalLLMError, ModelError, BackendError) as error:
        return {"problem": typed(error)}


def _config(file: GGUFFile) -> Config:
    return read_config(file.metadata, architecture_of(file.metadata).name)


def _model(file: GGUFFile) -> dict[str, Any]:
    if not file.tensors:
        return {"problem": "a vocabulary without weights"}
    config = _config(file)
    architecture = ARCHITECTURES[config.architecture]
    plan = record(config, architecture, file.tensors)
    used, mtp_heads = (
        plan.tensors,
        _told(lambda: {"plans": record_mtp_heads(file.metadata, architecture, file.tensors)}),
    )
    for head in mtp_heads.get("plans", ()):
        used |= head.tensors
    return {
        "architecture": config.architecture,
        "parameters": summarize(plan).parameters,
        "layers": config.layers,
        "width": config.width,
        "heads": _per_layer(config.heads),
        "kv_heads": _per_layer(config.kv_heads),
        "head_dim": _per_layer(config.head_dim),
        "ffn_width": _per_layer(config.ffn_width),
        "vocabulary": config.vocabulary,
        "trained_context": config.context_length,
        "next_token_heads": mtp_heads if "problem" in mtp_heads else len(mtp_heads["plans"]),
        "unused_tensors": [name for name in file.tensors if name not in used],
    }


def _per_layer(numbers: tuple[int, ...]) -> int | list[int]:
    return numbers[0] if len(set(numbers)) == 1 else list(numbers)


def _tokenizer(file: GGUFFile) -> dict[str, Any]:
    if not has_tokenizer(file.metadata):
        return {"problem": "none in the file; prompts must be token ids"}
    tokenizer = Tokenizer.from_metadata(file.metadata)

    def named(token: int | None) -> str | None:
        return None if token is None else f"{token} {tokenizer.text(token)!r}"

    return {
        "model": file.metadata["tokenizer.ggml.model"],
        "pre": file.metadata.get("tokenizer.ggml.pre"),
        "tokens": tokenizer.vocab_size,
        "bos": named(tokenizer.bos),
        "eos": named(tokenizer.eos),
        "adds": list(tokenizer.adds),
        "ends": [named(token) for token in sorted(tokenizer.eog)],
    }


def _template(file: GGUFFile, confined: Confined | None) -> dict[str, Any]:
    from localllm.template import choose_template

    if not has_tokenizer(file.metadata):
        return {"problem": "none without a tokenizer"}
    template, note = choose_template(file.metadata, Tokenizer.from_metadata(file.metadata), confined)
    return {"characters": len(template.source), "note": note}


def _sampling(file: GGUFFile) -> dict[str, Any]:
    """Return the sampling defaults in the file, which the command line overrides."""
    found = file_defaults(file.metadata)
    return {"defaults": dict(found.values), "notes": list(found.notes)}


def _memory(file: GGUFFile, ctx_size: int, asked: CacheTypes) -> dict[str, Any]:
    """Return the memory in bytes that a context needs on the CPU with all processors."""
    if not file.tensors:
        return {"problem": "nothing to run"}
    from localllm.backends.cpu.budget import plan_memory

    _, plan, limits, context, _ = planned(file, ctx_size)
    counts = summarize(plan)
    choice = choose_types(asked, plan, limits, counts.weight_bytes, any_type=True)
    check_cache(choice.types, CACHE_TYPES)
    memory = plan_memory(plan, limits, usable_threads(), choice.types)
    return {
        "context": context,
        "weights": memory.weights,
        "tables_in_file": counts.table_bytes,
        "tables_read_per_token": counts.table_bytes_per_token,
        "cache": memory.cache,
        "cache_per_token": memory.cache_per_token,
        "window": memory.window,
        "window_cache_per_token": memory.window_per_token,
        "selected": memory.selected,
        "selected_cache_per_token": memory.selected_per_token,
        "states": memory.states,
        "state_read_per_token": memory.state_per_token,
        "cache_types": [choice.types.keys, choice.types.values],
        "cache_note": choice.note or _harm(choice.types, plan),
        "scratch": memory.scratch,
        "total": memory.weights + memory.cache + memory.scratch,
        "read_per_token": memory.weights_per_token + memory.state_per_token,
        "read_per_token_at_full_context": int(memory.read_after(context)),
    }


def _speed(file: GGUFFile, ctx_size: int, asked: CacheTypes) -> dict[str, Any]:
    """Return the forecast tokens per second of decoding on the processor, which takes about half a second to
    measure."""
    if not file.tensors:
        return {"problem": "nothing to run"}
    _, plan, limits, context, diffuses = planned(file, ctx_size)
    if diffuses or plan.encodes or not plan.causal:
        return {"problem": "not a model that continues a text"}
    types = choose_types(asked, plan, limits, summarize(plan).weight_bytes, any_type=True).types
    with DecodeSpeed() as speed:
        near, full = (speed.tokens_per_second(cost_of(plan, limits, types, tokens)) for tokens in (0, context))
    return {"tokens_per_second": near, "tokens_per_second_at_full_context": full, "context": context}


def _harm(types: CacheTypes, plan: Plan) -> str:
    """Return the reason why `chat` and `run` would refuse the KV cache types, or ""."""
    found = {f"{name}: {reason}" for name in (types.keys, types.values) if (reason := harm(name, plan))}
    return "; ".join(sorted(found))


def _by_format(file: GGUFFile) -> dict[str, dict[str, int]]:
    tensors: Counter[str] = Counter()
    held: Counter[str] = Counter()
    for tensor in file.tensors.values():
        tensors[tensor.format] += 1
        held[tensor.format] += tensor.nbytes
    return {name: {"tensors": tensors[name], "bytes": count} for name, count in held.most_common()}


def _abbreviated(value: Any) -> Any:
    """Return a metadata value for JSON. Long arrays and texts are truncated, and arrays show their length."""
    if isinstance(value, np.ndarray | StringArray):
        items = [_abbreviated(item) for item in value[:_SHOWN_ITEMS]]
        return items if len(value) <= _SHOWN_ITEMS else [*items, f"... {len(value)} total"]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str):
        text = value.encode("utf-8", "replace").decode()
        return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}... {len(text)} characters"
    return value


def _lines(facts: dict[str, Any], room: int) -> Iterator[str]:
    parts = f", {facts['parts']} parts" if facts["parts"] > 1 else ""
    yield in_columns(list(_head(facts, parts)), indent=0, room=room)
    yield "\ntensors by format"
    rows = [(name, f"{each['tensors']}", size(each["bytes"])) for name, each in facts["formats"].items()]
    yield in_columns(rows)
    memory = facts["memory"]
    if "encoders" not in facts:
        yield f"\nmemory for a context of {memory['context']} tokens" if "context" in memory else "\nmemory"
        yield in_columns(list(_memory_rows(memory)), room=room)
    if "tokens_per_second" in facts.get("speed", {}):
        near, full = (rate_text(facts["speed"][f"tokens_per_second{at}"]) for at in ("", "_at_full_context"))
        speed = f"about {near} tokens/s on this computer, {full} with a full context"
        yield "\n" + fitted(f"{speed} (forecast, measured now)")
    if "tensors" in facts:
        yield "\ntensors"
        yield in_columns(
            [(t["name"], t["format"], " x ".join(map(str, t["shape"]))) for t in facts["tensors"]], room=room
        )
    yield "\nmetadata"
    yield in_columns([(key, _one_line(value)) for key, value in facts["metadata"].items()], room=room)


def _each(value: Any) -> str:
    """Return the value if it is the same for all layers, else the distinct values of the layers."""
    return " or ".join(str(one) for one in sorted(set(value))) if isinstance(value, list) else str(value)


def _heads(model: dict[str, Any]) -> str:
    """Return the number of attention heads as a list item, or "" if no layer has attention heads."""
    if not model["heads"]:
        return ""
    keys_and_values = f"({_each(model['kv_heads'])} for keys and values)"
    return f"{_each(model['heads'])} heads of {_each(model['head_dim'])} {keys_and_values}, "


def _head(facts: dict[str, Any], parts: str) -> Iterator[tuple[str, str]]:
    yield "file", f"{facts['file']} ({size(facts['bytes'])}, GGUF {facts['gguf_version']}{parts})"
    model = facts["model"]
    if "problem" in model:
        yield "model", model["problem"]
    else:
        yield "architecture", model["architecture"]
        yield "parameters", parameters(model["parameters"])
        yield (
            "shape",
            f"{model['layers']} layers, {model['width']} wide, {_heads(model)}"
            f"{_each(model['ffn_width'])} in the feed-forward",
        )
        yield "context", f"{model['trained_context']} tokens (the trained length)"
        heads = model["next_token_heads"]
        if heads:
            yield (
                "next-token heads",
                heads["problem"] if isinstance(heads, dict) else f"{heads} (--spec mtp drafts with the first)",
            )
        if model["unused_tensors"]:
            yield "unused", f"{len(model['unused_tensors'])} tensors: {', '.join(model['unused_tensors'][:3])} ..."
    if "encoders" in facts:
        yield from encoder_rows(facts["encoders"])
        return
    if facts.get("mmproj"):
        yield "encoders", f"{facts['mmproj'][0]} (pictures or sound; `localllm show` tells more)"
    words = facts["tokenizer"]
    if "problem" in words:
        yield "tokenizer", words["problem"]
    else:
        pre = f", pre-tokenizer {words['pre']}" if words["pre"] else ""
        yield "tokenizer", f"{words['model']}, {words['tokens']} tokens{pre}"
        yield "ends", f"BOS {words['bos']}, EOS {words['eos']}, an answer ends at {', '.join(words['ends'])}"
    template = facts["chat_template"]
    yield "chat template", template.get("problem") or template["note"] or f"{template['characters']} characters"
    sampling = facts["sampling"]
    if sampling["defaults"]:
        yield (
            "sampling",
            ", ".join(
                f"{name} {';'.join(value) if isinstance(value, tuple) else value}"
                for name, value in sampling["defaults"].items()
            ),
        )
    for note in sampling["notes"]:
        yield "sampling", note


def cache_text(memory: dict[str, Any]) -> str:
    """Return the KV cache size per token as text."""
    text = f"{size(memory['cache_per_token'])} per token"
    if memory["window"]:
        text += f", and {size(memory['window_cache_per_token'])} for the last {memory['window']} tokens and some more"
    if memory["selected"]:
        own = size(memory["selected_cache_per_token"])
        text += f", and {own} per token; attention reads {memory['selected']} tokens"
    return text + (f", and {size(memory['states'])} for recurrent states" if memory["states"] else "")


def _memory_rows(memory: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    if "problem" in memory:
        yield "", "", memory["problem"]
        return
    yield "weights", size(memory["weights"]), ""
    if memory["tables_in_file"]:
        read = f"each token reads {size(memory['tables_read_per_token'])} of them"
        yield "in the file", size(memory["tables_in_file"]), f"n-gram tables; {read}"
    yield "cache", size(memory["cache"]), f"{cache_text(memory)} ({', '.join(memory['cache_types'])})"
    if memory["cache_note"]:
        yield "", "", memory["cache_note"]
    yield "scratch", size(memory["scratch"]), ""
    yield "total", size(memory["total"]), ""
    full = size(memory["read_per_token_at_full_context"])
    yield "read to decode", size(memory["read_per_token"]), f"per token; {full} with a full context"


def _one_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | str) else str(value)
