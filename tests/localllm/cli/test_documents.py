"""README and docs/ match the program: their tables are generated from it, and their links lead somewhere.

`tests/documents` runs their commands.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from localllm.cli.documents import SECTIONS, brought_up_to_date
from localllm.models import ARCHITECTURES
from tests.documents.pages import PAGES, name
from tests.localllm.support import REPOSITORY, localllm

TEXTS = {path: path.read_text(encoding="utf-8") for path in PAGES}
README, DOCS = TEXTS[PAGES[0]], "".join(TEXTS[path] for path in PAGES[1:])


def test_their_tables_are_those_of_the_program() -> None:
    for section in SECTIONS:
        assert f"<!-- {section} -->" in DOCS
    for path, text in TEXTS.items():
        assert brought_up_to_date(text) == text, f"run: python -m localllm.cli.documents {name(path)}"
    assert f"[{len(ARCHITECTURES)} architectures]" in README


def test_a_changed_table_would_be_noticed() -> None:
    assert brought_up_to_date(DOCS.replace("| Q8_0 ", "| Q9_9 ", 1)) == DOCS
    assert brought_up_to_date("<!-- formats -->\n<!-- /formats -->") != "<!-- formats -->\n<!-- /formats -->"


def test_the_configuration_shown_is_valid(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", TEXTS[REPOSITORY / "docs/configuration.md"], re.DOTALL)
    (tmp_path / "config.toml").write_text(text)
    done = localllm("config", "check", "--config", tmp_path / "config.toml")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", [*PAGES, REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "CHANGELOG.md"], ids=name)
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        if not re.match(r"https?:", target):
            assert not file or (path.parent / file).is_file(), target
            if anchor:
                page = (path.parent / file).read_text(encoding="utf-8") if file else path.read_text(encoding="utf-8")
                titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
                assert anchor in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], target


def test_every_page_is_linked_from_the_readme() -> None:
    for path in PAGES[1:]:
        assert f"({name(path)})" in README
