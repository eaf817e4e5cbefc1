"""A second implementation of the samplers from their definitions: plain float64 Python over a list of (id, logit).

The order of the list is part of the definition: either as given, or by descending logit with ties ordered by id.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence

Items = list[tuple[int, float]]


def float32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0] if abs(x) < 3.4e38 else math.copysign(math.inf, x)


def softmax(items: Items) -> list[float]:
    peak = max(logit for _, logit in items)
    weights = [math.exp(logit - peak) for _, logit in items]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def falling(items: Items) -> Items:
    return sorted(items, key=lambda item: (-item[1], item[0]))


def entropy(p: Sequence[float]) -> float:
    return math.fsum(-x * math.log(x) for x in p if x > 0)


def penalties(
    items: Items, history: Sequence[int], last: int, repeat: float, frequency: float, presence: float
) -> Items:
    window = list(history)[max(0, len(history) - last) :]
    result = []
    for token, logit in sorted(items):
        if token in window:
            logit = logit * repeat if logit <= 0 else logit / repeat
            logit = float32(logit - window.count(token) * frequency - presence)
        result.append((token, logit))
    return result


def dry_lengths(window: Sequence[int], allowed: int, breakers: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return token -> longest repetition that the token would continue, for repetitions of at least `allowed`
    tokens.
    """
    n = len(window)
    reach = n
    for start in range(n):  # the latest start of a sequence breaker counts; among breakers with that start, the longest
        ends = [start + len(b) for b in breakers if list(window[start : start + len(b)]) == list(b)]
        if ends:
            reach = n - max(ends)
    if n <= allowed or reach < allowed:
        return {}
    longest: dict[int, int] = {}
    for end in range(n - 1):  # window[..end] may end with the same tokens as window[..n-1]
        length = 0
        while length <= end and window[end - length] == window[n - 1 - length]:
            length += 1
        length = min(length, reach)
        token = window[end + 1]
        if length >= allowed and [token] not in [list(b) for b in breakers]:
            longest[token] = max(length, longest.get(token, 0))
    return longest


def dry(
    items: Items,
    history: Sequence[int],
    last: int,
    multiplier: float,
    base: float,
    allowed: int,
    breakers: Sequence[Sequence[int]] = (),
) -> Items:
    longest = dry_lengths(list(history)[max(0, len(history) - last) :], allowed, breakers)
    if not longest:
        return items
    return [
        (token, float32(logit - multiplier * base ** (longest[token] - allowed)) if token in longest else logit)
        for token, logit in sorted(items)
    ]


def top_n_sigma(items: Items, n: float) -> Items:
    finite = [logit for _, logit in items if logit > -math.inf]
    mean = sum(finite) / len(finite)
    sigma = math.sqrt(sum((logit - mean) ** 2 for logit in finite) / len(finite))
    return [(token, logit if logit >= max(finite) - n * sigma else -math.inf) for token, logit in items]


def top_k(items: Items, k: int) -> Items:
    return falling(items)[:k]


def typ_p(items: Items, p: float, min_keep: int = 0) -> Items:
    probabilities = softmax(items)
    expected = entropy(probabilities)
    away = [abs(-math.log(x) - expected) if x > 0 else math.inf for x in probabilities]
    chosen: set[int] = set()
    total = 0.0
    for i in sorted(range(len(items)), key=lambda i: away[i]):
        if total > p and len(chosen) >= min_keep:
            break
        chosen.add(i)
        total += probabilities[i]
    return [item for i, item in enumerate(items) if i in chosen]


def top_p(items: Items, p: float, min_keep: int = 0) -> Items:
    items = falling(items)
    kept: Items = []
    total = 0.0
    for item, probability in zip(items, softmax(items), strict=True):
        if kept and total >= p and len(kept) >= min_keep:
            break
        kept.append(item)
        total += probability
    return kept


def min_p(items: Items, p: float, min_keep: int = 0) -> Items:
    peak = max(logit for _, logit in items)
    kept = [(token, logit) for token, logit in items if math.exp(logit - peak) >= p * (1 - 1e-9)]
    return kept if len(kept) >= min_keep else falling(items)[:min_keep]


def xtc(items: Items, threshold: float, min_keep: int = 0) -> Items:
    """Apply XTC after its random draw has activated it."""
    probabilities = dict(zip([token for token, _ in items], softmax(items), strict=True))
    likely = [token for token, _ in falling(items) if probabilities[token] >= max(threshold, 5e-324)]
    gone = likely[:-1]
    return items if len(items) - len(gone) < min_keep else [item for item in items if item[0] not in gone]


def temperature(items: Items, degree: float, spread: float = 0.0, exponent: float = 1.0) -> Items:
    if spread > 0 and len(items) > 1:
        share = entropy(softmax(items)) / math.log(len(items))
        low, high = max(0.0, degree - spread), degree + spread
        degree = low + (high - low) * share**exponent
    if degree < 1e-10:  # effectively 0, but 1/degree is still a float32
        return falling(items)[:1]
    return [(token, float32(logit / float32(degree))) for token, logit in items]


def distribution(items: Items) -> Mapping[int, float]:
    return {token: p for (token, _), p in zip(items, softmax(items), strict=True) if p > 0}


def chain(items: Items, *steps: Callable[[Items], Items]) -> Mapping[int, float]:
    for step in steps:
        items = step(items)
    return distribution(items)
