"""The data of an explanation as JSON values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from localllm.explain.account import Phase, Spent
from localllm.explain.explanation import Explanation
from localllm.explain.lessons import lessons
from localllm.explain.record import StepRecord


def facts(it: Explanation) -> dict[str, Any]:
    """Return all data that the HTML page shows. Times are in seconds, sizes in bytes."""
    account, record = it.account, it.account.record
    drafts = account.drafts
    return {
        "model": it.model,
        "device": it.device,
        "question": it.question,
        "answer": it.answer,
        "reason": account.reason,
        "seed": record.seed,
        "samplers": list(record.chain),
        "lessons": {lesson.title.lower(): lesson.text for lesson in lessons(account)},
        "prompt": [_token(it, token) for token in record.prompt],
        "reused": {"tokens": record.reused, "blocks": record.reused_blocks},
        "cache": {"tokens": record.held, "bytes_per_token": account.cache_per_token, "blocks": account.blocks},
        "roofs": account.roofs._asdict(),
        "time": dict(account.time),
        "steps": [_step(step) for step in record.steps],
        "phases": [_phase(phase) for phase in account.phases],
        "drafts": None if drafts is None else asdict(drafts),
        "choices": [_token(it, choice.token) | asdict(choice) for choice in record.choices],
    }


def _token(it: Explanation, token: int) -> dict[str, Any]:
    raw = it.piece(token)
    return {"id": token if token >= 0 else None, "text": raw.decode("utf-8", "replace"), "bytes": raw.hex()}


def _step(step: StepRecord) -> dict[str, Any]:
    return {
        "who": step.who,
        "began": step.began,
        "ended": step.ended,
        "first": step.first,
        "tokens": [token if token >= 0 else None for token in step.tokens],
        "logit_rows": step.logit_rows,
    }


def _phase(phase: Phase) -> dict[str, Any]:
    return {
        "name": phase.name,
        "passes": len(phase.steps),
        "rows": phase.rows,
        "seconds": phase.seconds,
        "kinds": [_spent(each) for each in (*phase.kinds, phase.whole)],
    }


def _spent(each: Spent) -> dict[str, Any]:
    return {
        "kind": each.kind,
        "operations_in_a_pass": each.calls,
        "seconds": each.seconds,
        "waited": each.waited,
        "bytes": each.bytes,
        "operations": each.operations,
        "memory_roof_share": each.memory_share,
        "arithmetic_roof_share": each.compute_share,
        "bound": each.bound,
    }
