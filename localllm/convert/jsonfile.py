"""Read the JSON files of a checkpoint. The files are untrusted, so their size is limited."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from localllm.convert.errors import ConvertError
from localllm.convert.files import read_file


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raise ConvertError if it is missing, too large or not an object."""
    value = parse_json(read_file(path), str(path))
    if not isinstance(value, dict):
        raise ConvertError(f"{path}: is not a JSON object; download it again")
    return value


def parse_json(data: bytes | bytearray, where: str) -> Any:
    """Parse JSON text. Duplicate keys in an object are an error, because parsers disagree about which value counts."""
    try:
        return json.loads(data, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        what = "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON: {error}"
        raise ConvertError(f"{where}: {what}; download it again") from None


def steps(value: Any, name: str) -> list[dict[str, Any]]:
    """Return the steps of a component in tokenizer.json: the list `name` of a Sequence, or the component itself."""
    listed = value.get(name) if isinstance(value, dict) and value.get("type") == "Sequence" else [value]
    return objects(listed)


def objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a list; the result is empty if the value is not a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice in one object")
    return found
