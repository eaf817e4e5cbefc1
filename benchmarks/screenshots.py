"""Make the screenshots of the web page, and a report of `localllm explain` with screenshots, in docs/pictures.

    pip install playwright pillow
    python benchmarks/screenshots.py [--out FOLDER]

Needs Chromium on the PATH. The answers on the web page are scripted: the screenshots show the page, not a model. The
report of `explain` measures the bundled model, so run this on an idle machine.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from localllm.generation.request import Finished  # noqa: E402
from localllm.generation.statistics import Usage  # noqa: E402
from localllm.server.settings import ServerSettings  # noqa: E402
from localllm.server.turn import Turn  # noqa: E402
from tests.localllm.server.calls import served  # noqa: E402
from tests.localllm.server.scripted import Model, ScriptedService, Step, said, thought  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
COLOURS = 256  # palette size of a screenshot: text stays sharp, and the PNG small
BISECT = """\
**Binary search** halves the range at each step, so a million entries take 20 steps:

```python
def find(items: list[int], wanted: int) -> int:
    low, high = 0, len(items)
    while low < high:
        middle = (low + high) // 2
        if items[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low  # where it is, or belongs
```

| entries | steps |
|---:|---:|
| 1,000 | 10 |
| 1,000,000 | 20 |

The list must be sorted first.
"""
TALKS = {
    "Plan a weekend in Lisbon": "Saturday: Alfama and the castle. Sunday: Belém, then the coast at Cascais.",
    "Summary of notes.txt": "Three decisions, two open questions, and one date: the 14th.",
    "What is a KV cache?": "It keeps the keys and values of tokens that were read, so that each is computed once.",
    "How does binary search work?": BISECT,
}


def answers(turn: Turn) -> Sequence[Step]:
    """Return the scripted answer to one of the questions above."""
    text = TALKS[turn.messages[-1]["content"]]
    words = text.split(" ")
    tokens = [word + " " for word in words[:-1]] + words[-1:]
    usage = Usage(
        prompt_tokens=214, reused_tokens=192, answer_tokens=len(tokens), queued_seconds=0.0, first_token_seconds=0.2,
        prompt_seconds=0.2, decode_seconds=(len(tokens) - 1) / 38.4,
    )  # fmt: skip
    return [*thought("The reader wants the idea first, ", "then code."), *said(*tokens), Finished("end", "", usage)]


def save(picture: bytes, to: Path) -> None:
    """Save a screenshot with a small palette."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(to, optimize=True)
    print(f"{to}: {to.stat().st_size / 1024:.0f} KiB")


def shoot(page: Any, url: str, out: Path) -> None:
    """Chat on the page, then take the screenshots."""
    page.goto(url)
    page.wait_for_selector("html[data-ready]")
    for question in TALKS:
        page.click("#new")
        page.fill("#prompt", question)
        page.press("#prompt", "Enter")
        page.wait_for_selector(".answer[aria-busy=false] .stats")
        page.wait_for_timeout(300)
    page.mouse.move(1, 1)
    save(page.screenshot(), out / "web.png")
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(300)
    save(page.screenshot(), out / "web-dark.png")
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 390, "height": 780})
    page.reload()
    page.wait_for_selector(".answer[aria-busy=false] .stats")
    page.wait_for_timeout(300)
    save(page.screenshot(), out / "web-phone.png")


def explained(browser: Any, out: Path) -> None:
    """Explain the answer that docs/explain.md discusses. Keep the report, and take screenshots of two parts of it."""
    html = out / "explain.html"
    words = ["-t", "1", "--seed", "3", "-n", "64", "-f", "docs/doctor.md", "What does this page say?"]
    command = [sys.executable, "-m", "localllm", "explain", "demo", *words, "-o", str(html), "--force"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    for name, scheme, first, last in (
        ("explain.png", "light", "The time line", "Every token of the answer"),
        ("explain-dark.png", "dark", "The answer", "What was read and multiplied"),
    ):
        page = browser.new_page(viewport={"width": 1080, "height": 900}, color_scheme=scheme)
        page.goto(html.as_uri())
        top, bottom = (page.locator("h2", has_text=text).first.bounding_box()["y"] for text in (first, last))
        clip = {"x": 0, "y": top - 12, "width": 1080, "height": bottom - top}
        save(page.screenshot(full_page=True, clip=clip), out / name)
        page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder of the pictures (default: docs/pictures)")
    out = parser.parse_args().out
    service = ScriptedService(answers, all_models=[Model(id="scripted")])
    with served(service, ServerSettings(port=0)) as port, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        shoot(browser.new_page(viewport={"width": 1200, "height": 860}), f"http://127.0.0.1:{port}/", out)
        explained(browser, out)
        browser.close()


if __name__ == "__main__":
    main()
