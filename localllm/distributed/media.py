"""Pictures and sounds of a prompt on their way to a replica: the front prepares them, the replica encodes them.

The preprocessed tensors travel as bytes, within `MOST_BYTES`, and are read without pickle. The replica
computes keys and embeddings itself, with its own mmproj file.
"""

from __future__ import annotations

from collections.abc import Sequence

from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting
from localllm.distributed.membership import OBJECTS
from localllm.engine import MediaSpan
from localllm.loading.multimodal import Multimodal
from localllm.loading.packed_media import DAMAGED, pack, unpack

MOST_BYTES = OBJECTS // 2  # of a request, and of all open ones: Ray's shared memory keeps them until the answers end

Placed = tuple[int, bytes]  # the number of text tokens before a picture or sound, and its bytes


def check_media(prompt: Sequence[int | MediaSpan]) -> None:
    """Raise LocalLLMError for pictures and sounds that cannot be sent."""
    spans = [each for each in prompt if isinstance(each, MediaSpan)]
    if any(span.source is None for span in spans):
        raise LocalLLMError("replicas encode pictures and sound themselves, and take no finished embeddings")
    if (size := media_bytes(prompt)) > MOST_BYTES:
        problem = (
            f"the pictures and sounds of this prompt take {size >> 20} MiB prepared, and {MOST_BYTES >> 20} can be"
        )
        raise LocalLLMError(
            Notice(f"{problem} sent to a replica; send fewer or smaller ones, or set ", Setting("image_max_tokens"))
        )


def media_bytes(prompt: Sequence[int | MediaSpan]) -> int:
    """Return the bytes of the prepared pictures and sounds of a prompt."""
    return sum(each.source[0].nbytes for each in prompt if isinstance(each, MediaSpan) and each.source is not None)


def packed(prompt: Sequence[int | MediaSpan]) -> tuple[Placed, ...]:
    """Return the pictures and sounds of a prompt that `check_media` accepts."""
    found, text = [], 0
    for each in prompt:
        if isinstance(each, MediaSpan):
            assert each.source is not None
            found.append((text, pack(*each.source)))
        else:
            text += 1
    return tuple(found)


def unpacked(
    text: Sequence[int | MediaSpan], media: Sequence[Placed], multimodal: Multimodal | None
) -> list[int | MediaSpan]:
    """Return the prompt of a replica with these encoders, from the tokens of its text and from `packed`. Raises
    LocalLLMError.
    """
    if media and multimodal is None:
        raise LocalLLMError("this replica has no encoders of pictures and sound; restart the server")
    found: list[int | MediaSpan] = []
    at = 0
    for before, data in media:
        assert multimodal is not None
        if not at <= before <= len(text):
            raise LocalLLMError(DAMAGED)
        found += [*text[at:before], multimodal.span(*unpack(data, multimodal.kinds, MOST_BYTES))]
        at = before
    return [*found, *text[at:]]


def routed(prompt: Sequence[int | MediaSpan]) -> list[int]:
    """Return the prompt as the router compares it: with one number, a hash of the key, for each token of a picture or
    sound.
    """
    found: list[int] = []
    for each in prompt:
        if isinstance(each, MediaSpan):
            found += [~(int.from_bytes(each.key[:4], "little") >> 1)] * each.tokens
        else:
            found.append(each)
    return found
