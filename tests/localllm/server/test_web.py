"""The web page's files: content, headers and access. The page loads nothing from other hosts."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import httpx
import pytest

from localllm.hub.short_names import KNOWN
from localllm.server.settings import ServerSettings, digest
from localllm.server.web.files import HEADERS, PAGE, TYPES, read_files
from tests.localllm.server.calls import call
from tests.localllm.server.scripted import ScriptedService

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FILES = sorted(path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*") if path.is_file())
OURS = [name for name in FILES if not name.startswith("vendor/")]
TYPE = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}


def fetch(path: str, *, method: str = "", settings: ServerSettings | None = None, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return call(ScriptedService(), path, settings=settings, method=method, headers=named)


def test_browsers_get_the_page_and_other_clients_ollamas_answer() -> None:
    page = fetch("/", **HTML)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.content == (PAGE / "index.html").read_bytes()
    assert page.headers["vary"] == "Accept"
    assert fetch("/").text == fetch("/", accept="*/*").text == "Ollama is running"
    head = fetch("/", method="HEAD", **HTML)
    assert (head.status_code, head.headers["etag"], head.content) == (200, page.headers["etag"], b"")


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_served_as_it_lies_there(name: str) -> None:
    response = fetch(f"/web/{name}")
    assert (response.status_code, response.content) == (200, (PAGE / name).read_bytes())
    kind = TYPES["." + name.rpartition(".")[2]]
    assert response.headers["content-type"] == TYPE.get(name.rpartition(".")[2], kind)
    assert response.headers["x-content-type-options"] == "nosniff"


def test_the_policy_lets_nothing_in_but_this_servers_own_files() -> None:
    headers = fetch("/", **HTML).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["content-security-policy"]
    assert (headers["referrer-policy"], headers["x-frame-options"]) == ("no-referrer", "DENY")
    assert {name.lower() for name in HEADERS} <= set(fetch("/web/main.js").headers)


def test_a_file_that_the_browser_has_is_not_sent_again() -> None:
    for path, more in (("/web/main.js", {}), ("/", HTML)):
        first = fetch(path, **more)
        assert first.headers["cache-control"] == "no-cache"
        tag = first.headers["etag"]
        for given in (tag, f'"other", W/{tag}', "*"):
            again = fetch(path, if_none_match=given, **more)
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
            assert "content-security-policy" in again.headers
        assert fetch(path, if_none_match='"other"', **more).status_code == 200


def test_a_changed_file_has_another_tag(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text("1")
    (tmp_path / "secret.txt").write_text("not a file of the page")
    first = read_files(tmp_path)
    (tmp_path / "a.js").write_text("2")
    assert list(first) == ["a.js"]
    assert read_files(tmp_path)["a.js"].etag != first["a.js"].etag


@pytest.mark.parametrize(
    "path",
    [
        "/web/", "/web/../__init__.py", "/web/..%2f__init__.py", "/web/%2e%2e/files.py", "/web//etc/passwd",
        "/web/vendor/../../files.py", "/web/vendor", "/web/main.js/", "/web/MAIN.JS", "/web/main.js%00",
        "/web/..\\files.py",
    ],
)  # fmt: skip
def test_no_path_leads_out_of_the_folder(path: str) -> None:
    assert fetch(path).status_code == 404


def test_the_page_needs_no_key_and_its_requests_do() -> None:
    settings = ServerSettings(keys=frozenset({digest("secret")}))
    assert fetch("/", settings=settings, **HTML).status_code == 200
    assert fetch("/web/main.js", settings=settings).status_code == 200
    assert fetch("/v1/models", settings=settings).status_code == 401
    assert fetch("/v1/models", settings=settings, authorization="Bearer secret").status_code == 200
    assert fetch("/webhook", settings=settings).status_code == 401


def test_the_list_of_known_models_is_the_hubs_table_and_needs_the_key() -> None:
    found = fetch("/api/known").json()
    first = KNOWN[0]
    assert [each["name"] for each in found["models"]] == [each.name for each in KNOWN]
    told = {"name": first.name, "reference": first.reference, "size": first.bytes, "licence": first.licence}
    assert found["models"][0] == told
    own = ServerSettings(names={"writer": "ann/Writer-GGUF:Q5_K_M", first.name: "ann/Other-GGUF"})
    found = fetch("/api/known", settings=own).json()["models"]
    assert found[0] == {"name": "writer", "reference": "ann/Writer-GGUF:Q5_K_M", "size": 0, "licence": ""}
    assert [each["reference"] for each in found if each["name"] == first.name] == ["ann/Other-GGUF"]
    settings = ServerSettings(keys=frozenset({digest("secret")}))
    assert fetch("/api/known", settings=settings).status_code == 401


@pytest.mark.parametrize(
    ("settings", "headers", "load", "download", "reason"),
    [
        (ServerSettings(offer="stores"), {}, True, True, ""),
        (ServerSettings(offer="folder"), {}, True, False, "folder of models"),
        (ServerSettings(offer="model"), {}, False, False, "one fixed model"),
        (ServerSettings(offer="stores", locked="locked for a reason"), {}, False, False, "locked for a reason"),
        (
            ServerSettings(offer="stores", origins=("*",)),
            {"origin": "http://other.example"},
            False,
            False,
            "other sites",
        ),
    ],
    ids=["stores", "folder", "model", "locked", "origin"],
)
def test_the_page_learns_what_it_may_do_with_models(
    settings: ServerSettings, headers: dict[str, str], load: bool, download: bool, reason: str
) -> None:
    found = fetch("/api/known", settings=settings, **headers).json()
    assert (found["load"], found["download"]) == (load, download)
    assert reason in found["reason"]
    assert bool(reason) == bool(found["reason"])


def test_strange_hosts_and_pages_get_no_page() -> None:
    assert fetch("/", host="evil.example", **HTML).status_code == 403
    assert fetch("/web/main.js", host="evil.example").status_code == 403
    assert fetch("/web/main.js", origin="http://evil.example").status_code == 403
    assert fetch("/web/main.js", host="127.0.0.1:8080", origin="http://127.0.0.1:8080").status_code == 200


def test_the_page_can_be_left_out() -> None:
    settings = ServerSettings(web=False)
    assert fetch("/", settings=settings, **HTML).text == "Ollama is running"
    assert fetch("/web/main.js", settings=settings).status_code == 404


@pytest.mark.parametrize("name", OURS)
def test_no_file_of_ours_names_an_address_elsewhere(name: str) -> None:
    text = (PAGE / name).read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert re.findall(r"(?:https?:)?//[\w-]+\.\w[^\s\"')]*|@import|url\(", text) == []


def test_the_page_has_no_inline_script_or_style() -> None:
    text = (PAGE / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\bsrc=)", text) == []
    loaded = re.findall(r'(?:src|href)="(/[^"]*)"', text)
    assert {name.removeprefix("/web/") for name in loaded} <= set(FILES)
    assert loaded


@pytest.mark.parametrize("name", [name for name in OURS if name.endswith(".js")])
def test_no_module_makes_html_of_text_or_takes_what_is_not_there(name: str) -> None:
    text = (PAGE / name).read_text(encoding="utf-8")
    assert (
        re.findall(r"\.(?:inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\.style\b", text)
        == []
    )
    imported = re.findall(r'(?:from|import) "\./([^"]+)"', text)
    assert set(imported) <= set(FILES)
    assert len(imported) == len(re.findall(r"^import\b", text, re.MULTILINE))


def test_libraries_are_what_their_list_says_and_have_licences() -> None:
    listed = (PAGE / "vendor" / "README.md").read_text(encoding="utf-8")
    scripts = [name for name in FILES if name.startswith("vendor/") and name.endswith(".js")]
    assert len(scripts) == 4
    for name in scripts:
        file = PAGE / name
        assert f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" in listed
        licence = re.search(rf"\| {re.escape(file.name)} \|.*\| ([\w.]+LICENSE) \|", listed)
        assert licence is not None
        assert len((PAGE / "vendor" / licence[1]).read_text(encoding="utf-8")) > 1000
