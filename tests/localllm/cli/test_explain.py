"""`localllm explain`: the same tokens as `run`, no markup from untrusted text, and one-line errors."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.localllm.cli.shell import Shell
from tests.localllm.support import SPECIAL, write_model

SAY = "Tell me a story"
SHORT = ("-n", 12, "-t", 1, "-c", 256)
EMPTY = {"meta"}
STANDING = {"line", "rect"}  # SVG elements that may be self-closing
ATTRIBUTES = {
    *(
        "aria-label",
        "charset",
        "class",
        "content",
        "height",
        "href",
        "http-equiv",
        "id",
        "lang",
        "name",
        "role",
        "tabindex",
    ),
    *("scope", "style", "text-anchor", "title", "viewbox", "width", "x", "x1", "x2", "y", "y1", "y2"),
}
HOSTILE = "</style></title><script>alert(1)</script><img src=x onerror=alert(2)> \x1b[31m \u202e &amp; \"'"


class Page(HTMLParser):
    """Strict HTML parser, which checks that elements are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []  # (element, name, value)
        self.words = ""
        self._open: list[str] = []
        assert text.startswith("<!doctype html>\n")
        self.feed(text)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in EMPTY:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in STANDING
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(capsys, monkeypatch)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose name and likeliest tokens are HTML markup."""
    letters = [chr(c) for c in range(33, 127)]
    letters[:3] = ["<script>alert(3)</script>", '"><svg/onload=alert(4)>', "\x1b]0;owned\x07\u202e"]
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *letters]
    folder = tmp_path_factory.mktemp("m")
    return write_model(folder / "<b onclick=alert(5)>.gguf", extra={"tokenizer.ggml.tokens": tokens})


def harmless(text: str) -> Page:
    """Parse the page, after checking that it contains no scripts and loads nothing."""
    page = Page(text)
    assert not {"script", "img", "link", "iframe", "object", "embed", "base", "form", "b"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert name in ATTRIBUTES, (tag, name)
        if name == "href":
            assert (tag, value[:6]) == ("a", "#step-")
        if name == "style":
            assert re.fullmatch(r"width:[\d.]+%", value)
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert not re.search(r"url\(|@import|https?:|//", "".join(value for *_, value in page.attributes))
    style = text[text.index("<style>") : text.index("</style>")]
    assert not re.search(r"url\(|@import|//", style)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    return page


# -- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ("--temp", 0),
        ("--temp", 1.1, "--top-p", 0.8, "--repeat-penalty", 1.2),
        ("--raw",),
        ("--spec", "ngram"),
        ("--json-schema", '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}}'),
    ],
    ids=lambda options: "".join(map(str, options[:1])),
)
def test_the_answer_is_that_of_run(shell: Shell, options: tuple[object, ...]) -> None:
    given = ("demo", SAY, "--seed", 7, *SHORT, *options)
    code, answer, _ = shell("run", *given)
    explained, out, err = shell("explain", *given)
    assert (code, explained) == (0, 0), err
    assert out.startswith(answer)
    assert "What it shows" in out[len(answer) :]
    assert json.loads(shell("explain", *given, "--json")[1])["answer"] == answer.removesuffix("\n")


def test_the_terminal_view(shell: Shell) -> None:
    code, out, err = shell("explain", "demo", SAY, "--seed", 7, *SHORT)
    assert code == 0, err
    for part in ("Prompt: ", "Decoding: ", "Cache: ", "Sampling: ", "top_k -", "ffn_down", "Roofs, measured", "seed 7"):
        assert part in out
    assert "Speculation: " not in out
    assert "54 65 6c 6c" in out  # UTF-8 bytes of "Tell"


def test_the_end_of_an_answer_is_named(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "yes.gbnf").write_text('root ::= "yes"')
    grammar = ("--grammar", tmp_path / "yes.gbnf")
    assert "ended by an end-of-answer token\n" in shell("explain", "demo", "Hi", "--temp", 0)[1]
    assert "ended by the limit of tokens\n" in shell("explain", "demo", "Hi", "--temp", 0, "-n", 2)[1]
    assert "grammar" in shell("explain", "demo", "Hi", "--temp", 0, *grammar)[1].partition("ended by ")[2][:60]


def test_json_has_every_number(shell: Shell) -> None:
    code, out, err = shell("explain", "demo", SAY, "--seed", 7, *SHORT, "--json", "--candidates", 3)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    assert len(found["choices"]) == 12
    assert all(3 <= len(choice["candidates"]) <= 4 for choice in found["choices"])
    assert "".join(bytes.fromhex(choice["bytes"]).decode() for choice in found["choices"]).strip() == found["answer"]
    assert {phase["name"] for phase in found["phases"]} == {"prompt", "decoding"}
    assert len(found["steps"]) == 12  # one prefill and 11 decode steps give 12 tokens
    assert found["drafts"] is None


def test_blocks_of_a_prompt_cache_are_reused(shell: Shell, tmp_path: Path) -> None:
    words, cache = "Once upon a time there was a little bird. " * 10, tmp_path / "c.cache"
    given = ("explain", "demo", words, "--json", "--prompt-cache", cache, "-n", 2, "-t", 1, "-c", 256, "--temp", 0)
    first, second = (json.loads(shell(*given)[1]) for _ in range(2))
    assert first["reused"] == {"tokens": 0, "blocks": 0}
    assert second["reused"]["tokens"] == len(second["prompt"]) - 1 > 64
    assert second["reused"]["blocks"] == -(-second["reused"]["tokens"] // 64)
    assert second["answer"] == first["answer"]
    assert len(second["steps"][0]["tokens"]) == 1


# -- the page --------------------------------------------------------------------------------------------------------


def test_the_page_has_every_token(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "e.html"
    code, _, err = shell("explain", "demo", SAY, "--seed", 7, *SHORT, "-o", path)
    assert code == 0, err
    assert f"{path}: {path.stat().st_size} bytes written" in err
    page = harmless(path.read_text(encoding="utf-8"))
    names = [value for _, name, value in page.attributes if name == "id"]
    assert names == [f"step-{number}" for number in range(1, 13)]
    assert [value for _, name, value in page.attributes if name == "href"] == [f"#{name}" for name in names]
    assert page.tags.count("rect") == 24
    for part in ("Where the time went", "ffn_down", "top_k removed 4056", "54 65 6c 6c"):
        assert part in page.words


def test_drafts_are_on_the_page(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "e.html"
    words = "one two three four one two three four one two three four one two"
    code, _, err = shell("explain", "demo", words, "--raw", "--spec", "ngram", "--temp", 0, *SHORT, "-o", path)
    assert code == 0, err
    assert "Speculation" in harmless(path.read_text(encoding="utf-8")).words


def test_hostile_text_stays_text(shell: Shell, tmp_path: Path, hostile: Path) -> None:
    """Markup in the prompt, in the model's tokens and in the file name stays text."""
    path, first = tmp_path / "e.html", len(SPECIAL) + 257
    bias = [part for token in range(first, first + 3) for part in ("--logit-bias", f"{token}+9")]
    code, out, err = shell("explain", hostile, HOSTILE, "-n", 40, "-t", 1, "--seed", 1, "--temp", 2, *bias, "-o", path)
    assert code == 0, err
    page = harmless(path.read_text(encoding="utf-8"))
    for part in ("<script>alert(1)</script>", "<script>alert(3)</script>", "<svg/onload=alert(4)>", "<b onclick"):
        assert part in page.words
    assert "\\x1b]0;owned\\x07\\u202e" in page.words
    assert not re.search("[\x1b\x07\u202e]", out + err)


