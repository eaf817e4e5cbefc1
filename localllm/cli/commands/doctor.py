"""`localllm doctor`: facts about this computer for a bug report; `--clean` removes the caches."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from localllm.base.machine.memory import SystemMemory, memory
from localllm.base.machine.processor import Processor, processor
from localllm.cli.app import UsageError
from localllm.cli.commands.devices import device_lines, find_devices
from localllm.cli.commands.doctor_caches import Cache, ModelStorage, clean, find_caches, find_models
from localllm.cli.commands.doctor_gpu import check_devices
from localllm.cli.commands.doctor_speed import Speed, measure_speed
from localllm.cli.commands.doctor_versions import versions, without_home
from localllm.cli.options import DoctorOptions
from localllm.cli.terminal.asking import agrees
from localllm.cli.terminal.console import room, say
from localllm.cli.terminal.formatting import in_columns, size
from localllm.template.chat_template import renderer

Rows = list[tuple[str, str]]
WIDTH = 80  # columns of a report that is not written to a terminal
_DOTS = {
    "vnni512": "AVX-512 VNNI, 64 byte products per instruction",
    "vnni256": "AVX-VNNI, 32 byte products per instruction",
    "maddubs": "AVX2, 32 byte products per two instructions",
    "sdot": "Arm dot product, 16 byte products per instruction",
    "plain": "no instruction for byte products; LLVM compiles portable code, which is slow",
}


def doctor(own: DoctorOptions) -> None:
    """Print the report, or delete caches that can be rebuilt."""
    if own.clean:
        _clean(own)
        return
    if own.yes:
        raise UsageError("--yes has no effect without --clean")
    if own.gpu:
        check_devices(own.output)
        return
    if own.output:
        raise UsageError("--output has no effect without --gpu")
    main, chip = memory(), processor()
    speed, kernels = measure_speed(main), kernel_facts()
    found, reasons = find_devices()
    caches, models = find_caches(own.cache_dir), find_models()
    if own.json:
        report = {
            "versions": versions(),
            "confined": confinement(),
            "processor": asdict(chip),
            "kernels": kernels,
            "memory": asdict(main),
            "speed": asdict(speed),
            "devices": found,
            "missing": reasons,
            "caches": [each.facts() for each in caches],
            "models": models.facts(),
        }
        print(json.dumps(report, indent=2))
        return
    programs = [(name, told or "not installed") for name, told in versions().items()]
    _section("localllm", [*programs, ("templates", f"confined by {', '.join(confinement())}")])
    _section("processor", [*_processor(chip), *_kernels(kernels)])
    _section("memory", _memory(main))
    _section(f"speed with {speed.threads} threads", _speed(speed))
    for device in found:
        title = f"device {device['backend']} {device['number']}: {device['name']}"
        _section(title, [*device_lines(device), ("usable", _usable(device))])
    for backend, reason in reasons.items():
        _section(f"device {backend}: none", [("usable", f"no: {reason}")])
    _section("on disk", [*_caches(caches), *_models(models)])


def _section(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print a title and its rows. A long text wraps within its column."""
    print(f"{title}\n{in_columns(rows, indent=2, room=room() or WIDTH)}", flush=True)


def confinement() -> list[str]:
    """Return how chat templates are confined on this system: "limits", "landlock 7", "seccomp"..."""
    with renderer() as child:
        return ["limits", *child.rights()]


# -- processor and memory ------------------------------------------------------------------------------------------


def kernel_facts() -> dict[str, Any]:
    """Return the instruction set that kernels are compiled for, and the CPU features missing for faster ones."""
    from localllm.backends.cpu.isa import X86_ROWS, host

    isa = host()
    features = [name[1:] for name in isa.features.split(",") if name.startswith("+")]
    lacking = {}
    for name, (needed, *_) in X86_ROWS.items() if isa.pause else ():  # only x86 has a pause instruction
        if name == isa.name:
            break
        lacking[name] = [feature for feature in needed if feature not in features]
    named = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
    return {
        "instruction_set": isa.name,
        "llvm_name": isa.cpu,
        "dot": isa.dot,
        "bfloat_dot": isa.bfloat_dot,
        "byte_permute": isa.byte_permute,
        "read_ahead": isa.read_ahead.distance,
        "features": features,
        "lacking": lacking,
        "overridden": {name: os.environ[name] for name in named if name in os.environ},
    }


