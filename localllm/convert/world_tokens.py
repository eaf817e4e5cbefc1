r"""Convert RWKV's "world" vocabulary: a text file with one token per line, `ID LITERAL LENGTH`, in Python syntax."""

from __future__ import annotations

import ast
import re
from typing import Any

from localllm.base.printable import printable
from localllm.convert.errors import ConvertError
from localllm.convert.files import read_lines
from localllm.convert.tokens import CONTROL, NORMAL, TokenizerFiles, Tokens

FILE = "rwkv_vocab_v20230424.txt"
_MAX_BYTES = 1 << 24  # the only known file has 1 MB
_MAX_LINE = 2000  # characters
_LINE = re.compile(r"(\d{1,9}) (b?(?:'.*'|\".*\")) (\d{1,9})")
_START = "<s>"  # id 0, which has no line in the file; it begins a text and ends the output
_TURN = b"\n\n"  # end of a turn, and an end-of-generation token

# The dialogue format that these models were trained with. The reasoning of earlier turns is omitted.
TEMPLATE = (
    "{{ bos_token }}{% set told = messages | selectattr('role', 'equalto', 'system') | list %}"
    "{% if told and told[-1].content %}{{ 'System: ' + told[-1].content + '\n\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{{ 'User: ' + message.content | trim + '\n\n' }}"
    "{% elif message.role == 'assistant' and message.content is not none %}"
    "{{ 'Assistant: ' + message.content.split('</think>')[-1] | trim + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}"
    "{% if enable_thinking is defined %}{{ ' <think>' if enable_thinking else ' <think>\n</think>' }}{% endif %}"
    "{% endif %}"
)


def from_world(files: TokenizerFiles) -> dict[str, Any]:
    """Convert the file to GGUF keys, including the special token ids; raise a one-line ConvertError if it is
    damaged."""
    tokens = Tokens.padding(files.rows)
    tokens.put(0, _START, CONTROL, 0.0)
    ids = {"bos": 0, "eos": 0}
    for i, token in _read(files).items():
        tokens.put(i, repr(token)[2:-1], NORMAL, 0.0)
        if token == _TURN:
            ids["eot"] = i
    return tokens.keys("rwkv", "") | {f"tokenizer.ggml.{role}_token_id": i for role, i in ids.items()}


def _read(files: TokenizerFiles) -> dict[int, bytes]:
    """Return the bytes of each token by id."""
    path = files.folder / FILE
    lines = read_lines(path, _MAX_BYTES)
    found: dict[int, bytes] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.rstrip("\r")) if len(line) < _MAX_LINE else None
        token = _literal(match[2]) if match else None
        if match is None or token is None or len(token) != int(match[3]):
            raise ConvertError(f"{path}: line {number} is not a token with its id and length; download it again")
        i = int(match[1])
        if not 0 < i < files.rows or i in found:
            raise ConvertError(
                f"{path}: line {number}: the id {i} of token {printable(repr(token), 60)} occurs twice or exceeds the "
                f"embedding, which has {files.rows} rows"
            )
        found[i] = token
    if missing := set(range(1, 256)) - {token[0] for token in found.values() if len(token) == 1}:
        raise ConvertError(f"{path}: no token for the byte 0x{min(missing):02X}; download it again")
    return found


def _literal(text: str) -> bytes | None:
    """Return the bytes of a literal, or None if it is invalid."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return value if isinstance(value, bytes) else None
