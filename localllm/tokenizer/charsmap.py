"""SentencePiece's character normalization table (`tokenizer.ggml.precompiled_charsmap`): a trie in a double array.

Format: the trie's size in bytes (uint32), its nodes (uint32 each), then zero-terminated replacements. At each position
of a text, the longest prefix in the trie is replaced. A node has the label of its incoming edge in bits 0 to 7, bit 8
if a replacement ends there, and the offset of its children in bits 10 to 30, times 256 if bit 9 is set. The index of a
child is the XOR of its parent's index, that offset and the label.
"""

from __future__ import annotations

import numpy as np

from localllm.tokenizer.errors import TokenizerError

_KEY = "tokenizer.ggml.precompiled_charsmap"
_DEEPEST = 64  # maximum bytes of a replaced text; about 20 in real tables
_LONGEST = 256  # maximum bytes of a replacement; the longest in Unicode has 33
_LABEL, _LEAF = 0x8000_00FF, 0x100


class CharsMap:
    """Replaces characters according to a table. A corrupt table raises TokenizerError, at the latest on use."""

    def __init__(self, table: bytes) -> None:
        size = int.from_bytes(table[:4], "little")
        if len(table) < 4 or size % 4 or 4 + size >= len(table):
            raise _damaged(f"{len(table)} bytes cannot hold a trie of {size} bytes and replacements")
        self._nodes = np.frombuffer(table, "<u4", size // 4, 4).astype(np.uint32).data
        self._replacements = table[4 + size :]
        self._texts: dict[int, bytes] = {}

    def apply(self, text: str) -> str:
        """Return `text` with every longest match replaced, from left to right."""
        data, out, place = text.encode(), bytearray(), 0
        while place < len(data):
            length, offset = self._longest(data, place)
            if length:
                out += self._replacement(offset)
                place += length
            else:
                stop = place + _width(data[place])
                out += data[place:stop]
                place = stop
        return out.decode("utf-8", "replace")

    def _longest(self, data: bytes, place: int) -> tuple[int, int]:
        """Return the length of the longest match at `place` and the offset of its replacement; (0, 0) without one."""
        nodes, found = self._nodes, (0, 0)
        try:
            index = _children(nodes[0])
            for length, byte in enumerate(data[place : place + _DEEPEST], 1):
                index ^= byte
                if not byte or (node := nodes[index]) & _LABEL != byte:
                    break
                index ^= _children(node)
                if node & _LEAF:
                    found = length, nodes[index] & 0x7FFF_FFFF
        except IndexError:
            raise _damaged("its trie points outside itself") from None
        return found

    def _replacement(self, offset: int) -> bytes:
        found = self._texts.get(offset)
        if found is None:
            stop = self._replacements.find(b"\0", offset, offset + _LONGEST + 1)
            if stop < 0:
                raise _damaged(f"no replacement of up to {_LONGEST} bytes starts at byte {offset}")
            found = self._texts[offset] = self._replacements[offset:stop]
        return found


def _children(node: int) -> int:
    return node >> 10 << ((node & 0x200) >> 6)


def _width(byte: int) -> int:
    """Return the byte length of a character from its first byte; 1 inside a character (invalid tables)."""
    return 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4


def _damaged(why: str) -> TokenizerError:
    return TokenizerError(f"{_KEY}: {why}; the file is damaged")
