"""Access the Hugging Face hub or a mirror through huggingface_hub: list the files of a repository, and read their
bytes.

The library handles addresses, tokens (HF_TOKEN), mirrors (HF_ENDPOINT), offline mode (HF_HUB_OFFLINE) and the layout of
the cache. It is imported when the first hub is opened, because the import takes a second.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from localllm import __version__
from localllm.base.printable import printable
from localllm.hub.errors import StoreError
from localllm.hub.hub_cache import COMMIT
from localllm.hub.limits import brief, limit_responses
from localllm.hub.reference import OWNER_AND_REPO

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_SECONDS = 30  # timeout for a request for the list of files
_SHA256, _SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_AGENT: dict[str, Any] = {"library_name": "localllm", "library_version": __version__}


_MOST_FILES = 50_000  # maximum per repository; the largest model repositories have a few thousand


class Remote(NamedTuple):
    """A file of a repository."""

    path: str
    size: int
    digest: str  # SHA-256 of a large file, git's SHA-1 of a small file; also the name of the blob


class Listing(NamedTuple):
    """The files of a repository at a commit."""

    repo: str  # name in the hub's spelling
    commit: str
    files: Mapping[str, Remote]


class FoundRepo(NamedTuple):
    """A repository with GGUF files that a search has found. Numbers that the hub does not report are 0."""

    repo: str
    downloads: int  # in the last 30 days
    likes: int
    parameters: int
    architecture: str
    gated: bool  # its terms must be accepted first


class Interrupted(Exception):
    """The connection ended before the file was complete. A retry may resume it."""


class Hub:
    """A hub to download from. Raises StoreError for all problems except `Interrupted`."""

    def __init__(self, endpoint: str | None = None) -> None:
        """Create a client for `endpoint`; None uses HF_ENDPOINT."""
        from huggingface_hub import HfApi, constants, get_session

        limit_responses(get_session(), _transport_error())
        for name in ("huggingface_hub", _transport_error().__module__.partition(".")[0]):
            logging.getLogger(name).setLevel(logging.ERROR)  # localllm reports progress instead
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self.limit = constants.MAX_HTTP_DOWNLOAD_SIZE  # bytes; larger files require Xet
        if urlsplit(self.endpoint).scheme not in ("http", "https") or not urlsplit(self.endpoint).hostname:
            raise StoreError(f"HF_ENDPOINT is {printable(self.endpoint)}; it must be an address with https://")
        self._api: HfApi = HfApi(endpoint=self.endpoint, **_AGENT)

    @property
    def host(self) -> str:
        return urlsplit(self.endpoint).netloc.rpartition("@")[2]

    def listing(self, repo: str) -> Listing:
        """Return the files of a repository's main branch."""
        from huggingface_hub import errors

        with self._explained(repo), brief():
            try:
                info = self._api.model_info(repo, files_metadata=True, timeout=_SECONDS)
                files = [_remote(each.rfilename, each.size, each.lfs, each.blob_id) for each in info.siblings or ()]
            except (errors.HfHubHTTPError, errors.HFValidationError):
                raise
            except (TypeError, KeyError, AttributeError, ValueError, RecursionError):
                raise StoreError(f"{self.host} does not answer like a Hugging Face hub; check HF_ENDPOINT") from None
        if len(files) > _MOST_FILES:
            raise StoreError(
                f"{repo} lists {len(files)} files, more than {_MOST_FILES}; fetch the model's file yourself"
            )
        commit, name = info.sha or "", info.id if isinstance(info.id, str) else repo
        if not COMMIT.fullmatch(commit):
            raise StoreError(f"{self.host} gives no commit for {repo}; try again later")
        same = name.lower() == repo.lower()
        return Listing(name if same else repo, commit, {file.path: file for file in files if file is not None})

    def search(self, words: str, most: int) -> list[FoundRepo]:
        """Return up to `most` repositories with GGUF files whose names contain the words, most downloaded first.

        The library's own search has no timeout, and repeats a failed request for 23 s.
        """
        from huggingface_hub import errors, get_session, hf_raise_for_status

        asked: dict[str, Any] = {"search": words, "filter": "gguf", "sort": "downloads", "limit": most}
        asked["expand"] = ["downloads", "likes", "gated", "gguf"]
        with self._explained(words), brief():
            try:
                address = f"{self.endpoint}/api/models"
                response = get_session().get(address, params=asked, headers=_headers(), timeout=_SECONDS)
                hf_raise_for_status(response)
                return [repo for each in response.json() if (repo := _found(each)) is not None][:most]
            except errors.HfHubHTTPError:
                raise
            except (TypeError, KeyError, AttributeError, ValueError, RecursionError):
                raise StoreError(f"{self.host} does not answer like a Hugging Face hub; check HF_ENDPOINT") from None

    def check(self, listing: Listing, file: Remote) -> None:
        """Send a HEAD request for a file; raise StoreError if access is denied or the file differs from the listing."""
        from huggingface_hub import get_hf_file_metadata

        with self._explained(listing.repo), brief():
            facts = get_hf_file_metadata(self._url(listing, file), endpoint=self.endpoint, timeout=_SECONDS, **_AGENT)
        if facts.etag != file.digest:
            raise StoreError(
                f"{self.host} announces {printable(file.path)} with a different checksum than in its list; try again "
                "later, or without HF_ENDPOINT"
            )

    def read(self, listing: Listing, file: Remote, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield chunks of a file with their offsets, from `start` or, if the server ignores ranges, from 0.

        Raises Interrupted if the connection is lost or the server is busy.
        """
        from huggingface_hub import constants, get_session, hf_raise_for_status

        headers = {**_headers(), "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        seconds = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with (
            self._explained(listing.repo, interrupted=True),
            get_session().stream("GET", self._url(listing, file), headers=headers, timeout=seconds) as response,
        ):
            if response.status_code == 429 or response.status_code >= 500:
                raise Interrupted(f"the server answered {response.status_code}")
            hf_raise_for_status(response)
            at = _offset(response.headers.get("Content-Range", "")) if response.status_code == 206 else 0
            if at not in (0, start):
                raise Interrupted(f"the server sent bytes from {at}, not from {start}")
            # No chunk size is given: with a chunk size, httpx drops the last bytes when the connection is lost.
            for piece in response.iter_bytes():
                yield at, piece
                at += len(piece)

    def whole(self, listing: Listing, file: Remote, cache: Path) -> Path:
        """Let huggingface_hub store a file in its cache, and return the path there.

        If the blob exists, only a link to it is made. Otherwise the file is downloaded; if the connection is lost, the
        download restarts from the beginning.
        """
        from huggingface_hub import hf_hub_download

        with self._explained(listing.repo):
            place = hf_hub_download(
                listing.repo, file.path, revision=listing.commit, cache_dir=cache, endpoint=self.endpoint, **_AGENT
            )
        return Path(place)

    def _url(self, listing: Listing, file: Remote) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(listing.repo, file.path, revision=listing.commit, endpoint=self.endpoint)

    @contextmanager
    def _explained(self, repo: str, interrupted: bool = False) -> Iterator[None]:
        """Convert the library's errors to StoreError and, with `interrupted`, lost connections to Interrupted."""
        from huggingface_hub import errors

        transport = _transport_error()
        try:
            yield
        except errors.OfflineModeIsEnabled:
            raise StoreError(
                f"HF_HUB_OFFLINE is set, so {repo} cannot be fetched; unset it to use the network"
            ) from None
        except errors.GatedRepoError:
            raise StoreError(
                f"{repo} is gated: accept its terms at {self.endpoint}/{repo}, then set HF_TOKEN to your token "
                f"({self.endpoint}/settings/tokens)"
            ) from None
        except errors.RepositoryNotFoundError:
            raise StoreError(
                f"{self.host} has no model {repo} that you may read; check the name, or set HF_TOKEN if it is private"
            ) from None
        except (errors.EntryNotFoundError, errors.RevisionNotFoundError) as error:
            reason = _cause(error, transport)
            raise StoreError(
                f"cannot reach {self.host}: {reason}" if reason else f"{self.host} no longer has this file of {repo}"
            ) from None
        except errors.HFValidationError:
            raise StoreError(f"{repo} cannot be the name of a repository; check the name") from None
        except errors.HfHubHTTPError as error:
            raise StoreError(_refused(self.host, repo, error.response.status_code)) from None
        except transport as error:
            if interrupted:
                raise Interrupted(_lost(error)) from None
            raise StoreError(f"cannot reach {self.host}: {_reason(error)}; check the network, or HF_ENDPOINT") from None


def _headers() -> dict[str, str]:
    """Return the headers of a request that this module makes itself."""
    from huggingface_hub import constants, get_token

    headers = {"User-Agent": f"localllm/{__version__}"}
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    if token:
        headers["Authorization"] = f"Bearer {token}"  # httpx drops it when redirected to another host
    return headers


def _remote(path: object, size: object, lfs: Any, blob: object) -> Remote | None:
    """Return a file as a Remote, or None if the hub's response has invalid values for it."""
    large = lfs is not None
    size, digest = (lfs.size, lfs.sha256) if large else (size, blob)
    usable = (
        isinstance(path, str)
        and isinstance(size, int)
        and isinstance(digest, str)
        and size >= 0
        and (_SHA256 if large else _SHA1).fullmatch(digest)
        and all(part not in ("", ".", "..") for part in path.split("/"))
        and not re.search(r'[\x00-\x1f\\:*?"<>|]', path)
    )
    return Remote(path, size, digest) if usable else None  # type: ignore[arg-type]


def _found(facts: Mapping[str, Any]) -> FoundRepo | None:
    """Return a search result, or None if its name is invalid."""
    repo = facts["id"]
    if not isinstance(repo, str) or not OWNER_AND_REPO.fullmatch(repo):
        return None
    gguf = found if isinstance(found := facts.get("gguf"), dict) else {}
    counts = facts.get("downloads"), facts.get("likes"), gguf.get("total")
    downloads, likes, parameters = (each if type(each) is int and each >= 0 else 0 for each in counts)
    architecture = gguf.get("architecture")
    return FoundRepo(
        repo, downloads, likes, parameters, architecture if isinstance(architecture, str) else "",
        bool(facts.get("gated")),
    )  # fmt: skip


def _transport_error() -> type[Exception]:
    """Return the base class of httpx's errors. The httpx in use depends on the version of huggingface_hub."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError" and issubclass(base, Exception))


def _offset(header: str) -> int:
    found = re.match(r"bytes (\d{1,18})-", header)
    return int(found[1]) if found else -1


def _refused(host: str, repo: str, status: int) -> str:
    if status in (401, 403):
        return f"{host} refuses {repo} ({status}); set HF_TOKEN to a token that may read it"
    if status == 429:
        return f"{host} limits your requests; try again in a few minutes, or set HF_TOKEN"
    return f"{host} cannot answer for {repo} now (HTTP {status}); try again later"


def _lost(error: Exception) -> str:
    """Return the reason why a connection was lost, for an error message."""
    match type(error).__name__:
        case "ConnectError" | "ConnectTimeout" | "ProxyError":
            return f"cannot connect ({_reason(error)})"
        case "ReadTimeout" | "PoolTimeout" | "WriteTimeout":
            return "no data for some time"
    return "the connection was lost"


def _reason(error: BaseException | None) -> str:
    return printable(str(error) or type(error).__name__, 200)


def _cause(error: BaseException, transport: type[BaseException]) -> str:
    """Return the network error that caused an error of the library, or ""."""
    return _reason(error.__cause__) if isinstance(error.__cause__, transport) else ""
