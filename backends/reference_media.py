"""Reference implementations of the operations on media tokens. All backends must match them."""

from __future__ import annotations

import numpy as np

from localllm.backends.lookups import media_rows
from localllm.backends.reference_state import ReferenceState
from localllm.plan import EmbedMedia, Splice


def embed_media(state: ReferenceState, op: EmbedMedia) -> None:
    rows = media_rows(state.batch, op.out.width)
    state.write(op.out, rows if len(rows) else np.zeros((len(state.batch.tokens), op.out.width)))


def splice(state: ReferenceState, op: Splice) -> None:
    x, media = state.read(op.x), state.read(op.media)[:, op.start : op.start + op.x.width]
    of_media = state.rows(op.x).tokens[:, None] < 0
    state.write(op.out, np.where(of_media, x + media if op.add else media, x))
