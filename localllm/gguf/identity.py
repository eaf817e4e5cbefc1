"""Identifies the model in a GGUF without reading all of it, so that saved data can be matched with its model.

The identity covers the size and the whole header of every part (metadata, vocabulary, template, and every tensor's
name, shape, format and offset) and the beginning, middle and end of every tensor's data. Training, merging and
quantizing change nearly every byte of a tensor, so two different models only match if someone edits single rows on
purpose. Computing it reads a few megabytes; a hash of the file would read gigabytes.
"""

from __future__ import annotations

import hashlib

from localllm.base.printable import printable
from localllm.gguf.file import GGUFFile

SAMPLE = 1024  # bytes read at each of three places per tensor
_CHUNK = 1 << 20


def identity(file: GGUFFile) -> str:
    """Return a hexadecimal digest (32 characters), equal for copies of a file; raise GGUFError if reading fails."""
    digest = hashlib.blake2b(digest_size=16)
    for shard in file._shards:
        inside = [tensor for tensor in file.tensors.values() if tensor._shard is shard]
        head = min((tensor._offset for tensor in inside), default=shard.size)
        pieces = [(at, min(at + _CHUNK, head)) for at in range(0, head, _CHUNK)]
        for tensor in inside:
            start, stop = tensor._offset, tensor._offset + tensor.nbytes
            for at in (start, (start + stop - SAMPLE) // 2, stop - SAMPLE):
                pieces.append((max(at, start), min(max(at, start) + SAMPLE, stop)))
        digest.update(b"%d;%d;" % (shard.size, len(pieces)))
        for start, stop in pieces:
            buffer = bytearray(stop - start)
            shard.read_into(memoryview(buffer), start, f"identity of {printable(shard.path.name)}")
            digest.update(buffer)
    return digest.hexdigest()
