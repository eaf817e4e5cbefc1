"""All recipes by class and by architecture. Every module of this package with `ROWS` is a family of models.

A recipe has the classes in transformers, the sources of GGUF tensors that the name map does not give, and the
assumptions of the GGUF architecture, which config.json must meet.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from localllm.convert import recipes
from localllm.convert.recipe import Recipe

_FAMILIES = [import_module(f"{recipes.__name__}.{module.name}") for module in iter_modules(recipes.__path__)]
_ALL: list[Recipe] = [row for family in _FAMILIES for row in getattr(family, "ROWS", ())]

RECIPES: dict[str, Recipe] = {row.name: row for row in reversed(_ALL)}
BY_CLASS: dict[str, list[Recipe]] = {
    name: sorted([row for row in _ALL if name in row.classes], key=lambda row: row.when is None)
    for of_class in _ALL
    for name in of_class.classes
}
