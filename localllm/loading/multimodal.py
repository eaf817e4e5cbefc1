"""`Multimodal`: the mmproj file of a model, bound to a backend, which turns pictures and sounds into spans of a prompt.

Decoding and preprocessing run in the calling thread (files are parsed in a child process), the encoder in the thread
that steps the model.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from localllm.backends import open_backend
from localllm.backends.base import Backend, BackendError
from localllm.base.closing import Closing
from localllm.base.errors import LocalLLMError
from localllm.base.machine.processor import usable_threads
from localllm.base.notices import Notice, Setting, said
from localllm.base.printable import printable
from localllm.engine import ContextFull, MediaSpan
from localllm.engine.encoder import Encoder, Running, memory_of
from localllm.gguf import GGUFFile
from localllm.gguf.identity import identity
from localllm.loading.media_parts import Kind, Medium
from localllm.media import EncoderInput, MediaError, Projector, TextModel
from localllm.media.decode import Decoder
from localllm.models import Architecture, Config, MediaInput, ModelError
from localllm.models.encoders import VisionEncoder, encoder_of
from localllm.plan.runs import EncoderModel

F32 = NDArray[np.float32]
Part = str | EncoderInput
KEPT = 256 << 20  # bytes of preprocessed pictures and sounds that are kept for the next turn
_DEEP = re.compile(r"v\.deepstack\.\d+\.fc1\.weight")  # one per stream that is added behind a layer of the text model
_ENCODERS: dict[str, Literal["vision", "audio"]] = {"image": "vision", "audio": "audio"}


def text_model(config: Config, architecture: Architecture, tokens: Iterable[str]) -> TextModel:
    """Return what the layout of media depends on. `tokens` are the texts of the special tokens."""
    mrope = bool(config.rope.sections) and bool(architecture.axes)
    streams = 1 + max(config.deepstack) if config.deepstack else 0
    return TextModel(config.width, mrope, frozenset(tokens), streams)


class Multimodal(Closing):
    """The encoders of one mmproj file for one text model. Raises LocalLLMError, with the file, if they do not fit."""

    def __init__(self, file: GGUFFile, text: TextModel, bos: int | None = None, least: int = 0, most: int = 0) -> None:
        """`bos` is the token that may begin a prompt. `least` and `most` limit a picture's tokens; 0: the file's."""
        name = printable(file.path.name, None)
        self.file, self._bos = file, bos
        self.projector = Projector.of(file, text, least or None, most or None)
        types = {"vision": self.projector.picture_type, "audio": self.projector.sound_type}
        metadata = dict(file.metadata) | {f"clip.{kind}.projector_type": own for kind, own in types.items() if own}
        self._models: dict[str, EncoderModel] = {}
        for kind in self.projector.kinds:
            try:
                self._models[kind] = encoder_of(metadata, file.tensors, _ENCODERS[kind])
            except ModelError as error:
                raise MediaError(f"{name}: {said(error)}") from None
        streams = text.streams or 1 + sum(bool(_DEEP.fullmatch(each)) for each in file.tensors)
        for kind, model in self._models.items():
            width = model.width // (streams if kind == "image" else 1)
            if width != text.width:
                problem = f"its embeddings have {width} values, the text model has {text.width}"
                raise MediaError(f"{name}: does not fit this model: {problem}; choose the mmproj file of this model")
        self.input = MediaInput(streams, self.projector.together)
        self._width = streams * text.width
        self._encoders: dict[str, Encoder] = {}
        self._own: Backend | None = None
        self._alone: Callable[[Callable[[], F32]], F32] = lambda job: job()
        self.context = 0  # tokens that a prompt may have; 0: no limit
        self._current: _Encoding | None = None  # the encoding that the executables work on
        self._identity = identity(file).encode()
        self._decoder = Decoder()
        self._kept: OrderedDict[bytes, list[Part]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the model reads: "image", "audio"."""
        return self.projector.kinds

    @property
    def bytes(self) -> int:
        """The memory of the loaded encoders."""
        return sum(encoder.bytes for encoder in self._encoders.values())

    def needed_bytes(self, threads: int | None) -> int:
        """Return the memory that the encoders will need on the CPU."""
        usable = usable_threads()
        found = [memory_of(model, min(threads or usable, usable)) for model in self._models.values()]
        return sum(memory.bytes for parts in found for memory in parts)

    def reserving(self, threads: int | None) -> MediaInput:
        """Return `input` with the memory that the encoders will need on the CPU."""
        return replace(self.input, reserved=self.needed_bytes(threads))

    def bind(self, backend: Backend | None, threads: int | None, alone: Callable[[Callable[[], F32]], F32]) -> None:
        """Load the encoders to a backend; None, or a backend that cannot hold them: to the CPU.

        `alone` runs a job between two steps of the model.
        """
        self._alone = alone
        if backend is not None:
            try:
                self._load(backend)
                return
            except BackendError:
                if backend.name == "cpu":
                    raise
        self._own = open_backend("cpu", threads)
        self._load(self._own)

    def _load(self, backend: Backend) -> None:
        """Load all encoders to a backend, or none."""
        try:
            for kind, model in self._models.items():
                self._encoders[kind] = Encoder(backend, model)
        except BaseException:
            self._unload()
            raise

    def _unload(self) -> None:
        for encoder in self._encoders.values():
            encoder.close()
        self._encoders.clear()

    # -- prompts -------------------------------------------------------------------------------------------------------

    def prompt(
        self,
        sections: Iterable[str | Medium],
        encode: Callable[[str, bool], list[int]],
        marks: Callable[[str], list[int]],
    ) -> list[int | MediaSpan]:
        """Return the tokens and spans of texts and media in turn.

        `encode` returns the tokens of a text, given whether the prompt begins with it. `marks` encodes the texts around
        a picture, with special tokens.
        """
        return [each for chunk in self.chunks(sections, encode, marks) for each in chunk.prompt]

    def chunks(
        self,
        sections: Iterable[str | Medium],
        encode: Callable[[str, bool], list[int]],
        marks: Callable[[str], list[int]],
    ) -> list[MediaChunk]:
        """Return the prompt divided into chunks: runs of text tokens, and the inputs of encoders."""
        found: list[MediaChunk] = []
        start = count = 0

        def add(tokens: Sequence[int] = (), piece: EncoderInput | None = None) -> None:
            nonlocal start, count
            count += len(tokens) if piece is None else piece.tokens
            self.check_count(count)  # at once, because the tensors of many pictures take much memory
            if piece is None and found and found[-1].piece is None:
                found[-1].tokens.extend(tokens)
            elif piece is not None or tokens:
                found.append(MediaChunk(self, list(tokens), piece, start))
            start += len(tokens) if piece is None else piece.positions

        first = True
        for section in sections:
            if isinstance(section, str):
                add(encode(section, first))
            else:
                before = sum(chunk.count for chunk in found) - (found[0].tokens[:1] == [self._bos] if found else 0)
                index = sum(chunk.kind == "image" for chunk in found)
                for part in self.parts(section, index, before):
                    add(marks(part)) if isinstance(part, str) else add(piece=part)
            first = False
        return found

    def check_count(self, tokens: int) -> None:
        """Raise ContextFull if a prompt with this number of tokens exceeds the context."""
        if 0 < self.context < tokens:
            counts = f"the prompt has more than {self.context} tokens with its pictures and sounds"
            raise ContextFull(
                Notice(f"{counts}, the size of the context; leave some out, or raise ", Setting("ctx_size"))
            )

    def prepared(self, medium: Medium) -> Medium:
        """Return a medium with its parts, so that a prompt need not make them. They must not depend on their place."""
        assert not self.projector.placed
        return replace(medium, parts=tuple(self.parts(medium)))

    def parts(self, medium: Medium, index: int = 0, before: int = 0) -> list[Part]:
        """Return the marker texts and pieces of a picture or a sound, which may be kept from an earlier prompt.

        `index` and `before` count the pictures and the tokens before it, as in `Projector.picture`.
        """
        if medium.kind not in self.kinds:
            other = "no pictures" if medium.kind == "image" else "no sound"
            raise MediaError(f"{medium.called}: this model reads {' and '.join(_READ[k] for k in self.kinds)}, {other}")
        if medium.parts is not None:
            return list(medium.parts)
        medium = medium.loaded()
        source = medium.source
        place = (index, before) if self.projector.placed else (0, 0)
        digest = _digest(medium.kind, source, place)
        with self._lock:
            if digest is not None and (kept := self._kept.get(digest)) is not None:
                self._kept.move_to_end(digest)
                return kept
        found = self._prepared(medium.kind, source, medium.called, place)
        if digest is not None:
            with self._lock:
                self._kept[digest] = found
                while sum(map(_bytes, self._kept.values())) > KEPT and len(self._kept) > 1:
                    self._kept.popitem(last=False)
        return found

    def tokens(self, medium: Medium) -> int:
        """Return the number of tokens that the encoder makes of a picture or a sound, without the texts around it."""
        return sum(part.tokens for part in self.parts(medium) if not isinstance(part, str))

    def _prepared(self, kind: Kind, source: Any, name: str, place: tuple[int, int]) -> list[Part]:
        if kind == "image":
            frames = source if isinstance(source, list | tuple) else [source]
            self.projector.check_frames(len(frames))  # before they are decoded, because each may take 150 MB
            found = self.projector.picture([self._decoder.picture(frame, name) for frame in frames], *place)
            self._check_sizes(found, name)
            return found
        if isinstance(source, np.ndarray):
            source = (source, self.projector.rate)
        return self.projector.sound(self._decoder.sound(source, self.projector.rate, name))

    def _check_sizes(self, parts: Sequence[Part], name: str) -> None:
        """Refuse a picture that the encoder cannot take, because then it is too late for the client's status."""
        model = self._models["image"]
        if isinstance(model, VisionEncoder):
            try:
                for part in parts:
                    if not isinstance(part, str):
                        model.check(part.tensors)
            except ModelError as error:
                raise MediaError(Notice(f"{name}: ", said(error))) from None

    # -- embeddings ----------------------------------------------------------------------------------------------------

    def span(self, piece: EncoderInput, start: int) -> MediaSpan:
        """Return a piece as the engine knows it. `start` is the position of its first token."""
        key = hashlib.sha256(self._identity + piece.key)
        positions = np.arange(piece.tokens, dtype=np.int32) if piece.axes is None else piece.axes
        if piece.absolute is not None and piece.absolute[:, :3].any():  # the engine adds the start to all of them
            positions = positions - np.where(piece.absolute, start, 0).astype(np.int32)
            key.update(b"%d" % start)
        return MediaSpan(
            key.digest(), piece.tokens, positions, piece.positions, piece.causal, lambda: _Encoding(self, piece),
            (piece, start),
        )  # fmt: skip

    def begin(self, encoding: _Encoding, piece: EncoderInput) -> Running:
        """Begin to encode a piece. The encoding before loses the executables, and begins again when it is advanced."""
        if piece.kind not in self._encoders:
            raise LocalLLMError("the encoders of this model are not loaded; load it again")
        self._current = encoding
        return self._encoders[piece.kind].begin(piece.tensors, piece.flags.numbers)

    def done(self, encoding: _Encoding) -> None:
        """Forget an encoding, whose embeddings may take hundreds of megabytes."""
        if self._current is encoding:
            self._current = None

    def working_on(self, encoding: _Encoding) -> bool:
        return self._current is encoding

    def embeddings(self, piece: EncoderInput) -> F32:
        """Return the embeddings of a piece, computed between two steps of the model."""
        encoding = _Encoding(self, piece)

        def whole() -> F32:
            while not encoding.advance():
                pass
            return encoding.embeddings

        return self._alone(whole)

    def widened(self, embeddings: F32) -> F32:
        """Return embeddings with zeros for the streams that the other encoder of the file has."""
        missing = self._width - embeddings.shape[1]
        return np.pad(embeddings, ((0, 0), (0, missing))) if missing else embeddings

    def stop_decoding(self) -> None:
        """End the decoder. The picture or sound that it decodes in another thread fails."""
        self._decoder.close()

    def close(self) -> None:
        """Free the encoders, and end the decoder."""
        self._unload()
        self._decoder.close()
        if self._own is not None:
            self._own.close()
        self.file.close()


