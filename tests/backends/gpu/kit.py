"""Every model of the kit on a device against llama.cpp's logits; takes half an hour on PoCL.

python -m tests.backends.gpu.kit [opencl|cuda] [NAME ...]
"""

from __future__ import annotations

import sys

from localllm.backends import open_backend
from tests.backends.test_kit import logits
from tests.models.kit import KIT
from tests.models.support import nmse


def main() -> int:
    kind, *names = sys.argv[1:] or ["opencl"]
    backend, wrong = open_backend(kind), 0
    for name in names or KIT:
        model = KIT[name]
        found = float(nmse(logits(backend, model), model.stored["logits"]).max())
        wrong += found >= model.limit()
        print(f"{name}: {found:.1e}{'' if found < model.limit() else ' WRONG'}", flush=True)
    print(f"{wrong} wrong on {backend.describe()}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
