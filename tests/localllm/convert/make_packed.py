"""Write data/packed.npz: matrices packed by the compressed-tensors package, and their dequantized values.

python -m tests.localllm.convert.make_packed    # needs torch and compressed-tensors
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.localllm.convert.hf_synthetic import DATA

# Name: rows, columns, quantization config of the weights.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "symmetric": (20, 96, {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "asymmetric": (21, 80, {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False}),
    "channel": (9, 44, {"num_bits": 4, "strategy": "channel"}),
    "channel, asymmetric": (9, 44, {"num_bits": 4, "strategy": "channel", "symmetric": False}),
    "tensor": (8, 40, {"num_bits": 4, "strategy": "tensor"}),
    "8 bits": (7, 64, {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False}),
    "2 bits": (7, 72, {"num_bits": 2, "strategy": "group", "group_size": 24}),
}


def main() -> None:
    import torch
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    stored: dict[str, np.ndarray] = {}
    for name, (rows, columns, told) in CASES.items():
        random = np.random.RandomState(len(stored))
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**told))
        groups = columns // told["group_size"] if told["strategy"] == "group" else 1
        shape = (1,) if told["strategy"] == "tensor" else (rows, groups)
        half = 1 << (told["num_bits"] - 1)
        state = {
            "weight": torch.from_numpy(random.standard_normal((rows, columns)).astype(np.float32)),
            "weight_scale": torch.from_numpy((0.5 + random.random_sample(shape)).astype(np.float32) * 2.0 / half),
            "weight_zero_point": torch.from_numpy(random.randint(-half // 2, half // 2, shape).astype(np.int8)),
        }
        if told.get("symmetric", True):
            state["weight_zero_point"].zero_()
        packed = PackedQuantizationCompressor.compress(state, scheme)
        numbers = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
        stored |= {f"{name}:{key}": x.numpy() for key, x in packed.items()} | {f"{name}:numbers": numbers.numpy()}
    np.savez_compressed(DATA / "packed.npz", **stored)


if __name__ == "__main__":
    main()
