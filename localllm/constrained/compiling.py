"""Compile grammars within llguidance's limits: in this process, and in a child process for untrusted grammars.

The size of a grammar does not bound the time and memory of its compilation. A server therefore first compiles a
client's grammar in a child process (`localllm.constrained.child`) with a deadline and a memory limit. Compiling it
again in the server takes the same time.
"""

from __future__ import annotations

import ctypes
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Collection, Sequence
from contextlib import suppress
from io import FileIO
from itertools import count
from mmap import PAGESIZE
from typing import TYPE_CHECKING, Any

from localllm.base.machine.heap import heap_in_use
from localllm.options.structure import StructureError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Below llguidance's defaults, so that one step of one request never delays the others for long: 50,000 units of lexer
# fuel take up to 0.1 s with 128,000 tokens; JSON with formats and patterns needs up to 25,000. A state takes 1 to 2 KB.
_STEP_FUEL = 50_000
_STATES = 100_000

_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)  # escapes in GBNF
# Skip strings, character classes, repetitions and comments of GBNF, and capture rule names.
_RULE_NAME = re.compile(r"""(?s)"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\{[^}]*\}|\#[^\r\n]*|([\w-]+)""")

_vocabularies: dict[str, LLTokenizer] = {}  # the newest vocabulary, in the child process
_sizes: list[FileIO] = []


def converted(source: str) -> str:
    """Convert the GBNF parts of a grammar to Lark; raise StructureError if it is malformed."""
    if '"gbnf_grammar"' not in source:
        return source
    whole = json.loads(source)
    whole["grammars"] = [_converted(part) for part in whole["grammars"]]
    return json.dumps(whole)


def _converted(part: dict[str, Any]) -> dict[str, Any]:
    from llguidance.gbnf_to_lark import RepetitionNode, gbnf_to_lark

    if "gbnf_grammar" not in part:
        return part
    RepetitionNode.is_atomic = lambda node: False  # type: ignore[method-assign,assignment]  # ("a"{2})+ is not "a"{2}+
    gbnf = _with_distinct_names(_ESCAPE.sub(_spelled, part["gbnf_grammar"]))
    try:
        return {"name": part["name"], "lark_grammar": str(gbnf_to_lark(gbnf))}
    except Exception as error:  # the converter's bugs raise IndexError and other errors
        told = str(error).splitlines()
        raise StructureError(f"the GBNF grammar cannot be read: {told[0] if told else type(error).__name__}") from None


def _spelled(escape: re.Match[str]) -> str:
    """Rewrite an escape for the converter, which strips the leading zeros of code points."""
    point = int(escape[1] or escape[2] or "D800", 16)
    if point > 0x10FFFF or 0xD800 <= point < 0xE000:
        return escape[0]
    return f"\\x{point:02x}" if point < 0x80 else chr(point)


def _with_distinct_names(gbnf: str) -> str:
    """Rename rules that would collide after the converter's renaming.

    The converter renames `root` to "start", and converts names to lower case with "_", or to upper case for terminals.
    """
    given = dict.fromkeys(found[1] for found in _RULE_NAME.finditer(gbnf) if found[1])
    finals = {name: re.sub("([a-z])([A-Z])", r"\1_\2", name.replace("-", "_")).lower() for name in given}
    taken, changed = {"start", *finals.values()}, {}
    first: dict[str, str] = {"start": "root"}
    for name, final in finals.items():
        if name == "root" or first.setdefault(final, name) == name:
            continue
        changed[name] = next(new for number in count(2) if (new := f"{final}_{number}") not in taken)
        taken.add(changed[name])
    return _RULE_NAME.sub(lambda found: changed.get(found[1], found[0]), gbnf) if changed else gbnf


