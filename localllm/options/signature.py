"""Show options as function arguments in Python's `help`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar, get_type_hints

from localllm.options.declare import DeclaredOption, Options, declared

F = TypeVar("F", bound=Callable[..., Any])


def takes(*groups: type[Options], without: Collection[str] = ()) -> Callable[[F], F]:
    """Return a decorator that adds these groups' options to a function's signature and docstring."""

    def shown(function: F) -> F:
        own = inspect.signature(function, eval_str=True)
        options = [each for group in groups for each in declared(group) if each.name not in without]
        types = {name: kind for group in groups for name, kind in types_of(group).items()}
        parameters = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters += [
            inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=types[each.name]
            )
            for each in options
        ]
        function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        lines = (line for each in options for line in _lines(each))
        function.__doc__ = "\n".join((inspect.cleandoc(function.__doc__ or ""), "", "Options:", *lines))
        return function

    return shown


def types_of(group: type[Options]) -> dict[str, Any]:
    """Return the type of every option of a group, including nested groups."""
    found = get_type_hints(group)
    for kind in [kind for kind in found.values() if isinstance(kind, type) and issubclass(kind, Options)]:
        found = types_of(kind) | found
    return {name: found[name] for name in group.names()}


def _lines(each: DeclaredOption) -> Iterator[str]:
    """Yield the help lines of an option: type, default and unit, then its effect and the meaning of a None default."""
    unit = f" ({each.option.unit})" if each.option.unit else ""
    meaning = f" [{each.option.shown}]" if each.default is None else ""
    yield f"    {each.name}: {each.type} = {each.default!r}{unit}"
    yield f"        {each.option.help}{meaning}"
