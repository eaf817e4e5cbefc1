"""Text that agents change with every request is removed from the prompt, and nothing else is."""

from __future__ import annotations

import pytest

from localllm.server.anthropic.stable import stable_prompt

HEADER = "x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch={};"
REST = "You are Claude Code, Anthropic's official CLI for Claude."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        (REST, REST),
        (HEADER.format("a5145"), ""),
        (HEADER.format("a5145") + REST, REST),
        (HEADER.format("a5145") + "\n" + REST, REST),
        ("x-anthropic-billing-header: cc_version=2; cch=a5145\n" + REST, REST),
        ("x-anthropic-billing-header:\n" + REST, REST),
        # a header is removed only at the start
        (REST + "\n" + HEADER.format("a5145"), REST + "\n" + HEADER.format("a5145")),
        ("done\n<total_tokens>184921 tokens left</total_tokens>\n", "done\n"),
        ("a <total_tokens>1,234</total_tokens> b", "a b"),
        ("<total_tokens>7 remaining</total_tokens>", ""),
        # template source code, not a token count
        ("<total_tokens>{{ count }}</total_tokens>", "<total_tokens>{{ count }}</total_tokens>"),
        ("the tag <total_tokens> counts", "the tag <total_tokens> counts"),
    ],
)
def test_stable_prompt(text: str, expected: str) -> None:
    assert stable_prompt(text) == expected


def test_two_requests_of_an_agent_have_one_prompt() -> None:
    first, second = (
        stable_prompt(HEADER.format(checksum) + REST + f"\n<total_tokens>{left} tokens left</total_tokens>")
        for checksum, left in (("a5145", 184921), ("0fe31", 171002))
    )
    assert first == second


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x-anthropic-billing-header:" + " a=b" * 100_000, ""),
        ("x-anthropic-billing-header:" + " a=;" * 100_000 + "!", "!"),
        ("x-anthropic-billing-header:" + " " * 400_000, ""),
        ("x-anthropic-billing-header: " + "a" * 400_000, "a" * 400_000),
        ("<total_tokens>" * 30_000, "<total_tokens>" * 30_000),
        ("<total_tokens>1 " * 30_000, "<total_tokens>1 " * 30_000),
        ("<total_tokens>" + "1" * 400_000, "<total_tokens>" + "1" * 400_000),
        ("<total_tokens>1</total_tokens>" + " " * 400_000, ""),
    ],
    ids=range(8),
)
def test_hostile_texts_take_linear_time(text: str, expected: str) -> None:
    """Removal takes linear time. Quadratic time would be minutes for each text."""
    assert stable_prompt(text) == expected
