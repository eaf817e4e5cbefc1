"""A local Hugging Face hub: repositories over HTTP as huggingface_hub requests them, with injected network faults.

A second server sends the file contents, because the real hub redirects to another host, which must never
receive the token.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repo:
    files: dict[str, bytes]
    commit: str = COMMIT
    gated: bool = False
    token: str = ""  # access token of a private repository
    facts: dict[str, Any] = field(default_factory=dict)  # what a search reports of it


@dataclass
class Faults:
    """Injected faults. A fault with a count occurs that many times."""

    cuts: int = 0  # number of connections to close early
    cut_at: int = 0  # bytes to send before closing; 0 sends half of the range
    deaf: bool = False  # ignore Range headers
    wrong: bool = False  # send bytes that differ from the listing
    longer: bool = False  # send more bytes than the listing says
    busy: int = 0  # number of 503 responses to requests for contents, and to searches
    pause: float = 0.0  # seconds to wait after each 64 KiB
    etag: str = ""  # ETag to send instead of the right one
    listing: bytes = b""  # response instead of the file listing


@dataclass
class HubServer:
    repos: dict[str, Repo] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    seen: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)  # method, path, headers
    url: str = ""
    content_url: str = ""

    def asked(self, part: str, method: str = "GET") -> list[dict[str, str]]:
        """Return the headers of the requests whose path contains `part`."""
        return [headers for verb, path, headers in self.seen if verb == method and part in path]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def described(repo: str, held: Repo) -> dict[str, Any]:
    """Return the response of /api/models/REPO?blobs=true. Only large model files are LFS objects, as on the hub."""
    siblings: list[dict[str, Any]] = []
    for name, data in held.files.items():
        one: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_id(data)}
        if name.endswith((".gguf", ".safetensors")) and len(data) > 64:
            one["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 134}
        siblings.append(one)
    return {"id": repo, "modelId": repo, "sha": held.commit, "siblings": siblings, "private": False, "tags": []}


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *words: object) -> None:
        pass

    def handle(self) -> None:
        with suppress(OSError):  # clients may disconnect
            super().handle()

    def do_HEAD(self) -> None:
        self._note()
        self._answer()

    def do_GET(self) -> None:
        self._note()
        self._answer()

    def _note(self) -> None:
        self.hub.seen.append((self.command, self.path, {name.lower(): value for name, value in self.headers.items()}))

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        for name in self.hub.repos:  # the hub redirects names with other capitalization
            if (wrong := re.search(re.escape(name), path, re.IGNORECASE)) and name not in path:
                self._send(307, Location=self.path.replace(wrong[0], name))
                return
        if path == "/api/models":
            self._search(parse_qs(urlsplit(self.path).query))
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/.*)?", path):
            self._list(found[1])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(found[1], found[2], found[3])
        elif found := re.fullmatch(r"/content/([^/]+/[^/]+)/(.+)", path):
            self._content(self.hub.repos[found[1]].files[found[2]])
        else:
            self._send(404, b"{}")

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str, text: str) -> None:
        body = json.dumps({"error": text}).encode()
        self._send(status, body, X_Error_Code=code, X_Error_Message=text)

    def _allowed(self, name: str) -> Repo | None:
        """Return the repository, or send an error and return None if the client has no access."""
        held = self.hub.repos.get(name)
        if held is None or (held.token and self.headers.get("Authorization") != f"Bearer {held.token}"):
            self._refuse(401 if held is None else 404, "RepoNotFound", "Repository not found")
            return None
        return held

    def _search(self, query: dict[str, list[str]]) -> None:
        if self.hub.faults.busy:
            self.hub.faults.busy -= 1
            self._send(503, b"busy")
            return
        words = query["search"][0].lower().split()
        named = [name for name in self.hub.repos if all(word in name.lower() for word in words)]
        named.sort(key=lambda name: -self.hub.repos[name].facts.get("downloads", 0))
        shown = [{"id": name, **self.hub.repos[name].facts} for name in named if "gguf" in name.lower()]
        found = json.dumps(shown[: int(query["limit"][0])]).encode()
        self._send(200, self.hub.faults.listing or found)

    def _list(self, name: str) -> None:
        held = self._allowed(name)
        if held is not None:
            self._send(200, self.hub.faults.listing or json.dumps(described(name, held)).encode())

    def _resolve(self, name: str, revision: str, path: str) -> None:
        held = self._allowed(name)
        if held is None:
            return
        if held.gated and not self.headers.get("Authorization"):
            self._refuse(401, "GatedRepo", "Access to this model is restricted")
        elif held.gated:
            self._refuse(403, "GatedRepo", "You are not on the list")
        elif path not in held.files:
            self._refuse(404, "EntryNotFound", "Entry not found")
        else:
            data = held.files[path]
            large = len(data) > 64
            etag = self.hub.faults.etag or (sha256(data) if large else git_id(data))
            common = {"X_Repo_Commit": held.commit, "ETag": f'"{etag}"', "Accept_Ranges": "bytes"}
            if large:
                target = f"{self.hub.content_url}/content/{name}/{path}"
                linked = {"X_Linked_ETag": f'"{etag}"', "X_Linked_Size": str(len(data))}
                self._send(302, b"Found", Location=target, **common, **linked)
            else:
                self._send(200, data, **common)

    def _content(self, data: bytes) -> None:
        faults = self.hub.faults
        if faults.busy:
            faults.busy -= 1
            self._send(503, b"busy")
            return
        if faults.wrong:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if faults.longer:
            data = data + b"more"
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked and not faults.deaf else 0
        if start > len(data):
            self._send(416)
            return
        body = data[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if faults.cuts:
            faults.cuts -= 1
            self.wfile.write(body[: faults.cut_at or len(body) // 2])
            self.wfile.flush()
            self.close_connection = True  # the response ends before all announced bytes are sent
            self.connection.shutdown(2)
            return
        for at in range(0, len(body), 1 << 16):
            self.wfile.write(body[at : at + (1 << 16)])
            time.sleep(faults.pause)


@contextmanager
def serving(repos: dict[str, Repo]) -> Iterator[HubServer]:
    """Run the hub and its content server on separate ports."""
    hub = HubServer(repos)
    handler: Callable[..., Any] = type("Handler", (_Handler,), {"hub": hub})
    servers = [ThreadingHTTPServer((host, 0), handler) for host in ("127.0.0.1", "127.0.0.2")]
    for server in servers:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    hub.url, hub.content_url = (f"http://{server.server_address[0]}:{server.server_address[1]}" for server in servers)
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
