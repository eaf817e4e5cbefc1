"""Request the metrics of a server: GET /metrics and GET /slots, with limits on time and size.

The server may be another program, so values that are not non-negative numbers are dropped, and no text is kept in full.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from localllm.base.errors import LocalLLMError
from localllm.base.notices import Notice, Setting
from localllm.base.printable import printable
from localllm.cli.app import UsageError

USUAL = "http://127.0.0.1:8080"
SECONDS = 5.0  # timeout to connect, and between two chunks of a response
MOST_SECONDS = 10.0  # timeout of a whole response
MOST_BYTES = 8 << 20
MOST_SLOTS = 1024
MOST_TEXT = 60
LARGEST = 1e18  # maximum of any value
OURS = "localllm_"  # prefix of the metrics that a localllm server defines


class TopError(LocalLLMError):
    """The server cannot be watched. The one-line message gives the reason."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server. `path` is the prefix of its routes, without a trailing slash."""

    secure: bool
    host: str
    port: int
    path: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return printable(f"http{'s' * self.secure}://{host}:{self.port}{self.path}", MOST_TEXT)


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of /metrics."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class SlotSample:
    """A slot with a running request."""

    number: int
    task: int
    prompt: int  # prompt tokens
    cached: int
    processed: int  # prompt tokens evaluated, without cached tokens
    written: int
    left: int  # tokens that may still be generated; -1: no limit
    rate: float  # decode speed in tokens/s, excluding the first token; 0 if unknown


@dataclass(frozen=True, slots=True)
class Look:
    """The state of a server at one moment."""

    at: float  # time.monotonic() in seconds
    samples: Mapping[str, Sequence[Sample]]
    slots: tuple[SlotSample, ...] = ()
    slot_count: int = 0  # total number of slots, including idle ones; 0 if the server does not report it


def address_of(text: str) -> Address:
    """Parse http://HOST:PORT, HOST:PORT or HOST, optionally with a path before the routes. Raise UsageError for other
    text."""
    problem = f"{printable(text)!r} is not the address of a server, such as {USUAL}"
    try:
        found = urlsplit(text if "://" in text else f"http://{text}")
        port = found.port
    except ValueError:
        raise UsageError(problem) from None
    clean = text.isprintable() and " " not in text and not found.query and not found.fragment
    if found.scheme not in ("http", "https") or not found.hostname or found.username is not None or not clean:
        raise UsageError(problem)
    secure = found.scheme == "https"
    path = found.path.rstrip("/").removesuffix("/v1")
    return Address(secure, found.hostname, port if port is not None else 443 if secure else 80, path)


class Client:
    """Polls one server."""

    def __init__(self, address: Address, key: str = "") -> None:
        self.address = address
        self._headers = {"Accept": "*/*", "Connection": "close", "User-Agent": "localllm-top"}
        self._key = key

    def look(self) -> Look:
        """Return the current state of the server. Raise TopError if it is not a localllm server with metrics."""
        status, data = self._get("/metrics")
        if status != 200:
            raise TopError(self._refusal(status))
        samples = samples_of(data)
        if not any(name.startswith(OURS) for name in samples):
            raise TopError(f"{self.address} is not localllm serve: its /metrics has no localllm metrics")
        at = monotonic()
        status, data = self._get("/slots")
        places, slots = slots_of(data) if status == 200 else (0, ())
        return Look(at, samples, slots, places)

    def _get(self, path: str) -> tuple[int, bytes]:
        """Return the status and the body of a response."""
        kind = http.client.HTTPSConnection if self.address.secure else http.client.HTTPConnection
        connection = kind(self.address.host, self.address.port, timeout=SECONDS)
        headers = self._headers | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        until, data = monotonic() + MOST_SECONDS, bytearray()
        try:
            connection.request("GET", self.address.path + path, headers=headers)
            response = connection.getresponse()
            while len(data) <= MOST_BYTES and (piece := response.read1(1 << 16)):
                data += piece
                if monotonic() > until:
                    raise TimeoutError
            if len(data) > MOST_BYTES:
                raise TopError(f"{self.address} is not localllm serve: it sends more than {MOST_BYTES >> 20} MiB")
            return response.status, bytes(data)
        except TimeoutError:
            raise TopError(f"{self.address} did not answer in time") from None
        except (http.client.HTTPException, UnicodeError):
            raise TopError(f"{self.address} does not speak HTTP; is it localllm serve?") from None
        except socket.gaierror:
            raise TopError(f"no such host: {printable(self.address.host, MOST_TEXT)}") from None
        except ssl.SSLError as error:
            raise TopError(f"{self.address}: no secure connection: {printable(error.reason or str(error))}") from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise TopError(
                f"nothing answers at {self.address}: {printable(reason)}; start localllm serve, or give its URL"
            ) from None
        finally:
            connection.close()

    def _refusal(self, status: int) -> str | Notice:
        """Return the reason why /metrics did not answer."""
        match status:
            case 401 if self._key:
                return f"{self.address} does not accept this API key"
            case 401:
                return Notice(f"{self.address} requires an API key; give it with ", Setting("api_key_file"))
            case 403:
                return Notice(f"{self.address} does not accept this host name; start it with ", Setting("allowed_host"))
            case 501:
                return Notice(f"{self.address} reports no metrics: it was started with ", Setting("no_metrics"))
            case _:
                return f"{self.address} is not localllm serve: GET /metrics has status {status}"


def samples_of(data: bytes) -> dict[str, list[Sample]]:
    """Parse a text in Prometheus's format and return its values by name. The result is empty if the text has another
    format."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(data.decode("utf-8")):
            for sample in family.samples:
                value = float(sample.value)
                if 0 <= value <= LARGEST:
                    found.setdefault(sample.name, []).append(Sample(dict(sample.labels), value))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):  # errors of the parser for other formats
        return {}
    return found


def slots_of(data: bytes) -> tuple[int, tuple[SlotSample, ...]]:
    """Return the number of slots and the busy slots, or (0, ()) if the text is something else."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return 0, ()
    if not isinstance(values, list) or len(values) > MOST_SLOTS:
        return 0, ()
    places = [each for each in values if isinstance(each, dict)]
    return len(places), tuple(_slot(each) for each in places if each.get("is_processing") is True)


def _slot(value: Mapping[str, Any]) -> SlotSample:
    answer = value.get("next_token")
    first = answer[0] if isinstance(answer, list) and answer and isinstance(answer[0], dict) else {}
    left = first.get("n_remain")
    return SlotSample(
        number=_count(value.get("id")),
        task=_count(value.get("id_task")),
        prompt=_count(value.get("n_prompt_tokens")),
        cached=_count(value.get("n_prompt_tokens_cache")),
        processed=_count(value.get("n_prompt_tokens_processed")),
        written=_count(first.get("n_decoded")),
        left=-1 if left == -1 else _count(left),
        rate=_number(value.get("predicted_per_second")),
    )


def _number(value: object) -> float:
    known = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST
    return float(value) if known else 0.0  # type: ignore[arg-type]


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**12 else 0
