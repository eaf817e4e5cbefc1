"""All rows, by model class."""

from __future__ import annotations

from localllm.convert.encoders import deepseek, gemma, internvl, pixtral, qwen, siglip, whisper
from localllm.convert.encoders.row import EncoderRow

_ROWS: list[EncoderRow] = [
    row for module in (qwen, gemma, siglip, pixtral, internvl, deepseek, whisper) for row in module.ROWS
]
ROWS_BY_CLASS: dict[str, EncoderRow] = {name: row for row in _ROWS for name in row.classes}