def _processor(chip: Processor) -> Rows:
    usable = f", {chip.usable} usable by this process" if chip.usable != chip.threads else ""
    return [("name", chip.name), ("threads", f"{chip.threads}{usable}")]


def _kernels(facts: dict[str, Any]) -> Rows:
    yes_no = {True: "yes", False: "no"}
    rows = [
        ("instruction set", f"{facts['instruction_set']} (LLVM calls the processor {facts['llvm_name']})"),
        ("kernels", _DOTS[facts["dot"]]),
        ("", f"BF16 dot product instruction: {yes_no[facts['bfloat_dot']]}"),
        ("", f"byte permutation of a whole register (VBMI): {yes_no[facts['byte_permute']]}"),
        ("", f"prefetches {facts['read_ahead']} bytes" if facts["read_ahead"] else "does not prefetch"),
    ]
    rows += [(f"not {name}", f"lacks {', '.join(features)}") for name, features in facts["lacking"].items()]
    rows += [("overridden", f"{name}={value}") for name, value in facts["overridden"].items()]
    return [*rows, ("features", " ".join(facts["features"]) or "unknown to LLVM")]


def _memory(main: SystemMemory) -> Rows:
    if not main.total:
        return [("total", "unknown")]
    limit = [("container", f"may use {size(main.limit)}")] if main.limit else []
    return [("total", size(main.total)), ("free", size(main.free)), *limit]


def _speed(speed: Speed) -> Rows:
    rows = []
    if speed.read_bytes:
        rows.append(("reads memory", f"{speed.read_bytes / 1e9:.1f} GB/s: the roof of decoding"))
        rows.append(("multiplies", f"{speed.byte_operations / 1e9:.0f} GOP/s on bytes: the roof of prompts"))
    if speed.read_bytes and speed.remarks:
        rows.append(("doubtful", "the computer is busy, so both may be too low; close other programs and try again"))
    return [*rows, *(("", remark) for remark in speed.remarks)]


def _usable(device: dict[str, Any]) -> str:
    if not device["memory"] and device["unmeasured"]:
        return f"no: {device['unmeasured']}"
    if device["unmeasured"]:
        return f"uncertain: {device['unmeasured']}"
    if device["backend"] == "opencl" and device["compute"] == "CPU":
        return "yes, with --backend opencl; this is the processor, for which --backend cpu is faster"
    return "yes"


# -- on disk -------------------------------------------------------------------------------------------------------


def _caches(caches: list[Cache]) -> Rows:
    rows = []
    for each in caches:
        others = f", and {_files(each.others)} not from localllm" if each.others else ""
        held = f"{_files(len(each.files))}, {size(each.bytes)}{others}" if each.files or others else "empty"
        rows.append((each.name, f"{held} in {without_home(each.folder)}"))
    return rows


def _models(models: ModelStorage) -> Rows:
    own = f"{models.pulled}, {size(models.pulled_bytes)} in {without_home(models.folder)}"
    others = f"{models.others}, {size(models.other_bytes)}; localllm list shows them"
    return [("models pulled", own), ("other programs' models", others)]


def _files(count: int) -> str:
    return f"{count} file{'s' * (count != 1)}"


def _clean(own: DoctorOptions) -> None:
    """Delete compiled code and, if their folder is given, saved prefixes, after asking."""
    caches = [each for each in find_caches(own.cache_dir) if each.files]
    count, held = sum(len(each.files) for each in caches), sum(each.bytes for each in caches)
    removed = freed = 0
    if caches and not own.yes:
        for each in caches:
            say(f"{each.name}: {_files(len(each.files))}, {size(each.bytes)} in {without_home(each.folder)}")
    if caches and (own.yes or agrees(f"delete {_files(count)} ({size(held)})?")):
        removed, freed = clean(caches)
    if own.json:
        print(json.dumps({"removed": removed, "bytes": freed}))
    elif removed:
        say(f"deleted {_files(removed)}: {size(freed)} freed; code is compiled again when it is needed")
    else:
        say("nothing was deleted" if caches else "nothing to delete")