def matcher_of(tokens: LLTokenizer, source: str) -> LLMatcher:
    """Compile a grammar and compute its first mask; raise StructureError if it is invalid."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(step_lexer_fuel=_STEP_FUEL, max_lexer_states=_STATES, verbose_errors=False)
    matcher = LLMatcher(tokens, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise StructureError(f"the grammar cannot be used: {told(matcher.get_error())}")
    bits = ctypes.create_string_buffer(4 * (-(-tokens.vocab_size // 32)))
    # Copies share a lexer with a limit. The first matcher can exhaust it, and then only the second one fails.
    for _ in range(2):
        first = matcher.deep_copy()
        first.unsafe_compute_mask_ptr(ctypes.addressof(bits), len(bits))  # `compute_bitmask` hides errors
        if first.is_error():
            raise StructureError(f"the grammar failed: {told(first.get_error())}")
    return matcher


def told(error: Any) -> str:
    """Return the first lines of llguidance's message as one line, without the grammar and without the position of the
    error."""
    if "NoExtension" in str(error):
        return "no text matches it"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line for line in lines if " | " not in line[:12] and line.strip("^ ")]
    return " ".join(kept).replace(" <non-verbose/>", "")[:300] or "unknown error"


# -- the task of the child -------------------------------------------------------------------------------------------


def vocabulary_request(
    key: str, tokens: Sequence[bytes], special: Collection[int], ends: Sequence[int]
) -> dict[str, Any]:
    """Return the request that sends a vocabulary to the child."""
    text = b64encode(b"".join(tokens)).decode()
    return {"key": key, "text": text, "lengths": list(map(len, tokens)), "special": list(special), "ends": list(ends)}


def prepare() -> None:
    """Load the library and open the file with the memory size, before the sandbox forbids opening files."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
    from llguidance.gbnf_to_lark import gbnf_to_lark

    tokens = LLTokenizer(TokenizerWrapper(_Tokens([bytes([byte]) for byte in range(256)], [], 0)), eos_token=[0])
    if heap_in_use() is None:
        with suppress(OSError):
            _sizes.append(FileIO("/proc/self/statm"))
    LLMatcher(tokens, json.dumps({"grammars": [{"lark_grammar": gbnf_to_lark('root ::= "a"')}]}), log_level=0)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Store a vocabulary, or compile `request["grammar"]` for the vocabulary `request["key"]`.

    The reply to a grammar has the `source` without GBNF and the `bytes` it takes, or an `error`. The reply is empty if
    the vocabulary is unknown.
    """
    key = request["key"]
    if "text" in request:
        _vocabularies.clear()
        _vocabularies[key] = _vocabulary(request)
        return {}
    if key not in _vocabularies:
        return {}
    before = _memory()
    try:
        source = converted(request["grammar"])
        matcher = matcher_of(_vocabularies[key], source)
    except StructureError as error:
        return {"error": str(error)}
    size = max(_memory() - before, 0)
    del matcher  # the matcher must live until its memory is measured
    return {"source": source, "bytes": size}


def _vocabulary(request: dict[str, Any]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    text, at, tokens = b64decode(request["text"]), 0, []
    for length in request["lengths"]:
        tokens.append(text[at : at + length])
        at += length
    ends = request["ends"]
    return LLTokenizer(TokenizerWrapper(_Tokens(tokens, request["special"], ends[0])), eos_token=ends)


class _Tokens:
    """A vocabulary for llguidance. It encodes text byte by byte, which does not affect masks."""

    def __init__(self, tokens: list[bytes], special: list[int], end: int) -> None:
        self.tokens, self.special_token_ids = tokens, special
        self.eos_token_id, self.bos_token_id = end, None
        self._bytes = {token[0]: number for number, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        return [self._bytes[byte] for byte in data if byte in self._bytes]


def _memory() -> int:
    """Return the memory of this process in bytes: its heap, or else its address space; 0 if unknown."""
    if (used := heap_in_use()) is not None:
        return used
    if not _sizes:
        return 0
    _sizes[0].seek(0)
    return int(_sizes[0].read(64).split()[0]) * PAGESIZE
