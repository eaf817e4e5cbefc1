"""Count phrases that engineers rarely write, per 10,000 words of docstrings, comments, longer strings and pages.

    python -m tests.words [--list] [PATH ...]      # files or folders; --list prints each sentence with such a phrase

The phrases are grammatical but sound translated. They mark sentences to rewrite for a reader who knows the field but
not this project. Other projects have 3 to 13 per 10,000 words. `test_words.py` sets a limit for each room.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

PATTERNS = (
    r"\b(those|that) of\b",
    r"\bof (those|these|which|whom|whose)\b",
    r"\b(is|are|and|or|of|for|by|to|from|with|says?|shows?|does|do|that|after|before|beside|than) what\b",
    r"\b(whoever|whatever|nobody|somebody|anybody|those who|who looks|who run)\b",
    r"\b(stands?|lies|lie|stood) (in|on|at|for|beside|there|here|behind|before|apart|as|alone)\b",
    r"\bcomes? along\b|\bstand for\b",
    r"\b(is|are|was|were|be|been) (told|said)\b|\btells? (what|which|the|how|of)\b|\btold (by|what|of|apart)\b",
    r"\bbeside\b",
    r"\b(is|are) no (?!longer)\b|\bhas none\b|\bhave none\b|\bthere is none\b",
    r"\bso many\b|\bas many\b|\bas good as\b",
    r"\bheld to\b|\bholds? (the|an?|it|an answer) .{0,20}to\b",
    r"\bshall\b",
    r"\banew\b|\bby turns\b",
    r"\bwhere (it|they|there|that|nobody|one) (is|are|has|have|can|does|do|pays|stands?|lies?)\b",
    r"\bof (its|their|one's|your) own\b",
    r"\bwhat is (left|there|missing|kept)\b|\ball that\b",
    r"\bgo(es)? on\b|\bgo(es)? by\b|\bwent by\b",
    r"\bthat which\b|\bone that\b|\bones that\b",
    r"\bpays\b|\brests\b",
)
MARKERS = [re.compile(pattern, re.IGNORECASE) for pattern in PATTERNS]
SUFFIXES = (".py", ".md", ".cl", ".cu")
SKIPPED = (".venv", ".git", "vendor", "results", "node_modules")


def texts(path: Path) -> Iterator[str]:
    """Yield the prose of a file: paragraphs of a page, comments, and strings with at least three spaces."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".md":
        yield from re.split(r"\n\s*\n", re.sub(r"```.*?```", " ", text, flags=re.DOTALL))
    elif path.suffix in (".cl", ".cu"):
        yield from re.findall(r"/\*.*?\*/|//[^\n]*", text, re.DOTALL)
    else:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") >= 3:
                yield node.value
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.string.lstrip("# ")


def files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files to read, except symbolic links and this file."""
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            inside = file.suffix in SUFFIXES and not any(part in SKIPPED for part in file.parts)
            linked = any(part.is_symlink() for part in (file, *file.parents))
            if inside and not linked and file.resolve() != Path(__file__).resolve():
                yield file


def count(paths: Iterable[Path]) -> tuple[int, list[tuple[Path, str, int]]]:
    """Return the word count and the sentences with phrases, each as (file, sentence, number of phrases)."""
    words, found = 0, []
    for file in files(paths):
        for text in texts(file):
            words += len(re.findall(r"[A-Za-z]{2,}", text))
            for sentence in re.split(r"(?<=[.:;!?])\s+", text):
                if hits := sum(len(marker.findall(sentence)) for marker in MARKERS):
                    found.append((file, " ".join(sentence.split()), hits))
    return words, found


def rate(words: int, found: Iterable[tuple[Path, str, int]]) -> float:
    """Return the number of phrases per 10,000 words, of what `count` returns."""
    return 1e4 * sum(hits for _, _, hits in found) / max(words, 1)


def main() -> None:
    paths = [Path(each) for each in sys.argv[1:] if each != "--list"] or [Path()]
    words, found = count(paths)
    if "--list" in sys.argv:
        for file, sentence, _ in found:
            print(f"{file}: {sentence[:170]}")
    by_file = Counter[Path]()
    for file, _, hits in found:
        by_file[file] += hits
    for file, hits in by_file.most_common(10):
        print(f"{hits:5d}  {file}")
    print(f"{rate(words, found):.1f} phrases per 10,000 words; {words} words")


if __name__ == "__main__":
    main()
