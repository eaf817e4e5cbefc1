"""What an answer looks like on the web page: formulas, line breaks, wrapped code; and no accessibility problems."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.localllm.server.browser.managed import Management
from tests.localllm.server.browser.site import Site, answered, send, texts
from tests.localllm.server.scripted import said, script, thought

CLIPPED = """() => {  // what cuts the focus ring of the focused element off, or null if nothing has the focus
    const one = document.activeElement;
    if (!one || one === document.body) return null;
    const style = getComputedStyle(one), box = one.getBoundingClientRect();
    const ring = style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth) + parseFloat(style.outlineOffset);
    const cuts = (above) => {
        const { overflow, contain } = getComputedStyle(above), frame = above.getBoundingClientRect();
        return (overflow !== "visible" || contain.includes("paint")) && (box.left - ring < frame.left - 0.5
            || box.right + ring > frame.right + 0.5 || box.top - ring < frame.top - 0.5
            || box.bottom + ring > frame.bottom + 0.5);
    };
    const found = [];
    for (let above = one.parentElement; above !== document.body; above = above.parentElement) {
        if (cuts(above)) found.push(above.className || above.id);
    }
    return `${one.ariaLabel || one.id || one.textContent}: ${found}`;
}"""
SOURCE = "annotation[encoding='application/x-tex']"  # KaTeX keeps the source beside the formula for screen readers


@pytest.mark.parametrize(
    ("text", "formulas", "displayed"),
    [
        (r"so \(a^2\) and $b_1*c*$.", ["a^2", "b_1*c*"], 0),
        ("$$x = \\frac{1}{2}$$\n\n\\[y\\]", [r"x = \frac{1}{2}", "y"], 2),
        ("- $a$\n- **$b$**\n\n| c |\n|---|\n| $d$ |", ["a", "b", "d"], 0),
        ("It costs $5 or $6, or \\$7 and \\$8.", [], 0),
        ("`$a$` and\n\n```\n\\(b\\)\n$$c$$\n```", [], 0),
        (r"\(unclosed, $ and $$", [], 0),
    ],
    ids=["inline", "display", "nested", "prices", "code", "unclosed"],
)
def test_formulas_are_typeset(site: Callable[..., Site], text: str, formulas: list[str], displayed: int) -> None:
    page = site(script(text)).page()
    send(page, "x")
    answered(page)
    assert page.locator(SOURCE).all_text_contents() == formulas
    assert page.locator(".formula.display").count() == displayed
    assert page.locator(".katex [style]").count() >= len(formulas)  # the policy has not removed KaTeX's layout


def test_a_hostile_or_broken_formula_stays_text(site: Callable[..., Site]) -> None:
    hostile = [
        r"\(\href{javascript:window.hacked=1}{x}\)",
        r"\(\htmlData{a=b}{x}\)",
        r"\(\includegraphics{https://example.org/a.png}\)",
        r"\(\def\a{\a\a}\a\)",
        r"\(\frac{1\)",
        r"\(<img src=x onerror=window.hacked=2>\)",
    ]
    page = site(script("\n\n".join(hostile), "\n\nfine")).page()
    send(page, "x")
    answered(page)
    assert page.evaluate("window.hacked") is None
    assert page.locator("#messages img, #messages a").count() == 0
    shown = texts(page, ".markdown")[0]
    assert r"\(\frac{1\)" in shown
    assert r"\(\def\a{\a\a}\a\)" in shown
    assert shown.endswith("fine")


def test_deep_and_long_formulas_stay_text(site: Callable[..., Site]) -> None:
    deep = "$" + "x^{" * 200 + "x" + "}" * 200 + "$"
    fractions = r"\(" + r"\frac1{" * 220 + "x" + "}" * 220 + r"\)"
    page = site(script("\n\n".join([deep, fractions, "$" + "x+" * 20_000 + "x$", "$a$"]), "\n\nfine")).page()
    send(page, "x")
    answered(page)
    assert page.locator(SOURCE).all_text_contents() == ["a"]
    assert texts(page, ".markdown")[0].endswith("fine")


def test_lines_break_and_code_wraps(site: Callable[..., Site]) -> None:
    page = site(script("Roses are red\nViolets are blue\n\n```\n", "x " * 400, "\n```")).page()
    send(page, "x")
    answered(page)
    assert texts(page, ".markdown p") == ["Roses are red\nViolets are blue"]
    wide = "document.querySelector('.code pre').scrollWidth > document.querySelector('.code pre').clientWidth"
    assert page.evaluate(wide)
    page.click(".code >> text=Wrap")
    assert not page.evaluate(wide)
    assert page.get_attribute(".code >> text=Wrap", "aria-pressed") == "true"


def test_short_times_are_milliseconds(site: Callable[..., Site]) -> None:
    page = site([*thought("hm"), *said("yes"), *script("no")[-1:]]).page()
    send(page, "x")
    answered(page)
    assert texts(page, ".thought summary")[0].endswith(" ms")
    assert "0.0 s" not in texts(page, ".stats")[0]


def test_every_focus_ring_is_whole(site: Callable[..., Site]) -> None:
    text = "[link](https://example.org/)\n\n```python\nprint(1)\n```\n\n|a|b|\n|---|---|\n|1|2|\n\n$$x^2$$\n\nend"
    page = site([*thought("hm"), *said(text), *script("no")[-1:]], manage=Management).page(width=900, height=500)
    send(page, "x")
    answered(page)

    def walk(steps: int) -> list[str]:
        found = []
        for _ in range(steps):
            page.keyboard.press("Tab")
            if (shown := page.evaluate(CLIPPED)) is None:
                break
            found.append(shown)
        return found

    page.focus(".skip")
    found = walk(40)
    page.click("#model")
    found += walk(12)  # a dialog that scrolls
    assert len(found) > 35
    assert [each for each in found if not each.endswith(": ")] == []
