"""Pictures and sound for a model: decode files, preprocess them for an encoder, lay out the tokens.

    projector = Projector.of(file, text)                    # of an mmproj file
    for part in projector.picture([picture]): ...           # marker texts (str) and pieces (EncoderInput)

`decode` turns files into arrays. Pillow and soundfile are the extra
`[media]`.

May import: base, gguf, quant, sandbox.
Begin with: encoder_input.py, then projector.py, then pictures.py and sounds.py (the tables).
"""

from __future__ import annotations

from localllm.media.encoder_input import EncoderInput, Flags
from localllm.media.errors import MediaError
from localllm.media.projector import Projector, TextModel

__all__ = ["EncoderInput", "Flags", "MediaError", "Projector", "TextModel"]
