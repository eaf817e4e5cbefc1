"""The encoders of pictures and sound in a Hugging Face checkpoint, as the keys and tensors of an mmproj file.

Begin with: row.py (the form of a row), then checkpoint.py, which applies it; the other modules are rows by family.
"""

from localllm.convert.encoders.checkpoint import EncoderCheckpoint

__all__ = ["EncoderCheckpoint"]
