"""Hostile answers, model names and files cannot inject markup or scripts into the web page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.localllm.server.browser.site import SCROLLS, TABLE, Site, answered, send, texts
from tests.localllm.server.scripted import Model, done, said, script, thought

HOSTILE = """\
<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2"><svg onload="window.hacked = 3">

<a href="javascript:window.hacked=4">raw link</a> [md link](javascript:window.hacked=5) [data](data:text/html,x)
[own path](/slots/0?action=erase) [outside](https://example.org/a) ![picture](https://example.org/leak.png)

<style>body { display: none }</style><div id="prompt" class="skip" style="position:fixed;inset:0">over the page</div>
<form action="/completion"><button>send</button></form><iframe src="/"></iframe><base href="https://example.org/">

```"><script>window.hacked=6</script>
</code></pre><script>window.hacked = 7</script>
```

"""


def test_a_hostile_answer_changes_nothing(site: Callable[..., Site]) -> None:
    it = site([*thought("<img src=x onerror='window.hacked=8'>"), *said(HOSTILE, TABLE), done()])
    page = it.page(width=800, height=700)
    before = page.evaluate("[document.querySelectorAll('script,style,form,dialog,iframe,base').length, document.title]")
    width = page.evaluate("document.documentElement.scrollWidth")
    send(page, "x")
    answered(page)
    assert page.evaluate("window.hacked") is None
    after = page.evaluate("[document.querySelectorAll('script,style,form,dialog,iframe,base').length]")
    assert after == before[:1]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(SCROLLS, ".table")
    assert page.locator("#messages img, #messages svg[onload], #messages [style], #messages [id]").count() == 0
    assert page.locator("#messages .skip").count() == 0
    links = page.eval_on_selector_all(
        "#messages .markdown a[href]", "all => all.map(a => [a.getAttribute('href'), a.rel])"
    )
    rel = "noopener noreferrer nofollow"
    assert links == [["https://example.org/a", rel], ["https://example.org/leak.png", rel]]
    assert "<script>window.hacked = 1</script>" in texts(page, ".markdown")[0]  # shown as plain text
    assert page.locator("#prompt").is_visible()
    send(page, "still works")
    answered(page, 2)


@pytest.mark.parametrize(
    "nested",
    [
        ">" * 5000 + " deep",
        "- " * 3000 + "deep",
        "> 1. " * 2000 + "deep",
        "*a **b " * 2000 + "deep" + "** a*" * 2000,
        "[" * 3000 + "deep" + "](https://example.org)" * 3000,
        "![" * 3000 + "deep" + "](https://example.org)" * 3000,
    ],
    ids=["quotes", "lists", "both", "emphasis", "links", "pictures"],
)
def test_deep_nesting_is_shown_as_text(site: Callable[..., Site], nested: str) -> None:
    it = site(script(nested, "\n\nAfter it."))
    page = it.page()
    send(page, "x")
    answered(page)
    shown = texts(page, ".markdown")[0]
    assert "deep" in shown
    assert shown.endswith("After it.")
    assert page.locator(".notice").count() == 0


def test_a_hostile_title_file_name_model_and_import_are_text(site: Callable[..., Site], tmp_path: Path) -> None:
    name = "<img src=x onerror=window.hacked=1>"
    it = site(script("ok"), all_models=[Model(id=name)])
    page = it.page()
    message = {
        "id": "a",
        "parent": None,
        "role": "user",
        "content": name,
        "created": 1,
        "files": [{"name": name, "text": name}],
    }
    circle = [
        message,
        {"id": "b", "parent": "c", "role": "assistant", "content": "x"},
        {"id": "c", "parent": "b", "role": "tool"},
    ]
    talk = {
        "title": name,
        "messages": [*circle, None, {"id": "d", "role": "evil"}],
        "leaf": "a",
        "settings": {"system": 3},
    }
    file = tmp_path / "in.json"
    file.write_text(json.dumps({"format": "localllm-conversations", "version": 1, "conversations": [talk]}))
    page.set_input_files("#import-file", file)
    page.wait_for_selector(".you")
    assert texts(page, "#title") == [name]
    assert texts(page, ".plain-text") == [name]
    send(page, "go on")
    answered(page)
    assert page.evaluate("window.hacked") is None
    for text, problem in (("no", "it is not JSON"), ("{}", "not an export of this page")):
        file.write_text(text)
        page.set_input_files("#import-file", file)
        page.wait_for_selector(f".notice >> text={problem}")
