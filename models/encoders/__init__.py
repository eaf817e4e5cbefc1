"""Encoders of pictures and sound: the tensors of an mmproj file as plans, and the order in which they run.

    encoder = encoder_of(metadata, tensors, "vision")
    runs = encoder.encode(pictures)  # a generator of `Run`s, which returns the embeddings

An encoder is a row of data (`projectors`) over shared building blocks. `localllm.engine.encoder` runs it on a backend.

May import: base (printable, notices, files), quant, plan, and the other modules of models.
Begin with: projectors.py and vision.py; `plan.runs` says how an encoder runs.
"""

from __future__ import annotations

from localllm.models.encoders.lookup import encoder_of, supported
from localllm.models.encoders.vision import VisionEncoder

__all__ = ["VisionEncoder", "encoder_of", "supported"]
