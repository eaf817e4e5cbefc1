"""Pictures and sound in the requests of all APIs: each makes the same prompt, and errors are one clear line."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm.generation.interfaces import SchedulerLimits
from localllm.media import MediaError
from localllm.server import media_urls
from localllm.server.accounts import ACCOUNT
from localllm.server.catalogue import only
from localllm.server.errors import BadRequest
from localllm.server.forms import parse_form
from localllm.server.registry import ModelRegistry
from localllm.server.served import Served
from localllm.server.service import Service
from localllm.server.settings import ServerSettings
from localllm.server.uploads import Upload, UploadRules, Uploads, decoded
from tests.localllm.media_models import data_url, encoded, png, wav, write_pair
from tests.localllm.server.calls import call
from tests.localllm.support import write_model

PICTURE = png(seed=5)
FOLDER_PICTURE = png(seed=6)
TEXT = {"type": "text", "text": "what?"}


def service_of(path: Path, rules: UploadRules | None = None) -> Service:
    def load(path: Path) -> Served:
        model = localllm.load(path, backend="cpu", threads=1, spec="off", sequences=2)
        return Served(model, SchedulerLimits(parallel=2))

    return Service(ModelRegistry(only("tiny", path), load), None, rules)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "media").mkdir()
    (folder / "media" / "a.png").write_bytes(FOLDER_PICTURE)
    found = service_of(write_pair(folder), UploadRules(folder=folder / "media"))
    yield found
    found.registry.end()


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4, "temperature": 0}


def image_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


ANTHROPIC = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(PICTURE)}}
LIMITS = {"num_predict": 4, "temperature": 0}
RESPONSES = [{"type": "input_image", "image_url": data_url(PICTURE)}, {"type": "input_text", "text": "what?"}]
REQUESTS: dict[str, tuple[str, dict[str, Any], Any]] = {  # path, body, (text, tokens of the prompt) of a response
    "openai": (
        "/v1/chat/completions", chat(image_url(data_url(PICTURE)), TEXT),
        lambda r: (r["choices"][0]["message"]["content"], r["usage"]["prompt_tokens"]),
    ),
    "responses": (
        "/v1/responses",
        {"input": [{"role": "user", "content": RESPONSES}], "max_output_tokens": 4, "temperature": 0},
        lambda r: (r["output"][0]["content"][0]["text"], r["usage"]["input_tokens"]),
    ),
    "anthropic": (
        "/v1/messages", {"model": "tiny", **chat(ANTHROPIC, TEXT)},
        lambda r: (
            r["content"][0]["text"],
            r["usage"]["input_tokens"] + r["usage"]["cache_read_input_tokens"],
        ),
    ),
    "ollama": (
        "/api/chat",
        {"model": "tiny", "stream": False, "options": LIMITS,
         "messages": [{"role": "user", "content": "what?", "images": [encoded(PICTURE)]}]},
        lambda r: (r["message"]["content"], r["prompt_eval_count"]),
    ),
    "ollama generate": (
        "/api/generate",
        {"model": "tiny", "stream": False, "options": LIMITS, "prompt": "what?", "images": [encoded(PICTURE)]},
        lambda r: (r["response"], r["prompt_eval_count"]),
    ),
}  # fmt: skip


def test_all_apis_make_the_same_prompt(service: Service) -> None:
    found = set()
    for name, (path, body, read) in REQUESTS.items():
        answer = call(service, path, body)
        assert answer.status_code == 200, (name, answer.text)
        found.add(read(answer.json()))
    assert len(found) == 1, found
    [(text, tokens)] = found
    assert len(text) == 4
    counted = call(service, "/v1/chat/completions/input_tokens", REQUESTS["openai"][1]).json()["input_tokens"]
    assert counted == tokens
    cached = call(service, "/v1/chat/completions", REQUESTS["openai"][1]).json()["usage"]
    assert cached["prompt_tokens_details"]["cached_tokens"] == tokens - 1


def doubled(value: Any, wrong: str) -> Any:
    """Return a request with a second picture behind its picture, whose base64 is `wrong`."""
    text, data = json.dumps(value), encoded(PICTURE)
    if data not in text or not isinstance(value, dict | list):
        return value
    if isinstance(value, dict):
        return {name: doubled(each, wrong) for name, each in value.items()}
    if any(isinstance(each, list) for part in value if isinstance(part, dict) for each in part.values()):
        return [doubled(each, wrong) for each in value]
    return [*value[:1], json.loads(json.dumps(value[0]).replace(data, wrong)), *value[1:]]


NONSENSE, SOUND = encoded(b"nonsense"), encoded(wav())


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (NONSENSE, "picture 2 of the request: it is not a picture that can be read"),
        (SOUND, "picture 2 of the request: is a sound, not a picture; give it as a sound"),
        ("AAAA=AAAA", "2 of the request: "),
    ],
)
@pytest.mark.parametrize("name", REQUESTS)
def test_errors_say_which_picture(service: Service, name: str, wrong: str, problem: str) -> None:
    path, body, _ = REQUESTS[name]
    answer = call(service, path, doubled(body, wrong))
    assert answer.status_code == 400
    assert problem in answer.text
    assert "\n" not in answer.text.strip()


def test_errors_say_which_file_of_a_prompt(service: Service) -> None:
    for wrong, problem in (
        (NONSENSE, "picture 2 of the request: it is not a picture"),
        (SOUND, "sound 1 of the request: this model reads pictures, no sound"),
        ("!!", "file 2 of the request: expected base64"),
    ):
        prompt = {"prompt_string": "<__media__> <__media__>", "multimodal_data": [encoded(PICTURE), wrong]}
        answer = call(service, "/completion", {"prompt": prompt})
        assert answer.status_code == 400
        assert problem in answer.text


def test_llama_cpp_s_prompts_have_a_marker_for_each_file(service: Service) -> None:
    prompt = {"prompt_string": "a <__media__> b", "multimodal_data": [encoded(PICTURE)]}
    body = {"prompt": prompt, "n_predict": 4, "temperature": 0, "ignore_eos": True}
    found = call(service, "/completion", body)
    assert found.status_code == 200, found.text
    assert found.json()["tokens_evaluated"] > 16
    wrong = call(service, "/completion", {"prompt": {**prompt, "prompt_string": "a b"}})
    assert wrong.status_code == 400
    assert "the prompt has 0 of <__media__> and 1 pictures and sounds" in wrong.text
    assert call(service, "/completion", {"prompt": {**prompt, "multimodal_data": [1]}}).status_code == 400


def test_pictures_in_a_tool_s_result(service: Service) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "seen"}, ANTHROPIC]}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    with_it = call(service, "/v1/messages/count_tokens", {"model": "tiny", "messages": messages}).json()
    result["content"].pop()  # type: ignore[attr-defined]
    without = call(service, "/v1/messages/count_tokens", {"model": "tiny", "messages": messages}).json()
    assert with_it["input_tokens"] - without["input_tokens"] >= 16


def test_the_server_says_what_a_model_reads(service: Service) -> None:
    call(service, "/v1/chat/completions", chat(TEXT))  # loads the model
    assert call(service, "/props").json()["modalities"] == {"vision": True, "video": False, "audio": False}
    models = call(service, "/v1/models").json()
    assert models["data"][0]["architecture"]["input_modalities"] == ["text", "image"]
    assert {"multimodal", "vision"} <= set(models["models"][0]["capabilities"])
    assert "vision" in call(service, "/api/show", {"model": "tiny"}).json()["capabilities"]


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (image_url("data:image/png;base64,AAAA"), "it is not a picture that can be read"),
        (image_url("data:image/png,plain"), "expected a data URL such as data:image/png;base64,..."),
        (image_url("!!"), "expected base64 or a data URL"),
        (image_url("data:image/png;base64,!!"), "the base64 text of the data URL is damaged; send all of it"),
        (image_url(""), "picture 1 of the request: is empty"),
        (image_url("http://93.184.216.34/a.png"), "this server fetches no URLs; send the file itself as a data URL"),
        (image_url("file:../tiny-Q8_0.gguf"), "no such file in the server's media folder"),
        (image_url("file:///etc/passwd"), "no such file in the server's media folder"),
        ({"type": "image_url"}, "messages[0].content[0].image_url"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "video input is not supported; send text"),
        ({"type": "input_audio", "input_audio": {"data": encoded(wav())}}, "this model reads pictures, no sound"),
    ],
)
def test_wrong_pictures_are_one_line(service: Service, part: dict[str, Any], problem: str) -> None:
    answer = call(service, "/v1/chat/completions", chat(part, TEXT))
    assert answer.status_code == 400, answer.text
    assert problem in answer.json()["error"]["message"]


def test_files_of_the_folder_are_read(service: Service) -> None:
    for url in ("file:a.png", "file:///a.png", "file://a.png"):
        answer = call(service, "/v1/chat/completions", chat(image_url(url), TEXT))
        assert answer.status_code == 200, (url, answer.text)


def test_a_model_without_encoders_says_so(tmp_path: Path) -> None:
    service = service_of(write_model(tmp_path / "text.gguf"))
    try:
        for name, (path, body, _) in REQUESTS.items():
            answer = call(service, path, {**body, "model": "tiny"})
            assert answer.status_code == 400, (name, answer.text)
            assert "image and audio input is not supported: this model was loaded without an mmproj file" in answer.text
        assert call(service, "/props").json()["modalities"] == {"vision": False, "video": False, "audio": False}
    finally:
        service.registry.end()


def test_sound(tmp_path: Path) -> None:
    service = service_of(write_pair(tmp_path, "gemma4ua"))
    try:
        part = {"type": "input_audio", "input_audio": {"data": encoded(wav(3200)), "format": "wav"}}
        answer = call(service, "/v1/chat/completions", chat(part, TEXT))
        assert answer.status_code == 200, answer.text
        assert call(service, "/props").json()["modalities"] == {"vision": False, "video": False, "audio": True}
    finally:
        service.registry.end()


def form(**fields: str | bytes) -> tuple[bytes, dict[str, str]]:
    """Return a multipart body and its headers; bytes are a file."""
    parts = b""
    for name, value in fields.items():
        file, data = (b'; filename="a.wav"', value) if isinstance(value, bytes) else (b"", value.encode())
        parts += b'--XX\r\nContent-Disposition: form-data; name="' + name.encode() + b'"' + file + b"\r\n\r\n"
        parts += data + b"\r\n"
    return parts + b"--XX--\r\n", {"content-type": "multipart/form-data; boundary=XX"}


def test_transcriptions(tmp_path: Path, service: Service) -> None:
    path = "/v1/audio/transcriptions"
    limited = ServerSettings(max_tokens=4)
    sounds = service_of(write_pair(tmp_path, "gemma4ua"))
    try:
        body, headers = form(file=wav(3200), model="tiny", language="de", temperature="0.0")
        answer = call(sounds, path, body, headers=headers, settings=limited)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["text"]
        assert found["usage"]["input_tokens"] > 5
        body, headers = form(file=wav(3200), language="de", response_format="text")
        assert call(sounds, path, body, headers=headers, settings=limited).text == found["text"] + "\n"
    finally:
        sounds.registry.end()
    for body, headers, problem in (
        (*form(file=wav()), "this model reads pictures, no sound"),
        (*form(model="tiny"), "the form has no file"),
        (*form(file=wav(), response_format="srt"), "expected json or text"),
        (*form(file=wav(), temperature="hot"), "temperature: expected a number from 0 to 2"),
        (b"--XX\r\nnonsense", {"content-type": "multipart/form-data; boundary=XX"}, "the form is damaged"),
        (b"{}", {}, "expected a form"),
    ):
        answer = call(service, path, body, headers=headers)
        assert answer.status_code == 400, answer.text
        assert problem in answer.text


def test_forms_are_read_to_the_byte() -> None:
    data = bytes(range(256)) * 3 + b"\r\n--X\r\n--XX"[:-1]
    body, _ = form(a="\u00e9", file=data)
    assert parse_form(body, b"XX") == ({"a": "\u00e9"}, {"file": data})
    for cut in range(0, len(body) - 6, 37):
        with pytest.raises(BadRequest, match="the form is damaged"):
            parse_form(body[:cut], b"XX")


def test_base64_may_have_line_breaks() -> None:
    assert decoded("data:image/png;base64,aGVs\n bG8=") == b"hello"
    with pytest.raises(BadRequest, match="expected base64"):
        decoded("aGVsbG8")


def test_blanks_in_base64_take_no_memory() -> None:
    text = "aa " * 300_000
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match="expected base64"):
            decoded(text + "!")
        assert tracemalloc.get_traced_memory()[1] < 6 * len(text)
    finally:
        tracemalloc.stop()


def test_large_base64_is_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, real = list[int](), base64.b64decode

    def counted(data: bytes, **how: Any) -> bytes:
        sizes.append(len(data))
        return real(data, **how)

    monkeypatch.setattr("localllm.server.uploads.base64.b64decode", counted)
    for length in (600_000, 600_001, 600_002):
        data = random.Random(length).randbytes(length)
        text = encoded(data)
        assert decoded(text) == data
        assert decoded(text[:5] + "\n " + text[5:] + " " * 300_000) == data
        for wrong in (text[:-1], text + "A", text[:40] + "==" + text[40:], text + "=" + " " * 300_000 + "AAA"):
            with pytest.raises(BadRequest, match="expected base64"):
                decoded(wrong)
    assert max(sizes) < 300_000


def test_there_is_a_limit_of_pictures() -> None:
    async def run() -> None:
        with pytest.raises(BadRequest, match="257 pictures and sounds; the limit is 256"):
            await Uploads()._of_parts([Upload("image", "aGVsbG8=").part] * 257)

    asyncio.run(run())


def test_the_files_of_a_request_have_a_limit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def fetched(url: str, most: int, seconds: float) -> bytes:
        asked.append(most)
        return b"x" * 40

    async def run() -> None:
        uploads = Uploads(UploadRules(urls=True, folder=tmp_path, bytes=100))
        file, url = Upload("image", "file:a").part, Upload("image", "http://a/").part
        assert await uploads._of_parts([file, url, file, url]) == [b"y" * 10, b"x" * 40] * 2
        assert asked == [90, 40]
        with pytest.raises(BadRequest, match="the files of the request have more than 100 bytes"):
            await uploads._of_parts([url, url, file, file, file])

    monkeypatch.setattr("localllm.server.uploads.fetch", fetched)
    (tmp_path / "a").write_bytes(b"y" * 10)
    asyncio.run(run())


def test_slow_urls_of_one_client_delay_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()

    def slow(url: str, most: int, seconds: float) -> bytes:
        if "slow" in url:
            end.wait(20)
        return url.encode()

    async def of(account: str, given: str) -> bytes:
        ACCOUNT.set(account)
        return await uploads._bytes(given, 1000)

    uploads = Uploads(UploadRules(urls=True))
    monkeypatch.setattr("localllm.server.uploads.fetch", slow)

    async def run() -> None:
        attack = [asyncio.create_task(of("a", f"http://slow/{number}")) for number in range(64)]
        await asyncio.sleep(0.05)
        try:
            assert await asyncio.wait_for(of("b", "data:;base64,aGVsbG8="), 5) == b"hello"
            assert await asyncio.wait_for(of("b", "http://quick/"), 5) == b"http://quick/"
        finally:
            end.set()
            await asyncio.gather(*attack)

    asyncio.run(run())


# -- addresses of URLs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "::1",
        "fe80::1", "fc00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "localhost", "fec0::1",
        "::127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b:1::7f00:1", "5f00::1",
    ],
)  # fmt: skip
def test_private_addresses_are_refused(host: str) -> None:
    with pytest.raises(MediaError, match="not a public address"):
        media_urls.addresses(host, 80)


def test_public_addresses_of_this_computer_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_urls, "_is_public", lambda address: True)
    with pytest.raises(MediaError, match="not a public address"):
        media_urls.addresses("127.0.0.1", 80)


def test_public_addresses_are_not() -> None:
    assert media_urls.addresses("93.184.216.34", 80) == ["93.184.216.34"]
    assert media_urls.addresses("2606:2800:220:1::1", 80) == ["2606:2800:220:1::1"]


@pytest.mark.parametrize(
    "url", ["ftp://example.org/a", "http://", "http://u:p@example.org/", "http://a b/", "http://x:99999/", "x" * 9000]
)
def test_odd_urls_are_refused(url: str) -> None:
    with pytest.raises(MediaError, match=r"expected an http or https URL|must not have a user name"):
        media_urls.fetch(url, 100, 1)
