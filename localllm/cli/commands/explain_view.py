"""The terminal view of `localllm explain`, with rich. Long lists are shortened; the HTML page has the full lists."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from localllm.base.printable import printable
from localllm.cli.terminal.console import raw, room
from localllm.explain.account import Phase, Spent
from localllm.explain.explanation import Explanation
from localllm.explain.lessons import lessons
from localllm.explain.record import Record, TokenChoice
from localllm.explain.text import amount, bytes_of, draft_line, plural, share, short_stage, shown, time

PROMPT_ENDS = 40  # first and last prompt tokens shown
STEPS = 12  # answer tokens shown
LISTED = 4  # candidates shown per token
BAR = 60  # width of the timeline in characters
WIDTH = 120  # columns, if stdout is a pipe
_WORK = (
    ("operation", False), ("calls", True), ("time", True), ("read", True), ("GB/s", True),
    ("of memory roof", True), ("done", True), ("of arithmetic roof", True),
)  # fmt: skip
_NARROW = (0, 2, 5, 7)  # columns of `_WORK` on a narrow terminal
STYLES = {"prompt": "blue", "decoding": "green", "verifying": "yellow", "draft": "magenta", "sampling": "red"}
LETTERS = {"prompt": "P", "decoding": "d", "verifying": "v", "draft": "m", "sampling": "s"}


def view(it: Explanation) -> None:
    """Print an explanation on stdout."""
    stream = raw(sys.stdout)
    console = Console(file=stream, width=room() or WIDTH, highlight=False, markup=False, emoji=False)
    sys.stdout.flush()
    for part in _parts(it, console):
        console.print(part)
    stream.flush()


def _parts(it: Explanation, console: Console) -> Iterator[Group | Text | Table | Padding]:
    record = it.account.record
    yield Text(f"\n{printable(it.model, None)} on {it.device}; ended by {it.ended_by}", "dim")
    yield Text(f"samplers: {', '.join(record.chain)}; seed {record.seed}", "dim")
    yield _heading("What it shows")
    for lesson in lessons(it.account):
        yield Text.assemble((f"{lesson.title}: ", "bold"), lesson.text)
    if it.limits:
        yield Text(it.limits, "dim")
    yield _heading(f"The prompt: {plural(len(record.prompt), 'token')}, text and bytes")
    yield _prompt(it)
    yield _heading(f"The time line: {time(record.ended)}")
    yield _line(record, min(BAR, console.width - 12))
    yield _times(it)
    yield _heading("What was read and multiplied")
    yield Text(it.roofs, "dim")
    for phase in it.account.phases:
        yield _work(phase, it.account.clocked, console)
    yield _heading(f"The answer: {plural(len(record.choices), 'token')}")
    yield _choices(it, record.choices[:STEPS])
    if len(record.choices) > STEPS:
        yield Text(f"{len(record.choices) - STEPS} more tokens: -o FILE.html writes them all to a page.", "dim")


def _heading(text: str) -> Text:
    return Text(f"\n{text}", "bold underline")


def _table(*columns: tuple[str, bool]) -> Table:
    """Return an empty table. A column is a name and whether it is numeric."""
    found = Table(box=None, pad_edge=False, header_style="dim")
    for name, number in columns:
        found.add_column(name, justify="right" if number else "left", overflow="fold")
    return found


def _prompt(it: Explanation) -> Text:
    record = it.account.record
    starts, line = {step.first for step in record.chunks()}, Text()
    items, left_out = _items(record.prompt), 0
    for number, (at, count) in enumerate(items):
        token = record.prompt[at]
        if token >= 0 and PROMPT_ENDS <= number < len(items) - PROMPT_ENDS:
            left_out += 1
            continue
        if left_out:
            line.append(f"... {plural(left_out, 'token')} ... ", "dim")
            left_out = 0
        if at in starts:
            line.append("[chunk] ", "blue")
        style = "dim" if at < record.reused else "italic" if it.is_control(token) else "bold"
        if token < 0:
            line.append(f"<picture or sound: {plural(count, 'token')}>  ", style)
            continue
        raw_bytes = it.piece(token)
        line.append(shown(raw_bytes), style).append(f" {bytes_of(raw_bytes)}  ", "dim")
    return line


def _items(prompt: Sequence[int]) -> list[tuple[int, int]]:
    """Return tokens, and runs of media tokens, as (position, number of tokens)."""
    found: list[tuple[int, int]] = []
    for at, token in enumerate(prompt):
        if token < 0 and found and prompt[at - 1] < 0:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((at, 1))
    return found


def _line(record: Record, bar: int) -> Text:
    """Return a timeline of `bar` letters. Each letter names the step that took most of its interval."""
    total, chunks = record.ended or 1.0, {id(step) for step in record.chunks()}
    shares: list[dict[str, float]] = [{} for _ in range(bar)]

    def add(name: str, began: float, ended: float) -> None:
        for cell in range(int(began / total * bar), min(int(ended / total * bar), bar - 1) + 1):
            inside = min(ended, (cell + 1) * total / bar) - max(began, cell * total / bar)
            shares[cell][name] = shares[cell].get(name, 0.0) + inside

    for step in record.steps:
        several = "decoding" if len(step.tokens) == 1 else "verifying"
        add("draft" if step.who == "draft" else "prompt" if id(step) in chunks else several, step.began, step.ended)
    for choice in record.choices:
        add("sampling", choice.began, choice.ended)
    line, used = Text("0 "), list[str]()
    for cell in shares:
        name = max(cell, key=lambda each: cell[each], default="")
        line.append(LETTERS.get(name, "."), STYLES.get(name, "dim"))
        used += [name] if name and name not in used else []
    line.append(f" {time(total)}   ")
    for name in used:
        line.append(f"{LETTERS[name]} ", STYLES[name]).append(f"{name}  ", "dim")
    return line


def _times(it: Explanation) -> Table:
    found, ended = _table(("what", False), ("time", True), ("share", True)), it.account.record.ended or 1.0
    for name, seconds in it.account.time:
        found.add_row(name, time(seconds), share(seconds / ended))
    return found


def _work(phase: Phase, clocked: bool, console: Console) -> Group:
    """Return the table of a phase. A narrow terminal gets its most important columns."""

    def table(columns: Sequence[int]) -> Table:
        found = _table(*(_WORK[column] for column in columns))
        for each in (*phase.kinds, phase.whole):
            cells = _kind(each, clocked)
            found.add_row(*(cells[column] for column in columns), style="bold" if each is phase.whole else "")
        return found

    whole = table(range(len(_WORK)))
    told = f"\n{phase.name}: {plural(len(phase.steps), 'pass')}, {plural(phase.rows, 'row')}"
    wide = console.measure(whole, options=console.options.update(width=10 * WIDTH)).maximum
    return Group(Text(told), whole if wide <= console.width else table(_NARROW))


def _kind(each: Spent, clocked: bool) -> tuple[str, ...]:
    known = clocked and each.seconds > 0
    return (
        printable(each.kind, 40),
        str(each.calls),
        time(each.seconds) if known else "",
        amount(each.bytes, "B") if each.bytes else "",
        f"{each.bandwidth / 1e9:.1f}" if known and each.bandwidth else "",
        share(each.memory_share) if known and each.memory_share else "",
        amount(each.operations, "op") if each.operations else "",
        share(each.compute_share) if known and each.compute_share else "",
    )


def _choices(it: Explanation, choices: Sequence[TokenChoice]) -> Table:
    found = _table(
        ("", True), ("token", False), ("model", True), ("drawn", True), ("candidates", False), ("samplers", False)
    )
    for number, choice in enumerate(choices, 1):
        chosen = choice.of(choice.token)
        best = " ".join(f"{shown(it.piece(c.token))} {share(c.model)}" for c in choice.candidates[:LISTED])
        done = "; ".join(filter(None, [draft_line(choice), *(short_stage(each) for each in choice.stages)]))
        text = Text(shown(it.piece(choice.token)), "bold")
        found.add_row(str(number), text, share(chosen.model), share(chosen.drawn), best, Text(done, "dim"))
    return found
