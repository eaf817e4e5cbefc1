"""Format the values and tokens of an explanation as text, the same in the terminal and on the page."""

from __future__ import annotations

from localllm.base.printable import printable
from localllm.explain.record import StageRecord, TokenChoice


def shown(raw: bytes) -> str:
    """Return the bytes of a token as one printable line. Spaces are visible, and incomplete UTF-8 is in hex."""
    return printable(raw.decode("utf-8", "backslashreplace").replace(" ", "\u2423"), None)


def bytes_of(raw: bytes) -> str:
    """Return bytes in hex, separated by spaces."""
    return raw.hex(" ")


def time(seconds: float) -> str:
    """Return a time with two or three digits: "0", "0.25 ms", "12.5 ms", "1.20 s"."""
    if not seconds:
        return "0"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    milliseconds = 1e3 * seconds
    digits = 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2 if milliseconds >= 0.1 else 3
    return f"{milliseconds:.{digits}f} ms"


def amount(count: float, unit: str) -> str:
    """Return a count with a decimal prefix: "4.51 MB", "8.39 Mop"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            value = count / factor
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {prefix}{unit}"
    return f"{count:.0f} {unit}"


def share(part: float) -> str:
    """Format a share in percent. A small share is not rounded to 0."""
    percent = 100 * part
    if 0 < percent < 0.1:
        return "< 0.1 %"
    return f"{percent:.{0 if percent >= 99.95 or not percent else 1}f} %"


def plural(count: int, noun: str) -> str:
    several = noun + ("es" if noun.endswith("s") else "s")
    return f"{count} {noun if count == 1 else several}"


def stage_line(stage: StageRecord) -> str:
    """Describe a sampler's effect: "top_k removed 4056 (29.6 %), 40 left"."""
    done = []
    if stage.removed:
        done.append(f"removed {stage.removed} ({share(stage.mass)})")
    if stage.changed:
        done.append(f"changed {stage.changed}")
    return f"{stage.name} {' and '.join(done) or 'changed nothing'}, {stage.left} left"


def short_stage(stage: StageRecord) -> str:
    """Describe a sampler's effect briefly: "top_k -4056 (29.6 %)", or "" if it had no effect."""
    done = f" -{stage.removed} ({share(stage.mass)})" if stage.removed else ""
    done += f" changed {stage.changed}" if stage.changed else ""
    return f"{stage.name}{done}" if done else ""


def draft_line(choice: TokenChoice) -> str:
    """Describe the outcome of a draft, or return "" without a draft."""
    if choice.draft is None:
        return ""
    if not choice.verified:
        return "drafted, not verified"
    return "draft accepted" if choice.accepted else "draft rejected"
