"""The table of formats: one entry per GGUF tensor type. To add a format, add a module and an entry."""

from __future__ import annotations

from localllm.quant.format import Format
from localllm.quant.formats import (
    fp4,
    fp8,
    iq1,
    iq2,
    iq3,
    iq4,
    plain,
    q1_q2,
    q2_k,
    q3_k,
    q4_k_q5_k,
    q4_q5,
    q6_k,
    q8_0,
    ternary,
)

# fmt: off
_ROWS = (
    # name, type id, values and bytes per block, reader, writer
    Format("F32",      0,   1,   4, plain.dequantize_f32,      plain.quantize_f32),
    Format("F16",      1,   1,   2, plain.dequantize_f16,      plain.quantize_f16),
    Format("BF16",    30,   1,   2, plain.dequantize_bf16,     plain.quantize_bf16),
    Format("Q4_0",     2,  32,  18, q4_q5.dequantize_q4_0,     q4_q5.quantize_q4_0),
    Format("Q4_1",     3,  32,  20, q4_q5.dequantize_q4_1,     q4_q5.quantize_q4_1),
    Format("Q5_0",     6,  32,  22, q4_q5.dequantize_q5_0,     q4_q5.quantize_q5_0),
    Format("Q5_1",     7,  32,  24, q4_q5.dequantize_q5_1,     q4_q5.quantize_q5_1),
    Format("Q8_0",     8,  32,  34, q8_0.dequantize,           q8_0.quantize),
    Format("Q2_K",    10, 256,  84, q2_k.dequantize,           q2_k.quantize),
    Format("Q3_K",    11, 256, 110, q3_k.dequantize,           q3_k.quantize),
    Format("Q4_K",    12, 256, 144, q4_k_q5_k.dequantize_q4_k, q4_k_q5_k.quantize_q4_k),
    Format("Q5_K",    13, 256, 176, q4_k_q5_k.dequantize_q5_k, q4_k_q5_k.quantize_q5_k),
    Format("Q6_K",    14, 256, 210, q6_k.dequantize,           q6_k.quantize),
    Format("IQ1_S",   19, 256,  50, iq1.dequantize_iq1_s,      iq1.quantize_iq1_s),
    Format("IQ1_M",   29, 256,  56, iq1.dequantize_iq1_m,      iq1.quantize_iq1_m),
    Format("IQ2_XXS", 16, 256,  66, iq2.dequantize_iq2_xxs,    iq2.quantize_iq2_xxs),
    Format("IQ2_XS",  17, 256,  74, iq2.dequantize_iq2_xs,     iq2.quantize_iq2_xs),
    Format("IQ2_S",   22, 256,  82, iq2.dequantize_iq2_s,      iq2.quantize_iq2_s),
    Format("IQ3_XXS", 18, 256,  98, iq3.dequantize_iq3_xxs,    iq3.quantize_iq3_xxs),
    Format("IQ3_S",   21, 256, 110, iq3.dequantize_iq3_s,      iq3.quantize_iq3_s),
    Format("IQ4_NL",  20,  32,  18, iq4.dequantize_iq4_nl,     iq4.quantize_iq4_nl),
    Format("IQ4_XS",  23, 256, 136, iq4.dequantize_iq4_xs,     iq4.quantize_iq4_xs),
    Format("TQ1_0",   34, 256,  54, ternary.dequantize_tq1_0,  ternary.quantize_tq1_0),
    Format("TQ2_0",   35, 256,  66, ternary.dequantize_tq2_0,  ternary.quantize_tq2_0),
    Format("MXFP4",   39,  32,  17, fp4.dequantize_mxfp4,      fp4.quantize_mxfp4),
    Format("NVFP4",   40,  64,  36, fp4.dequantize_nvfp4,      fp4.quantize_nvfp4),
    Format("Q1_0",    41, 128,  18, q1_q2.dequantize_q1_0,     q1_q2.quantize_q1_0),
    Format("Q2_0",    42,  64,  18, q1_q2.dequantize_q2_0,     q1_q2.quantize_q2_0),
    Format("F64",     28,   1,   8, plain.dequantize_f64,      None),
    Format("I8",      24,   1,   1, plain.dequantize_i8,       None),
    Format("I16",     25,   1,   2, plain.dequantize_i16,      None),
    Format("I32",     26,   1,   4, plain.dequantize_i32,      None),
    Format("I64",     27,   1,   8, plain.dequantize_i64,      None),
)
# fmt: on

FORMATS: dict[str, Format] = {row.name: row for row in _ROWS}
BY_TYPE_ID: dict[int, Format] = {row.type_id: row for row in _ROWS}

# Formats for the KV cache, by llama.cpp's names. FP8 is not a GGUF type and has no type id.
FP8 = Format("FP8", -1, 1, 1, fp8.dequantize, fp8.quantize)
CACHE_FORMATS: dict[str, Format] = {
    "f32": FORMATS["F32"],
    "f16": FORMATS["F16"],
    "bf16": FORMATS["BF16"],
    "q8_0": FORMATS["Q8_0"],
    "q5_1": FORMATS["Q5_1"],
    "q5_0": FORMATS["Q5_0"],
    "q4_1": FORMATS["Q4_1"],
    "q4_0": FORMATS["Q4_0"],
    "fp8": FP8,
}
