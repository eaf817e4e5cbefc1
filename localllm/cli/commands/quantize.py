"""`localllm quantize`: turn the command line into jobs, one per tensor, and write the results to a file."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from localllm.base.errors import LocalLLMError
from localllm.base.files.outputs import check_target, scratch
from localllm.base.machine.processor import threads_for
from localllm.cli.app import UsageError
from localllm.cli.commands.perplexity import read_evaluation_text
from localllm.cli.commands.quantize_report import error_table, show_report, summary, text_report
from localllm.cli.flags import typed
from localllm.cli.terminal.console import YELLOW, RateProgress, fitted, say
from localllm.cli.tool_options import QuantizeOptions
from localllm.convert import Checkpoint, EncoderCheckpoint
from localllm.evaluation import cut_windows
from localllm.gguf import GGUFFile, open_gguf, write_gguf
from localllm.model import load
from localllm.quant import FORMATS, QuantError
from localllm.quant.mixes import FLOATS, MixOptions, QuantMix, find
from localllm.quantize.calibration.imatrix import Imatrix, measure_imatrix, read_imatrix
from localllm.quantize.calibration.method import METHODS, Method
from localllm.quantize.conversion import ConversionSettings, Error, conversion
from localllm.quantize.jobs import Job, check_jobs, copy_jobs, file_type_of, metadata, plan_jobs
from localllm.quantize.source import Source, default_target, mmproj_target, open_source
from localllm.quantize.target import CONTEXT, WINDOWS, Goal, jobs_for

AUTO, COPY, MIXED = "auto", "COPY", "MIX"


class _Asked(NamedTuple):
    """The parsed command line. `mix` is None for COPY, and if a quality goal replaces the type."""

    source: str
    target: str
    kind: str
    mix: QuantMix | None


def quantize(own: QuantizeOptions) -> None:
    """Quantize a model, or show the jobs with --dry-run."""
    asked, options, goal = _asked(own), _options(own), Goal(own.fit, own.max_kld)
    text, test = _texts(own)
    with ExitStack() as stack:
        progress = stack.enter_context(RateProgress())
        source = stack.enter_context(open_source(asked.source, bool(own.mmproj)))
        target = Path(asked.target) if asked.target else default_target(source.path, asked.kind)
        for line in () if isinstance(source, GGUFFile) else source.notes:
            say(f"note: {line}", YELLOW)
        if isinstance(source, Checkpoint) and source.has_encoders:
            say(f"note: {_how_to_convert_encoders(source, target)}", YELLOW)
        check_target(target, own.force or own.dry_run, _read_files(source, own))
        imatrix = read_imatrix(Path(own.imatrix)) if own.imatrix not in ("", AUTO) else None
        jobs, begun = _jobs(source, asked, options), perf_counter()
        if jobs and own.dry_run:
            show_report(source, jobs, imatrix, own)
            return
        measured = own.imatrix == AUTO or bool(own.method)
        check_jobs(jobs, [job.name for job in jobs] if measured else _known(imatrix), own.allow_requantize)
        if jobs and measured and not any(job.changes and job.after not in FLOATS for job in jobs):
            what = f"--method {own.method}" if own.method else "--imatrix auto"
            raise UsageError(f"{what}: {asked.kind} quantizes no tensor of this model; omit it")
        if _needs_model(own) and isinstance(source, Checkpoint):
            source = stack.enter_context(_as_file(source, target, own))
        if own.imatrix == AUTO:
            imatrix = _measured(own, source, text, progress)
        note = ""
        if asked.kind == MIXED:
            windows = own.chunks or WINDOWS
            jobs, kld = jobs_for(
                source, goal, options, text, imatrix, own.threads, windows, progress, own.force, own.allow_requantize
            )
            note = f", KL divergence {kld:.5f} on {own.file}" if kld is not None else ""
            if kld is None:
                say(f"note: {source.path.name} already fits, so every tensor keeps its format", YELLOW)
        if own.dry_run:
            show_report(source, jobs, imatrix, own)
            return
        check_jobs(jobs, [job.name for job in jobs] if own.method else _known(imatrix), own.allow_requantize)
        # A method accepts larger weight errors for smaller output errors, so only a text can show its effect.
        errors: dict[str, Error] | None = {} if own.report and not own.method else None
        with _method(own, source, jobs, text, progress) as method:
            how = ConversionSettings(_threads(own), imatrix, method, errors, progress)
            digest = _write(source, target, asked, jobs, how, own)
        seconds = perf_counter() - begun
        said = [error_table(jobs, errors)] if errors is not None else []
        done = fitted(f"{target}: {summary(jobs)}{note}, {seconds:.1f} s")
        print(*said, done, f"sha256 {digest}", sep="\n", flush=True)
        if own.report and test:
            print(text_report(source.path, target, test, own, progress))


def _how_to_convert_encoders(source: Checkpoint, target: Path) -> str:
    """Return the command that converts the encoders of a folder, or the reason why they cannot be converted."""
    try:
        with open_source(str(source.path), encoders=True):
            pass
    except LocalLLMError as problem:
        return f"--mmproj cannot convert its encoders: {typed(problem)}"
    words = ["localllm", "quantize", str(source.path), "--mmproj", str(mmproj_target(target))]
    return f"to convert its encoders of pictures and sound, run: {shlex.join(words)}"


def _needs_model(own: QuantizeOptions) -> bool:
    """Return whether the model must run, which requires a GGUF file."""
    return bool(_measuring(own) or (own.report and own.test + own.file))


def _measuring(own: QuantizeOptions) -> str:
    """Return an option that requires a calibration text, or ""."""
    asked = {
        "--imatrix auto": own.imatrix == AUTO,
        f"--method {own.method}": own.method,
        "--fit": own.fit,
        "--max-kld": own.max_kld,
    }
    return next((option for option, given in asked.items() if given), "")


def _texts(own: QuantizeOptions) -> tuple[str, str]:
    """Return the calibration and report texts, read early so that an unreadable file fails before the long work."""
    option = _measuring(own)
    if option and not own.file:
        raise UsageError(f"{option} needs a text to measure on; give one with -f FILE")
    text = read_evaluation_text(own.file) if own.file else ""
    return text, read_evaluation_text(own.test) if own.test else text


def _known(imatrix: Imatrix | None) -> Collection[str]:
    return imatrix.entries if imatrix else ()


@contextmanager
def _as_file(source: Source, target: Path, own: QuantizeOptions) -> Iterator[Source]:
    """Convert a checkpoint to a temporary file next to the target for the duration of the block. Errors name the
    checkpoint."""
    with scratch(target) as path:
        try:
            with conversion(copy_jobs(source), source.tensors, ConversionSettings(_threads(own))) as tensors:
                write_gguf(path, metadata(source.stored, None, None, ""), tensors)
            with open_gguf(path) as file:
                yield file
        except LocalLLMError as problem:
            raise LocalLLMError(typed(problem).replace(str(path), str(source.path))) from problem


def _threads(own: QuantizeOptions) -> int:
    return threads_for(own.threads)


# -- parsing -------------------------------------------------------------------------------------------------------


def _asked(own: QuantizeOptions) -> _Asked:
    if own.mmproj:
        return _asked_for_encoders(own)
    if own.imatrix and own.method:
        raise UsageError(f"--method {own.method} measures importance on -f itself; omit --imatrix or --method")
    words, goals = list(own.words), [name for name, on in (("--fit", own.fit), ("--max-kld", own.max_kld)) if on]
    if goals:
        if len(goals) > 1 or own.pure:
            raise UsageError(f"{goals[-1]} and {goals[0] if len(goals) > 1 else '--pure'} cannot be combined; omit one")
        if len(words) == 3 or (len(words) == 2 and _is_type(words[1])):
            raise UsageError(f"{goals[0]} replaces TYPE; omit {words[-1]}")
        if not words:
            raise UsageError(f"{goals[0]}: MODEL is required")
        return _Asked(words[0], words[1] if len(words) == 2 else "", MIXED, None)
    if len(words) not in (2, 3):
        raise UsageError("expected IN [OUT] TYPE: a model, optionally an output file, and a type such as Q4_K_M")
    mix = None if words[-1].upper() == COPY else find(words[-1])
    return _Asked(words[0], words[1] if len(words) == 3 else "", mix.name if mix else COPY, mix)


def _asked_for_encoders(own: QuantizeOptions) -> _Asked:
    """Return what `--mmproj OUT` asks for: `words` are the folder and the type, F16 unless given."""
    given = _measuring(own) or ("--imatrix" if own.imatrix else "") or ("--test" if own.test or own.file else "")
    if given:
        raise UsageError(f"{given} needs a text model; --mmproj OUT writes encoders of pictures and sound: omit one")
    if len(own.words) not in (1, 2):
        raise UsageError("expected FOLDER [TYPE] with --mmproj OUT: a Hugging Face folder, and a type such as F16")
    word = own.words[1] if len(own.words) == 2 else "F16"
    mix = None if word.upper() == COPY else find(word)
    return _Asked(own.words[0], own.mmproj, mix.name if mix else COPY, mix)


def _is_type(word: str) -> bool:
    try:
        return bool(find(word))
    except QuantError:
        return word.upper() == COPY


def _options(own: QuantizeOptions) -> MixOptions:
    return MixOptions(
        own.pure,
        own.leave_output_tensor,
        _format("--output-tensor-type", own.output_tensor_type) if own.output_tensor_type else None,
        _format("--token-embedding-type", own.token_embedding_type) if own.token_embedding_type else None,
        tuple((_pattern(regex), _format("--tensor-type", name)) for regex, name in own.tensor_type),
        bool(own.imatrix or own.method),
    )


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as problem:
        raise UsageError(f"--tensor-type: {text!r} is not a regular expression: {problem}") from None


def _format(option: str, name: str) -> str:
    known = [f.name for f in FORMATS.values() if f.quantize]
    if name.upper() not in known:
        raise UsageError(f"{option}: unknown format {name!r}; formats are {', '.join(known)}")
    return name.upper()


def _read_files(source: Source, own: QuantizeOptions) -> list[str | Path]:
    """Return the input files: all parts of the model, and the files that options name."""
    parts = source.paths if isinstance(source, GGUFFile) else source.path.iterdir()
    return [*parts, *(name for name in (own.imatrix, own.file, own.test) if name)]


def _jobs(source: Source, asked: _Asked, options: MixOptions) -> list[Job]:
    """Return the jobs of a type; the list is empty if a quality goal replaces the type."""
    if asked.kind == MIXED:
        return []
    if asked.mix is None:
        return copy_jobs(source)
    fixed = source.fixed(asked.mix.format) if isinstance(source, EncoderCheckpoint) else {}
    return plan_jobs(source, asked.mix, options, fixed)


# -- running -------------------------------------------------------------------------------------------------------


def _measured(own: QuantizeOptions, source: Source, text: str, progress: RateProgress) -> Imatrix:
    with load(
        source.path, ctx_size=CONTEXT, threads=own.threads, progress=progress, observe=True, force=own.force
    ) as model:
        return measure_imatrix(
            model, cut_windows(model, text, CONTEXT, own.chunks or None), own.file, progress=progress
        )


@contextmanager
def _method(
    own: QuantizeOptions, source: Source, jobs: list[Job], text: str, progress: RateProgress
) -> Iterator[Method | None]:
    if not own.method:
        yield None
        return
    with load(
        source.path, ctx_size=CONTEXT, threads=own.threads, progress=progress, observe=True, force=own.force
    ) as model:
        windows = cut_windows(model, text, CONTEXT, own.chunks or None)
        yield METHODS[own.method](model, windows, {job.name: job.after for job in jobs}, progress)


def _mixed_type(jobs: list[Job]) -> int | None:
    return file_type_of(jobs) if any(job.changes for job in jobs) else None


def _write(
    source: Source, target: Path, asked: _Asked, jobs: list[Job], how: ConversionSettings, own: QuantizeOptions
) -> str:
    """Write the file, and return its SHA-256."""
    digest = hashlib.sha256()
    file_type = asked.mix.file_type if asked.mix else _mixed_type(jobs) if asked.kind == MIXED else None
    name = own.imatrix if own.imatrix != AUTO else f"measured on {own.file}"
    keys = metadata(source.stored, file_type, how.imatrix, name)
    with conversion(jobs, source.tensors, how) as tensors:
        write_gguf(target, keys, tensors, overwrite=own.force, digest=digest)
    return digest.hexdigest()
