"""The bytes of a report on a direct connection (direct.py): JSON. Only plain events have bytes; Ray sends the others.

A token takes about 5 microseconds on each side.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

from localllm.cluster.errors import MessageError
from localllm.distributed.messages import Report
from localllm.generation.request import Event, Finished, Logprob, Prefilled, Started, Token
from localllm.generation.statistics import Usage

MOST_BYTES = 8 << 20  # of a report: longer ones travel through Ray
_JSON = json.JSONEncoder(separators=(",", ":"))
_Values = Sequence[Any]


def encoded(report: Report) -> bytes | None:
    """Return the bytes of a report, or None if it has more than plain events, or too many."""
    events = []
    for number, event in report.events:
        if (row := _ROWS.get(type(event))) is None:
            return None
        events.append((number, *row(event)))
    if report.load is not None or report.origin is not None:
        return None
    try:
        data = _JSON.encode((report.number, events, report.steps)).encode()
    except TypeError:  # a number of NumPy
        return None
    return data if len(data) <= MOST_BYTES else None


def decoded(data: bytes) -> Report:
    """Return the report. Raises MessageError if the bytes are damaged."""
    try:
        number, events, steps = json.loads(data)
        made = [(request, _MADE[kind](values)) for request, kind, *values in events]
        return Report(made, None, [(sequences, drafts) for sequences, drafts in steps], number=number)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise MessageError(f"a report of a replica is damaged: {type(error).__name__}") from None


# -- rows: the kind of an event, and its values ----------------------------------------------------------------------


def _of_token(event: Token) -> _Values:
    return 0, event.token, event.text, event.choice, *_of_logprobs((event.logprob,) if event.logprob else ())


def _of_started(event: Started) -> _Values:
    return 1, event.prompt_tokens, event.reused_tokens, event.choice


def _of_prefilled(event: Prefilled) -> _Values:
    return 2, event.evaluated, event.choice, *_of_logprobs(event.logprobs)


def _of_finished(event: Finished) -> _Values:
    return 3, event.reason, event.text, event.stop, event.cached_tokens, event.choice, astuple(event.usage)


def _of_logprobs(found: Sequence[Logprob]) -> _Values:
    return [
        (each.token, each.logprob, each.top, each.data.decode("latin-1"), [d.decode("latin-1") for d in each.top_data])
        for each in found
    ]


def _token(values: _Values) -> Event:
    token, text, choice, *logprobs = values
    return Token(token, text, _logprobs(logprobs)[0] if logprobs else None, (), choice)


def _started(values: _Values) -> Event:
    return Started(*values)


def _prefilled(values: _Values) -> Event:
    evaluated, choice, *logprobs = values
    return Prefilled(evaluated, _logprobs(logprobs), choice)


def _finished(values: _Values) -> Event:
    reason, text, stop, cached, choice, usage = values
    return Finished(reason, text, Usage(*usage), stop, cached, choice=choice)


def _logprobs(found: _Values) -> tuple[Logprob, ...]:
    return tuple([
        Logprob(
            token, logprob, tuple([(one, number) for one, number in top]), data.encode("latin-1"),
            tuple([each.encode("latin-1") for each in top_data]),
        )
        for token, logprob, top, data, top_data in found
    ])  # fmt: skip


_ROWS: dict[type, Callable[[Any], _Values]] = {
    Token: _of_token, Started: _of_started, Prefilled: _of_prefilled, Finished: _of_finished,
}  # fmt: skip
_MADE = (_token, _started, _prefilled, _finished)
