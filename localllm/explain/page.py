"""Write an explanation as one HTML file: no scripts, no external resources, external text escaped."""

from __future__ import annotations

from collections.abc import Iterator

from localllm.explain.account import Phase, Spent
from localllm.explain.explanation import Explanation
from localllm.explain.html import Node, Row, element, html_table
from localllm.explain.lessons import lessons
from localllm.explain.record import Candidate, TokenChoice
from localllm.explain.style import CSS
from localllm.explain.text import amount, bytes_of, draft_line, plural, share, shown, stage_line, time
from localllm.explain.timeline import timeline

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(it: Explanation) -> str:
    """Return an explanation as an HTML document."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"How {it.model} answered"),
        element("style", Node(CSS)),
    )
    body = element("body", *_opening(it), *_tokens(it), *_time(it), *_work(it), *_steps(it))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _opening(it: Explanation) -> Iterator[Node]:
    record = it.account.record
    yield element("h1", "How this answer was generated")
    yield element("p", f"{it.model} on {it.device}. Every number is from this run.", cls="soft")
    said = (("Prompt", it.question), ("Answer", it.answer))
    facts = (
        ("Ended by", it.ended_by),
        ("Samplers", ", ".join(record.chain)),
        ("Seed", f"{record.seed}; a run with this seed chooses the same tokens"),
    )
    said_pairs = [_pair(name, text, "said") for name, text in said]
    yield element("dl", *(part for pair in (*said_pairs, *(_pair(*fact) for fact in facts)) for part in pair))
    yield element("h2", "What it shows")
    yield element("dl", *(part for each in lessons(it.account) for part in _pair(each.title, each.text)))
    if it.limits:
        yield element("p", it.limits, cls="soft")


def _pair(name: str, text: str, cls: str = "") -> tuple[Node, Node]:
    keyboard = {"tabindex": "0"} if cls else {}  # the arrow keys scroll a focused element
    return element("dt", name), element("dd", text, cls=cls, **keyboard)


# -- tokens ------------------------------------------------------------------------------------------------------------


def _tokens(it: Explanation) -> Iterator[Node]:
    record = it.account.record
    yield element("h2", f"The prompt: {plural(len(record.prompt), 'token')}")
    yield element(
        "p",
        "Below each token are its bytes in hex. A blue edge begins a chunk, which is evaluated in one pass. "
        "Tokens with a dashed frame were in the cache. Control tokens are italic.",
        cls="soft",
    )
    starts = {step.first for step in record.chunks()}
    chips = [_chip(it, token, n in starts, n < record.reused) for n, token in enumerate(record.prompt)]
    yield element("ol", *chips, cls="tokens")
    yield element("h2", f"The answer: {plural(len(record.choices), 'token')}")
    yield element(
        "p",
        "The line below a token is green from a probability of 50 %, orange from 10 %, and red below. "
        "Click a token to see its candidates.",
        cls="soft",
    )
    yield element("ol", *(_answered(it, number, choice) for number, choice in enumerate(record.choices)), cls="tokens")


def _chip(it: Explanation, token: int, begins: bool, cached: bool) -> Node:
    raw, named = it.piece(token), f"token {token}" if token >= 0 else "token of a picture or a sound"
    marks = (("first", begins), ("cached", cached), ("control", it.is_control(token)))
    names = " ".join(["token", *(name for name, given in marks if given)])
    return element("li", shown(raw) or "\u2205", element("small", bytes_of(raw)), cls=names, title=named)


def _answered(it: Explanation, number: int, choice: TokenChoice) -> Node:
    raw, p = it.piece(choice.token), choice.of(choice.token).model
    names = f"token {'sure' if p >= 0.5 else 'open' if p >= 0.1 else 'rare'}"
    names += " control" if it.is_control(choice.token) else ""
    inside = element("a", shown(raw) or "\u2205", element("small", bytes_of(raw)), href=f"#step-{number + 1}")
    return element("li", inside, cls=names, title=f"token {choice.token}, {share(p)}")


# -- time and work -----------------------------------------------------------------------------------------------------


def _time(it: Explanation) -> Iterator[Node]:
    account = it.account
    ended = account.record.ended or 1.0
    yield element("h2", f"The time line: {time(account.record.ended)}")
    yield from timeline(account.record)
    rows = [Row((name, time(seconds), share(seconds / ended), _bar(seconds / ended))) for name, seconds in account.time]
    yield html_table("Where the time went", ("what", "time", "share", ""), rows, right=(1, 2))
    chunks = [
        Row(
            (
                str(number),
                f"{step.first} to {step.first + len(step.tokens) - 1}",
                str(len(step.tokens)),
                time(step.seconds),
                f"{len(step.tokens) / step.seconds:.0f}",
            )
        )
        for number, step in enumerate(account.record.chunks(), 1)
    ]
    header = ("chunk", "positions", "tokens", "time", "tokens/s")
    yield html_table("The chunks of the prompt", header, chunks, right=(0, 2, 3, 4))


def _work(it: Explanation) -> Iterator[Node]:
    account = it.account
    yield element("h2", "What was read and multiplied")
    yield element(
        "p",
        "Bytes are weights, once per pass, and cache. The memory roof is the speed at which a loop that only reads "
        "got these weights; the arithmetic roof is measured with a loop that only multiplies bytes.",
        cls="soft",
    )
    yield element("p", it.roofs, cls="soft")
    for phase in account.phases:
        passes = f"{phase.name}: {plural(len(phase.steps), 'pass')}, {plural(phase.rows, 'row')}"
        yield element("h3", passes[0].upper() + passes[1:])
        yield _kinds(phase, account.clocked)


def _kinds(phase: Phase, clocked: bool) -> Node:
    header = (
        *("operation", "calls", "time", "of the time", "read", "GB/s", "of memory roof", ""),
        *("done", "of arithmetic roof"),
    )
    rows = [_kind(each, phase.whole, clocked) for each in (*phase.kinds, phase.whole)]
    return html_table("By kind of operation, the longest first", header, rows, right=(1, 2, 3, 4, 5, 6, 8, 9))


def _kind(each: Spent, whole: Spent, clocked: bool) -> Row:
    known = clocked and each.seconds > 0
    told = (
        each.kind,
        str(each.calls),
        time(each.seconds) if known else "",
        share(each.seconds / whole.seconds) if known and whole.seconds else "",
        amount(each.bytes, "B") if each.bytes else "",
        f"{each.bandwidth / 1e9:.1f}" if known and each.bandwidth else "",
        share(each.memory_share) if known and each.bandwidth else "",
        _bar(each.memory_share) if known and each.bandwidth else "",
        amount(each.operations, "op") if each.operations else "",
        share(each.compute_share) if known and each.compute_share else "",
    )
    return Row(told)


def _bar(part: float) -> Node:
    inside = element("span", cls="bar", style=f"width:{100 * min(max(part, 0.0), 1.0):.1f}%")
    return element("span", inside, cls="track")


# -- steps -------------------------------------------------------------------------------------------------------------


def _steps(it: Explanation) -> Iterator[Node]:
    yield element("h2", "Every token of the answer")
    yield element(
        "p",
        "Candidates are listed by the probability that the model gave them. The samplers then removed some and "
        "changed others, in the order of the second table. The token was drawn from the candidates that remained.",
        cls="soft",
    )
    for number, choice in enumerate(it.account.record.choices, 1):
        yield _step(it, number, choice)


def _step(it: Explanation, number: int, choice: TokenChoice) -> Node:
    chosen = choice.of(choice.token)
    told = [f"{share(chosen.model)} by the model", f"{share(chosen.drawn)} when drawn", draft_line(choice)]
    where = f"pass {choice.step + 1}, row {choice.row + 1}; chosen in {time(choice.ended - choice.began)}"
    drafted = f"; {choice.drafter} drafted {shown(it.piece(choice.draft))}" if choice.draft is not None else ""
    rows = [_candidate(it, choice, each) for each in choice.candidates]
    others, mass = f"{choice.others} others", choice.others_mass
    rows.append(Row((others, "", share(mass), _bar(mass), "", "")))
    return element(
        "details",
        element(
            "summary",
            f"{number}. ",
            element("span", shown(it.piece(choice.token)) or "\u2205", cls="token"),
            element("span", f" {', '.join(part for part in told if part)}", cls="soft"),
        ),
        html_table("Candidates", ("token", "bytes", "model", "", "drawn from", ""), rows, right=(2, 4)),
        html_table("Samplers", ("effect of each",), [Row((stage_line(stage),)) for stage in choice.stages]),
        element("p", where + drafted, cls="soft"),
        id=f"step-{number}",
    )


def _candidate(it: Explanation, choice: TokenChoice, each: Candidate) -> Row:
    told = (
        shown(it.piece(each.token)) or "\u2205",
        bytes_of(it.piece(each.token)),
        share(each.model),
        _bar(each.model),
        share(each.drawn) if not each.removed_by else "",
        f"removed by {each.removed_by}" if each.removed_by else "",
    )
    return Row(told, "chosen" if each.token == choice.token else "out" if each.removed_by else "")