# -- invalid arguments -----------------------------------------------------------------------------------------------


def one_line(err: str) -> str:
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    return err


def test_no_file_is_overwritten_unasked(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "e.html"
    path.write_text("mine")
    code, out, err = shell("explain", "demo", SAY, *SHORT, "-o", path)
    assert (code, out) == (1, "")
    assert one_line(err) == f"error: {path}: exists; give another name, or --force\n"
    assert path.read_text() == "mine"
    assert shell("explain", "demo", SAY, *SHORT, "-o", path, "--force")[0] == 0
    harmless(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("demo", SAY, "-o", "nowhere/e.html"), 1, "no such folder: nowhere"),
        (("demo", SAY, "-o", "."), 1, "is a folder"),
        (("missing.gguf", SAY), 1, "missing.gguf"),
        ((), 2, "no prompt: "),
        (("demo",), 2, "no prompt"),
        (("demo", SAY, "--candidates", "0"), 2, "--candidates"),
        (("demo", SAY, "--raw", "-sys", "Be brief."), 1, "needs a chat template"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_inputs_are_one_line(shell: Shell, words: tuple[str, ...], code: int, told: str) -> None:
    found, out, err = shell("explain", *words)
    assert (found, out) == (code, "")
    assert told in one_line(err)


def test_the_prompt_file_is_not_the_page(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text(SAY)
    code, _, err = shell("explain", "demo", "-f", path, *SHORT, "-o", path, "--force")
    assert code == 1
    assert "this file is being read" in one_line(err)
    assert path.read_text() == SAY
