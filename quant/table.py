"""The table of formats: every tensor type that a GGUF file may hold, one row each. A new format is a file and a row."""

from __future__ import annotations

from quant.format import F32, U8, Format, QuantError
from quant.formats import plain


def _todo(blocks: U8) -> F32:
    raise QuantError("this format is not written yet")


_ROWS = (
    # name, type id, values and bytes per block, reader, writer
    Format("F32", 0, 1, 4, plain.dequantize_f32, plain.quantize_f32),
    Format("F16", 1, 1, 2, plain.dequantize_f16, plain.quantize_f16),
    Format("BF16", 30, 1, 2, plain.dequantize_bf16, plain.quantize_bf16),
    Format("F64", 28, 1, 8, plain.dequantize_f64, None),
    Format("I8", 24, 1, 1, plain.dequantize_i8, None),
    Format("I16", 25, 1, 2, plain.dequantize_i16, None),
    Format("I32", 26, 1, 4, plain.dequantize_i32, None),
    Format("I64", 27, 1, 8, plain.dequantize_i64, None),
    Format("Q4_0", 2, 32, 18, _todo, None),
    Format("Q4_1", 3, 32, 20, _todo, None),
    Format("Q5_0", 6, 32, 22, _todo, None),
    Format("Q5_1", 7, 32, 24, _todo, None),
    Format("Q8_0", 8, 32, 34, _todo, None),
    Format("Q2_K", 10, 256, 84, _todo, None),
    Format("Q3_K", 11, 256, 110, _todo, None),
    Format("Q4_K", 12, 256, 144, _todo, None),
    Format("Q5_K", 13, 256, 176, _todo, None),
    Format("Q6_K", 14, 256, 210, _todo, None),
    Format("IQ1_S", 19, 256, 50, _todo, None),
    Format("IQ1_M", 29, 256, 56, _todo, None),
    Format("IQ2_XXS", 16, 256, 66, _todo, None),
    Format("IQ2_XS", 17, 256, 74, _todo, None),
    Format("IQ2_S", 22, 256, 82, _todo, None),
    Format("IQ3_XXS", 18, 256, 98, _todo, None),
    Format("IQ3_S", 21, 256, 110, _todo, None),
    Format("IQ4_NL", 20, 32, 18, _todo, None),
    Format("IQ4_XS", 23, 256, 136, _todo, None),
    Format("TQ1_0", 34, 256, 54, _todo, None),
    Format("TQ2_0", 35, 256, 66, _todo, None),
    Format("MXFP4", 39, 32, 17, _todo, None),
    Format("NVFP4", 40, 64, 36, _todo, None),
    Format("Q1_0", 41, 128, 18, _todo, None),
    Format("Q2_0", 42, 64, 18, _todo, None),
)

FORMATS: dict[str, Format] = {row.name: row for row in _ROWS}
BY_TYPE_ID: dict[int, Format] = {row.type_id: row for row in _ROWS}
