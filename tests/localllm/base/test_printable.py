"""Text for people is printed unchanged, except that control characters are escaped."""

from __future__ import annotations

import sys
import unicodedata

import pytest

from localllm.base.errors import LocalLLMError
from localllm.base.printable import printable
from localllm.gguf import GGUFError


def test_no_control_character_and_no_half_of_a_surrogate_is_left() -> None:
    every = [chr(code) for code in range(sys.maxunicode + 1)]
    escaped = {c for c in every if printable(c) != c}
    assert escaped >= {c for c in every if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")}
    bidirectional = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
    assert escaped >= {c for c in every if unicodedata.bidirectional(c) in bidirectional}
    assert escaped >= set("\u200e\u200f\u061c")
    assert all(printable(c).isascii() and printable(c).isprintable() for c in escaped)


@pytest.mark.parametrize("text", ["", "plain", "naïve 日本語 हिन्दी 👩‍👩‍👧‍👦 שלום\u00a0x", "a\\x1b"])
def test_text_of_any_script_stays(text: str) -> None:
    assert printable(text) == text


def test_what_is_escaped_what_is_kept_and_where_it_ends() -> None:
    assert printable("a\x1b[2J\r\n\x9b\u202e\udcff") == r"a\x1b[2J\r\n\x9b\u202e\udcff"
    assert printable("\ta\n\r", keep="\n\t") == "\ta\n\\r"
    assert printable("a" * 81) == "a" * 80 + "..."
    assert printable("a" * 1000, None) == "a" * 1000


def test_an_error_is_one_line_whoever_raises_it() -> None:
    class Own(LocalLLMError):
        pass

    for error in (LocalLLMError("a\nb\x1b[2J"), Own("a\nb\x1b[2J")):
        assert str(error) == r"a\nb\x1b[2J"
    assert GGUFError.__mro__[1] is LocalLLMError


def test_the_errors_of_every_room_are_one_harmless_line() -> None:
    from localllm.backends import BackendError
    from localllm.base.errors import LocalLLMError
    from localllm.models import ModelError
    from localllm.quant import QuantError

    for kind in (LocalLLMError, ModelError, BackendError, QuantError):
        assert str(kind("tensor 'a\x1b[2J\nb'")) == r"tensor 'a\x1b[2J\nb'"
