"""Server settings that follow from command-line options, and the option declarations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localllm.options import LoadOptions, OptionError, SamplingOptions, ServeOptions, declared
from localllm.server.limits import ServerLimits
from localllm.server.settings import ServerSettings, SettingsError, digest


def test_the_defaults_are_those_of_the_parts() -> None:
    settings = ServerSettings.of(ServeOptions())
    assert settings.limits == ServerLimits(body_seconds=60, send_seconds=60, ping_seconds=15)
    assert (settings.addresses, settings.port, settings.parallel) == (("127.0.0.1",), 8080, 4)
    assert not settings.keys
    assert not settings.log_prompts
    assert ServerLimits(body_seconds=60, send_seconds=60, ping_seconds=15) == ServerLimits()


def test_keys_are_kept_as_digests(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n one \n\ntwo\n")
    settings = ServerSettings.of(ServeOptions(api_key=("three",), api_key_file=str(tmp_path / "keys")))
    assert settings.keys == {digest("one"), digest("two"), digest("three")}
    assert "three" not in repr(settings)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read the API keys in"),
        (b"", "has no API keys"),
        (b" \n\n", "has no API keys"),
        (b"x\n" * 600_000, "has no API keys, or more than"),
        (b"k\xff\n", "a line that is not an API key"),
        (b"a" * 2000, "a line that is not an API key"),
    ],
)
def test_bad_files_of_keys_are_one_line(tmp_path: Path, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / "keys").write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        ServerSettings.of(ServeOptions(api_key_file=str(tmp_path / "keys")))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"port": 65536}, "port is 65536: it must be a port from 0 to 65535"),
        ({"port": -1}, "port is -1"),
        ({"parallel": 0}, "parallel is 0"),
        ({"parallel": 257}, "parallel is 257: it must be a whole number from 1 to 256"),
        ({"host": ""}, "host is ''"),
        ({"host": "127.0.0.1,"}, "host is '127.0.0.1,'"),
        ({"api_key": ("",)}, "api_key must be a tuple of texts"),
        ({"api_key": "x"}, "api_key must be a tuple"),
        ({"api_key": ("é",)}, "printable ASCII"),
        ({"timeout": 0}, "timeout is 0"),
        ({"max_body": 10}, "max_body is 10: give at least 1024"),
        ({"pooling": "max"}, "pooling is 'max'"),
        ({"cors": ("",)}, "cors is ''"),
    ],
)
def test_bad_options_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError) as caught:
        ServeOptions(**values)
    assert says in str(caught.value)


def test_keys_are_never_quoted() -> None:
    for value in ("sécret", ("sécret",)):
        with pytest.raises(OptionError) as caught:
            ServeOptions(api_key=value)  # type: ignore[arg-type]
        assert "cret" not in str(caught.value)


def test_the_kinds_read_what_is_typed() -> None:
    kinds = {each.name: each.option.kind for each in declared(ServeOptions)}
    assert kinds["port"].read("0") == 0
    assert kinds["parallel"].read("256") == 256
    assert kinds["memory_limit"].read("12GB") == 12 * 10**9
    for name, text in (("port", "70000"), ("parallel", "0"), ("parallel", "257"), ("api_key", ""), ("timeout", "x")):
        with pytest.raises(OptionError):
            kinds[name].read(text)


def test_flags_do_not_clash_with_those_of_other_groups() -> None:
    flags = [flag for group in (ServeOptions, LoadOptions, SamplingOptions) for each in declared(group)
             for flag in each.option.flags]  # fmt: skip
    assert len(set(flags)) == len(flags)
    assert all(each.option.help for each in declared(ServeOptions))


def test_names_are_compared_in_lower_case() -> None:
    settings = ServerSettings.of(ServeOptions(allowed_host=("Box.LAN.",), cors=("http://a.b/",), host="127.0.0.1, ::1"))
    assert "box.lan" in settings.hosts
    assert settings.origins == ("http://a.b",)
    assert settings.addresses == ("127.0.0.1", "::1")
