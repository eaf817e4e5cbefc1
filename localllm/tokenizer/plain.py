"""Encoders that do not split text into words: the longest token at each position ("rwkv"), the cheapest path
("plamo2").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from localllm.tokenizer.errors import TokenizerError
from localllm.tokenizer.matching import Matcher

_ESCAPED = {"t": b"\t", "n": b"\n", "r": b"\r"}
_SCALE = 1e4  # PLaMo's scores are integers, in units of 1/10000
_LEAST, _NO_TOKEN = -20_000_000, -10_000_000  # minimum score of a usable token; score of a character without a token


def unescaped(text: str) -> bytes:
    r"""Return the bytes of a token in RWKV's vocabulary, which has the escapes `\t`, `\n`, `\r`, `\x..` and `\\`."""
    out, parts = bytearray(), iter(text)
    for char in parts:
        if char == "\\":
            char = next(parts, "")
            if char == "x":
                digits = next(parts, "") + next(parts, "")
                try:
                    out.append(int(digits, 16))
                except ValueError:
                    raise TokenizerError(
                        f"tokenizer.ggml.tokens: token {text!r:.60} needs two hexadecimal digits after \\x"
                    ) from None
                continue
            out += _ESCAPED.get(char, char.encode("utf-8", "surrogateescape"))
        else:
            out += char.encode("utf-8", "surrogateescape")
    return bytes(out)


def longest_encoder(ids: Mapping[str, int]) -> Callable[[str], list[int]]:
    """Return RWKV's encoder: the longest token at each byte. Every byte must be a token, so there is always a match."""
    by_bytes = {unescaped(text).decode("latin-1"): token for text, token in ids.items()}
    missing = [byte for byte in range(256) if byte and chr(byte) not in by_bytes]
    if missing:
        raise TokenizerError(f"tokenizer.ggml.tokens: no token for the byte 0x{missing[0]:02X}; the file is damaged")
    longest = Matcher(by_bytes).longest

    def encode(text: str) -> list[int]:
        data, out, place = text.encode().decode("latin-1"), [], 0
        while place < len(data):
            found = longest(data, place)
            if found is None:  # a zero byte, which is missing in real vocabularies
                place += 1
                continue
            place, token = found
            out.append(token)
        return out

    return encode


def cheapest_encoder(
    ids: Mapping[str, int], scores: Sequence[float], bytes_: Mapping[int, int]
) -> Callable[[str], list[int]]:
    """Return PLaMo-2's encoder: the segmentation with the highest total score, computed from the end; ties prefer
    longer tokens.

    `scores` is by id. A character without a token has a high cost and is encoded as its bytes, whose ids are in
    `bytes_`.
    """
    if len(bytes_) < 256:
        missing = next(byte for byte in range(256) if byte not in bytes_)
        raise TokenizerError(f"tokenizer.ggml.tokens: no token <0x{missing:02X}>; the file is damaged")
    points = {token: _rounded(scores[token] * _SCALE) for token in ids.values()}
    used = {text: token for text, token in ids.items() if points[token] > _LEAST}
    at = Matcher(used).at

    def encode(text: str) -> list[int]:
        text = text.removeprefix("\ufeff")
        count = len(text)
        best = [0] * (count + 1)  # best total score from each position to the end
        first = [(0, -1)] * (count + 1)  # end and id of the first token on the best path; -1: bytes
        for start in range(count - 1, -1, -1):
            best[start], first[start] = best[start + 1] + _NO_TOKEN, (start + 1, -1)
            for stop, token in at(text, start):
                if (score := best[stop] + points[token]) >= best[start]:
                    best[start], first[start] = score, (stop, token)
        out: list[int] = []
        place = 0
        while place < count:
            stop, token = first[place]
            out += [bytes_[byte] for byte in text[place].encode()] if token < 0 else [token]
            place = stop
        return out

    return encode


def _rounded(value: float) -> int:
    """Round half away from zero, within 32 bits."""
    return int(math.copysign(min(math.floor(abs(value) + 0.5), 2**31 - 1), value))
