"""Update documents: `python -m localllm.cli.documents docs/*.md` regenerates every generated section.

The text between `<!-- NAME -->` and `<!-- /NAME -->` becomes the section of that name.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

from localllm.base.files.outputs import new_file
from localllm.cli.commands.tables import architectures, formats, pre_tokenizers, tokenizers
from localllm.cli.flags import flag_of, typed
from localllm.cli.terminal.formatting import markdown
from localllm.options import Options, declared


def commands() -> str:
    """Return every command and every option. Options that several commands share are listed once, at the end."""
    from localllm.cli.table import COMMANDS

    users: dict[type[Options], list[str]] = {}
    for name, command in COMMANDS.items():
        for group in command.groups:
            users.setdefault(group, []).append(name)
    parts = []
    for name, command in COMMANDS.items():
        own = [group for group in command.groups if users[group] == [name]]
        parts.append(f"**`localllm {name} {command.arguments}`**: {command.line}\n\n{_options(own)}")
    for group, names in users.items():
        if len(names) > 1:
            parts.append(f"**{group.TITLE.capitalize()}** ({', '.join(names)})\n\n{_options([group])}")
    return "\n\n".join(parts)


def _options(groups: list[type[Options]]) -> str:
    rows = [
        (
            ", ".join(f"`{flag}`" for flag in option.flags),
            typed(option.help),
            f"`{typed(option.shown)}`" if option.shown else "",
        )
        for group in groups
        for _, _, _, option in declared(group)
        if option.flags
    ]
    return markdown(("option", "what it does", "default"), rows)


def presets() -> str:
    """Return the built-in presets, as flags."""
    from localllm.cli.presets import PRESETS

    return markdown(
        ("preset", "options"),
        [
            (f"`{name}`", " ".join(f"`{flag_of(option)} {value}`" for option, value in values.items()))
            for name, values in PRESETS.items()
        ],
    )


def names() -> str:
    """Return the short names of models on the hub."""
    from localllm.hub.short_names import KNOWN

    rows = [(f"`{each.name}`", f"`{each.reference}`", f"{each.bytes / 1e9:.1f} GB", each.licence) for each in KNOWN]
    return markdown(("name", "model", "size", "licence"), rows, right=("size",))


def files_alone() -> str:
    """Return the architectures that cannot be converted from Hugging Face checkpoints."""
    from localllm.convert.recipes.table import RECIPES
    from localllm.models import ARCHITECTURES

    return textwrap.fill(", ".join(sorted(set(ARCHITECTURES) - set(RECIPES))), 120, break_on_hyphens=False)


def classes() -> str:
    """Return the names of the transformers classes whose checkpoints can be converted."""
    from localllm.convert.recipes.table import BY_CLASS

    return textwrap.fill(", ".join(sorted(BY_CLASS)), 120, break_on_hyphens=False)


def encoder_classes() -> str:
    """Return the names of the transformers classes whose encoders become mmproj files, with the projector types."""
    from localllm.convert.encoders.table import ROWS_BY_CLASS

    rows = []
    for name, row in ROWS_BY_CLASS.items():
        types = dict.fromkeys(encoder.projector for encoder in row.encoders)
        rows.append((f"`{name}`", ", ".join(f"`{each}`" for each in types)))
    return markdown(("class", "projector"), rows)


def projectors() -> str:
    """Return the projector types of mmproj files, with their preprocessing and the texts around a picture or sound."""
    from localllm.media.pictures import PICTURES
    from localllm.media.sounds import SOUNDS

    def quoted(text: str) -> str:
        return f"`{text}`".replace("|", r"\|").replace("\n", r"\n") if text else ""

    rows = [
        (f"`{name}`", kind, (row.rule.__doc__ or "").partition("\n")[0].rstrip("."), quoted(row.begin), quoted(row.end))
        for kind, table in (("pictures", PICTURES), ("sound", SOUNDS))
        for name, row in table.items()
    ]
    return markdown(("projector", "reads", "preprocessing", "before", "after"), rows)


SECTIONS: dict[str, Callable[[], str]] = {
    "formats": formats,
    "architectures": architectures,
    "tokenizers": tokenizers,
    "pre-tokenizers": pre_tokenizers,
    "files alone": files_alone,
    "classes": classes,
    "commands": commands,
    "presets": presets,
    "names": names,
    "projectors": projectors,
    "encoder classes": encoder_classes,
}


def brought_up_to_date(document: str, sections: Mapping[str, Callable[[], str]] = SECTIONS) -> str:
    """Return `document` with every section regenerated."""
    for name, section in sections.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        for old in re.findall(f"{start}.*?{end}", document, re.DOTALL):
            document = document.replace(old, f"{start}{section()}\n{end}")
    return document


def update(path: Path, sections: Mapping[str, Callable[[], str]] = SECTIONS) -> None:
    """Regenerate every section of the document at `path`."""
    old = path.read_text(encoding="utf-8")
    text = brought_up_to_date(old, sections)
    if text == old:
        return
    with new_file(path, overwrite=True) as file:
        file.write(text.encode())


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        update(Path(argument))
