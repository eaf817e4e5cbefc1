"""Write data/transformers.json: transformers' renderings of SMALL, and checksums for the reference templates.

The command needs transformers (5.23 was used) and the reference data:

    python -m tests.localllm.template.make_transformers
"""

from __future__ import annotations

import json
import zlib
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

from tests.conftest import SHARED_DATA
from tests.localllm.template.conversations import CASES, NOW, SMALL

DATA = Path(__file__).parent / "data" / "transformers.json"
REFUSED = "-"


class _Then(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        return NOW


def rendered(source: str, case: str) -> str | None:
    from transformers.utils import chat_template_utils  # type: ignore[import-not-found]

    chat_template_utils.datetime = _Then
    messages, how, extra = CASES[case]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    try:
        texts, _ = chat_template_utils.render_jinja_template([messages], chat_template=source, **how, **tokens, **extra)
    except Exception:  # templates raise various errors for unsupported conversations
        return None
    return str(texts[0])


def checksum(text: str | None) -> str:
    return REFUSED if text is None else f"{zlib.crc32(text.encode()):08x}"


def main() -> None:
    small = {name: [rendered(source, case) for case in CASES] for name, source in SMALL.items()}
    sums = {
        path.name: " ".join(checksum(rendered(path.read_text(encoding="utf-8"), case)) for case in CASES)
        for path in sorted((SHARED_DATA / "templates").glob("*.jinja"))
    }
    DATA.write_text(json.dumps({"small": small, "crc32": sums}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
