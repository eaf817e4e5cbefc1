"""The files of the web page, with headers for caching and for the content security policy."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).with_name("page")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".md": "text/plain; charset=utf-8",
    ".LICENSE": "text/plain; charset=utf-8",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # scripts can only insert HTML from the sanitizer
        "trusted-types dompurify",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-cache",  # revalidate each time, by ETag
}


@dataclass(frozen=True, slots=True)
class File:
    """A file of the page."""

    data: bytes
    media_type: str
    etag: str  # quoted, as in the header

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every response with this file, and of a 304."""
        return HEADERS | {"ETag": self.etag}


def read_files(folder: Path) -> dict[str, File]:
    """Return the files of a folder by name, such as vendor/marked.esm.js. Unknown file types are skipped."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in TYPES and path.is_file():
            data = path.read_bytes()
            etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
            found[path.relative_to(folder).as_posix()] = File(data, TYPES[path.suffix], etag)
    return found
