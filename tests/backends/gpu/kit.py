"""Every model of the kit on a device against llama.cpp's logits or embeddings; takes half an hour on PoCL.

python -m tests.backends.gpu.kit [opencl|cuda] [NAME ...]
"""

from __future__ import annotations

import sys

from localllm.backends import open_backend
from tests.backends.test_kit import logits
from tests.models.kit import EMBEDDERS, KIT
from tests.models.support import nmse
from tests.models.test_embeddings import HALVES, off


def main() -> int:
    kind, *names = sys.argv[1:] or ["opencl"]
    backend, wrong = open_backend(kind), 0
    for name in names or [*KIT, *EMBEDDERS]:
        if name in EMBEDDERS:
            found, limit = off(backend, name), HALVES
        else:
            found, limit = float(nmse(logits(backend, KIT[name]), KIT[name].stored["logits"]).max()), KIT[name].limit()
        wrong += found >= limit
        print(f"{name}: {found:.1e}{'' if found < limit else ' WRONG'}", flush=True)
    print(f"{wrong} wrong on {backend.describe()}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
