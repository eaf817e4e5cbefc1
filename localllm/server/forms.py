"""Read an untrusted multipart form: text fields and files, as in requests with uploads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from starlette.requests import Request

from localllm.server.body import read_body
from localllm.server.errors import BadRequest
from localllm.server.lanes import Lane
from localllm.server.limits import ServerLimits

MOST_FIELDS = 64
_MOST_HEAD = 4096  # bytes of a part's header
_MOST_TEXT = 1 << 20  # bytes of a text field
_BOUNDARY = re.compile(
    r'multipart/form-data\s*;.*?\bboundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE | re.DOTALL
)
_NAME = re.compile(r'\bname="([^"]*)"')


class Form(NamedTuple):
    """The fields of a form. Files have no names here, since only their content counts."""

    texts: Mapping[str, str]
    files: Mapping[str, bytes]


async def read_form(request: Request, limits: ServerLimits) -> Form:
    """Read the body as a multipart form; raise BadRequest, TooLarge or TooSlow."""
    found = _BOUNDARY.match(request.headers.get("content-type", ""))
    if found is None:
        raise BadRequest("expected a form (Content-Type: multipart/form-data) with a file")
    body, boundary = await read_body(request, limits), (found[1] or found[2]).encode("latin-1", "replace")
    return await Lane("forms").run(lambda: parse_form(body, boundary))


def parse_form(body: bytes, boundary: bytes) -> Form:
    """Parse a body whose parts are separated by `boundary`."""
    between = b"\r\n--" + boundary
    texts: dict[str, str] = {}
    files: dict[str, bytes] = {}
    whole = b"\r\n" + body
    at = whole.find(between)
    while at >= 0:
        start = at + len(between)
        if whole[start : start + 2] == b"--":
            return Form(texts, files)
        stop, head = whole.find(between, start), whole.find(b"\r\n\r\n", start, start + _MOST_HEAD)
        if whole[start : start + 2] != b"\r\n" or not start <= head < stop or len(texts) + len(files) == MOST_FIELDS:
            break
        header, content = whole[start:head].decode("utf-8", "replace"), whole[head + 4 : stop]
        name = _NAME.search(header)
        if name is None or (len(content) > _MOST_TEXT and "filename" not in header):
            break
        if re.search(r"\bfilename\*?=", header):
            files[name[1]] = content
        else:
            texts[name[1]] = content.decode("utf-8", "replace")
        at = stop
    raise BadRequest("the form is damaged or too large; send one file and a few short fields")