class _Encoding:
    """The encoding of a piece, which the loop advances segment by segment."""

    def __init__(self, owner: Multimodal, piece: EncoderInput) -> None:
        self._owner, self._piece = owner, piece
        self._running: Running | None = None
        self._embeddings: F32 | None = None

    @property
    def embeddings(self) -> F32:
        assert self._embeddings is not None, "the encoder is not done"
        return self._embeddings

    def advance(self, seconds: float = 0.0) -> bool:
        """Run the next segment, or about `seconds` of it. Return whether the embeddings are complete."""
        if self._embeddings is not None:
            return True
        try:
            return self._advance(seconds)
        except Exception as error:
            self._running = None
            self._owner.done(self)
            if isinstance(error, ModelError):
                raise MediaError(said(error)) from None
            raise

    def _advance(self, seconds: float) -> bool:
        if self._running is None or not self._owner.working_on(self):
            began = perf_counter()
            self._running = self._owner.begin(self, self._piece)
            if seconds and (seconds := seconds - (perf_counter() - began)) <= 0:
                return False
        if not self._running.advance(seconds):
            return False
        self._embeddings, self._running = self._owner.widened(self._running.result), None
        self._owner.done(self)
        return True


@dataclass(slots=True, eq=False)
class MediaChunk:
    """A part of a prompt: `tokens` of a text, or one input of an encoder."""

    _owner: Multimodal
    tokens: list[int]
    piece: EncoderInput | None
    start: int  # position of the first token

    @property
    def kind(self) -> str:
        """ "text", "image" or "audio"."""
        return self.piece.kind if self.piece is not None else "text"

    @property
    def count(self) -> int:
        """The number of tokens."""
        return self.piece.tokens if self.piece is not None else len(self.tokens)

    @property
    def positions(self) -> int:
        """What the chunk adds to the position of the token behind it."""
        return self.piece.positions if self.piece is not None else len(self.tokens)

    @property
    def tensors(self) -> tuple[F32, ...]:
        """The preprocessed tensors: (height, width, 3) or (mel bins, frames) each."""
        return self.piece.tensors if self.piece is not None else ()

    @property
    def pos(self) -> NDArray[np.int32] | None:
        """Positions of the tokens in a model with M-RoPE, (tokens, 4): time, column, row, other. Otherwise None."""
        if self.piece is None or self.piece.axes is None:
            return None
        offset = self.start if self.piece.absolute is None else np.where(self.piece.absolute, 0, self.start)
        found: NDArray[np.int32] = (self.piece.axes + offset)[:, [0, 2, 1, 3]].astype(np.int32)
        return found

    @property
    def embeddings(self) -> F32 | None:
        """The encoder's result, (tokens, width), computed when it is read."""
        return None if self.piece is None else self._owner.embeddings(self.piece)

    @property
    def prompt(self) -> Sequence[int | MediaSpan]:
        """The chunk as part of a prompt for `Model.generate` and `Model.logits`."""
        return self.tokens if self.piece is None else [self._owner.span(self.piece, self.start)]


_READ = {"image": "pictures", "audio": "sound"}


def _digest(kind: Kind, source: Any, place: tuple[int, int]) -> bytes | None:
    """Return a hash of a source and its place; None if it has no content to compare."""
    digest = hashlib.sha256(f"{kind} {place} ".encode())
    for each in source if isinstance(source, list | tuple) else [source]:
        if isinstance(each, np.ndarray):
            digest.update(f"{each.dtype.str} {each.shape} ".encode() + np.ascontiguousarray(each).tobytes())
        elif isinstance(each, bytes | bytearray | memoryview):
            digest.update(b"%d " % len(each) + bytes(each))
        elif isinstance(each, int):
            digest.update(b"%d " % each)
        else:
            return None
    return digest.digest()


def _bytes(parts: Sequence[Part]) -> int:
    return sum(part.nbytes for part in parts if isinstance(part, EncoderInput))
