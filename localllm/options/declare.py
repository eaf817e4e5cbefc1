"""Declare options. Each option is a field of a frozen dataclass with a type, default, flags, help, unit and kind.

    @dataclass(frozen=True, slots=True)
    class PlaceOptions(Options):
        threads: int = option(4, "-t", "--threads", help="CPU threads", kind=whole(1))

Commands, the Python API, `bench` and the server use such groups. A group can include another one (`group`), or a single
field of it (`same`). To callers, the fields of nested groups look like the group's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, field, fields
from typing import Any, ClassVar, NamedTuple, Self

from localllm.base.spelling import closest
from localllm.options.kinds import SWITCH, TEXT, Kind, OptionError


class Option(NamedTuple):
    """The declaration of an option, without its name, type and default."""

    flags: tuple[str, ...]  # empty: not on the command line, or a positional argument
    help: str  # a `Notice` if it names other options
    kind: Kind
    metavar: str
    unit: str = ""
    repeat: bool = False  # the flag may be repeated, and each use adds a value
    finish: Callable[[list[Any]], Any] = tuple  # converts the values of a repeated flag to the field
    shown: str = ""  # the default as shown in help; a `Notice` if it names other options
    offers: str = ""  # shell completion of values that are not choices: models, files, types, presets
    key: str = ""  # name of the default value in a model file
    flag: str = ""  # the flag that messages name
    argument: bool = False  # a positional argument, without a flag
    field: str = ""  # name in requests to the server; "": the option's own name
    vllm: str = ""  # vLLM's name in requests in OpenAI's format
    ollama: bool = False  # whether requests in Ollama's format have the option


class DeclaredOption(NamedTuple):
    """One option of a group."""

    name: str
    type: str  # type annotation in the source code
    default: Any
    option: Option


def option(
    default: Any,
    *flags: str,
    help: str,
    kind: Kind | None = None,
    metavar: str = "",
    unit: str = "",
    repeat: bool = False,
    finish: Callable[[list[Any]], Any] = tuple,
    shown: str | None = None,
    offers: str = "",
    key: str = "",
    flag: str = "",
    argument: bool = False,
    field: str = "",
    vllm: str = "",
    ollama: bool = False,
) -> Any:
    """Declare a field as an option. If the default is False, it is a switch. `default` can be an empty dict."""
    kind = kind or (SWITCH if default is False else TEXT)
    if shown is None:
        shown = "" if default is None or default is False or default in ("", (), {}) else str(default)
    flag = flag or (flags[0] if flags else "")
    made = Option(
        flags, help, kind, metavar or kind.metavar, unit, repeat, finish, shown, offers, key, flag, argument, field,
        vllm, ollama,
    )  # fmt: skip
    return _field(default, made)


def same(group: type[Options], name: str, *, default: Any = MISSING, **changed: Any) -> Any:
    """Declare a field with the declaration of a field in another group, with changes."""
    found = next(each for each in declared(group) if each.name == name)
    return _field(found.default if default is MISSING else default, found.option._replace(**changed))


def group(kind: type[Options], without: Collection[str] = (), only: Collection[str] = ()) -> Any:
    """Declare a field that holds the options of another group: all but those in `without`, or those in `only`."""
    names = tuple(only or (name for name in kind.names() if name not in without))
    return field(default=kind(), metadata={"group": kind, "names": names})


def _field(default: Any, made: Option) -> Any:
    metadata = {"option": made}
    return (
        field(default_factory=dict, metadata=metadata) if default == {} else field(default=default, metadata=metadata)
    )


class Options:
    """A group of options: the base class of frozen dataclasses that validate their values on creation."""

    __slots__ = ()
    TITLE: ClassVar[str] = "Options"  # title of the group in help

    def __post_init__(self) -> None:
        for each in _fields(type(self)):
            if "option" in each.metadata:
                problem = each.metadata["option"].kind.problem(getattr(self, each.name))
                if problem:
                    raise OptionError(f"{each.name} {problem}")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all options in this group, including nested groups."""
        return tuple(each.name for each in declared(cls))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Create a group from values by name, with defaults for the other options; raise OptionError for unknown
        names."""
        check_names(values, cls.names())
        own: dict[str, Any] = {}
        for each in _fields(cls):
            if "group" in each.metadata:
                inner = {name: values[name] for name in each.metadata["names"] if name in values}
                own[each.name] = each.metadata["group"].of(inner)
            elif each.name in values:
                own[each.name] = values[each.name]
        return cls(**own)

    @classmethod
    def given(cls, options: Self | None, values: Mapping[str, Any]) -> Self:
        """Combine a function's arguments: `options` or the defaults, overridden by keywords."""
        if options is not None and not isinstance(options, cls):
            raise OptionError(f"expected {cls.__name__}, got {options!r}; pass single options by keyword")
        return cls.of(values) if options is None else options.changed(values)

    def values(self) -> dict[str, Any]:
        """Return every option's value by name."""
        found: dict[str, Any] = {}
        for each in _fields(type(self)):
            value = getattr(self, each.name)
            if "group" in each.metadata:
                inner = value.values()
                found |= {name: inner[name] for name in each.metadata["names"]}
            else:
                found[each.name] = value
        return found

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return these options with some values changed."""
        return self.of(self.values() | dict(values)) if values else self


def declared(group: type[Options]) -> Iterator[DeclaredOption]:
    """Return every option of a group in the order of declaration, including nested groups."""
    for each in _fields(group):
        if "group" in each.metadata:
            yield from (inner for inner in declared(each.metadata["group"]) if inner.name in each.metadata["names"])
        else:
            default = each.default if each.default is not MISSING else {}
            yield DeclaredOption(each.name, str(each.type), default, each.metadata["option"])


def check_names(given: Collection[str], known: Collection[str]) -> None:
    """Raise OptionError for a name that is not in `known`, and suggest the nearest known name."""
    for name in given:
        if name not in known:
            near = closest(name, known)
            hint = f"did you mean {near}?" if near else f"known are {', '.join(known)}"
            raise OptionError(f"unknown option {name}; {hint}")


def divided(values: Mapping[str, Any], *groups: type[Options], without: Collection[str] = ()) -> list[dict[str, Any]]:
    """Split values by the group that declares each option. Raise OptionError for unknown names and for names in
    `without`."""
    names = [[name for name in group.names() if name not in without] for group in groups]
    check_names(values, [name for known in names for name in known])
    return [{name: values[name] for name in known if name in values} for known in names]


def _fields(group: type[Options]) -> tuple[Field[Any], ...]:
    return fields(group)  # type: ignore[arg-type]
