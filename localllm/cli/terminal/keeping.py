"""Save and load conversations for `--prompt-cache`, `/save` and `/load`, and print notes about the result."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.base.files.outputs import OutputError, check_target
from localllm.cli.options import KeepingOptions
from localllm.cli.terminal.console import YELLOW, LoadProgress, say
from localllm.cli.terminal.formatting import size
from localllm.model import Model
from localllm.saved.attachments import NOTHING, Attachments
from localllm.saved.chat_files import keep_in_file
from localllm.saved.chat_files import take_up as put_in_cache
from localllm.saved.prompt_cache import Kept, check_replaceable, read_prompt_cache

if TYPE_CHECKING:
    from localllm.chat import Conversation


def check_place(keeping: KeepingOptions) -> None:
    """Raise early if the file of `--prompt-cache` cannot be written."""
    if not keeping.prompt_cache or keeping.prompt_cache_ro:
        return
    path = Path(keeping.prompt_cache)
    check_target(path, overwrite=True)
    check_replaceable(path)
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"{path}: cannot be written: no permission for the folder {path.parent}")


class PromptCache:
    """The file of `--prompt-cache`. It is read at the start if it exists, and written at the end if the conversation
    has changed.

    With `force`, `keep` also replaces a saved conversation.
    """

    def __init__(self, keeping: KeepingOptions, model: Model, overwrite: bool = False) -> None:
        self._path = Path(keeping.prompt_cache) if keeping.prompt_cache else None
        self._write = not keeping.prompt_cache_ro
        if keeping.prompt_cache_ro and self._path is None:
            say("note: --prompt-cache-ro has no effect without --prompt-cache FILE", YELLOW)
        self._model, self._overwrite = model, overwrite
        self._found = False  # whether the file existed at the start; other existing files are not replaced
        self._tokens: list[int] = []  # tokens that were in the KV cache after the file was read
        self._messages: list[dict[str, str]] = []

    def take_up(self) -> None:
        """Load only the KV cache from the file, so that a new prompt can reuse its prefix."""
        if self._path is not None and self._there(self._path):
            kept = read_prompt_cache(self._path, self._model)
            self._messages = kept.messages
            self._tokens = put_in_cache(kept, self._model)
            _tell_problem(kept)

    def keep(
        self, tokens: Sequence[int], messages: Sequence[dict[str, str]], attachments: Attachments = NOTHING
    ) -> None:
        """Save the cached part of `tokens`, unless it is unchanged or the file holds a conversation."""
        if self._path is None or not self._write or list(tokens) == self._tokens:
            return
        if self._messages and not self._overwrite:
            say(
                f"note: {self._path} has a conversation and was not overwritten; give another name, or --force",
                YELLOW,
            )
            return
        keep_in_file(self._path, self._model, tokens, messages, self._found, attachments)

    def go_on(self, conversation: Conversation) -> None:
        """Load the whole conversation and continue it."""
        if self._path is not None and self._there(self._path):
            take_up(conversation, self._path)
        self._tokens, self._messages = list(conversation.tokens), list(conversation.messages)

    def keep_all(self, conversation: Conversation) -> None:
        """Save the conversation, unless it is unchanged."""
        if self._path is not None and self._write:
            conversation.forget_rest()
            if (conversation.tokens, conversation.messages) != (self._tokens, self._messages):
                put_down(conversation, self._path, overwrite=self._found)

    def _there(self, path: Path) -> bool:
        if not path.exists() and not self._write:
            say(f"note: no such file: {path}; nothing was loaded, and --prompt-cache-ro writes nothing", YELLOW)
        self._found = path.exists()
        return self._found


def take_up(conversation: Conversation, path: Path) -> None:
    """Load a conversation from a file, to continue it."""
    with LoadProgress() as progress:
        kept = conversation.load(path, progress)
    say(f"{path}: {_turns(kept.messages)}, {len(kept.tokens)} tokens")
    _tell_problem(kept)


def put_down(conversation: Conversation, path: Path, overwrite: bool) -> None:
    """Save a conversation to a file."""
    written = conversation.save(path, overwrite)
    held = len(conversation.tokens)
    say(f"{path}: {_turns(conversation.messages)}, {held} tokens, {size(written)} written")


def _tell_problem(kept: Kept) -> None:
    if kept.problem:
        say(f"note: {kept.path}: {kept.problem}; the text is evaluated again", YELLOW)


def _turns(messages: Sequence[dict[str, str]]) -> str:
    count = sum(message["role"] == "user" for message in messages)
    return f"{count} turn{'s' * (count != 1)}"
