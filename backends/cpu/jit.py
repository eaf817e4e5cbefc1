"""Compiles kernels to object code, caches the objects on disk, and loads the cached objects.

A kernel's key consists of this package's source, the LLVM version, the instruction set and the kernel's name, so a
stale object is never found. `quant.codecache` decides which folders and files are trusted; an untrusted object, or one
that fails its checksum, is compiled again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir

from localllm.backends.cpu.isa import Isa
from localllm.quant.codecache import CodeCache

Emit = Callable[[Isa], ir.Module]


@dataclass(frozen=True, slots=True)
class Kernel:
    """The name of a kernel, which is part of its cache key, and the function that emits its code."""

    name: str
    emit: Emit


@cache
def _initialize() -> None:
    if not hasattr(llvm, "initialize_all_targets"):  # pragma: no cover - very old llvmlite
        raise ImportError("llvmlite 0.44 or newer is needed")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@cache
def _source_hash() -> bytes:
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(here.rglob("*.py")):
        digest.update(path.relative_to(here).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.digest()


def target_machine(isa: Isa) -> llvm.TargetMachine:
    _initialize()
    if isa.triple:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        target = llvm.Target.from_triple(isa.triple)
    else:
        target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=isa.cpu, features=isa.features, opt=3, reloc="default", codemodel="jitdefault", jit=True
    )


def optimized(kernel: Kernel, isa: Isa, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    module = kernel.emit(isa)
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    # Kernels are single functions with explicit vectors and loops. LLVM's simplification at -O2 makes them as fast as
    # all of -O3, which takes twice as long. At -O1, kernels of codebook formats are slower.
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    passes = builder.getFunctionPassManager()
    for function in parsed.functions:
        if not function.is_declaration:
            passes.run(function, builder)
    return parsed


def assembly(kernel: Kernel, isa: Isa) -> str:
    """Return the machine code as text, for tests of code generation."""
    machine = target_machine(isa)
    return str(machine.emit_assembly(optimized(kernel, isa, machine)))


class Library:
    """Compiled kernels of one instruction set. `address` maps each kernel to its entry point."""

    def __init__(self, isa: Isa, folder: Path | None) -> None:
        """Cache objects under `folder`; None disables the cache."""
        _initialize()
        self.isa = isa
        self.compiled = 0  # kernels compiled by this process, not found on disk
        self._cache = CodeCache(folder)
        self._machine: llvm.TargetMachine | None = None
        self._engine: llvm.ExecutionEngine | None = None
        self._addresses: dict[str, int] = {}

    def load(self, kernels: Iterable[Kernel], progress: Callable[[int, int, str], None] | None = None) -> None:
        """Load the given kernels, so that `address` knows their entry points.

        Call `progress(done, total, name)` for each kernel that must be compiled.
        """
        wanted = {k.name: k for k in kernels if k.name not in self._addresses}
        objects = {name: self._cache.read(self._key(name)) for name in wanted}
        missing = [name for name, data in objects.items() if data is None]
        for done, name in enumerate(missing):
            if progress is not None:
                progress(done, len(missing), name)
            objects[name] = self._compile(wanted[name])
        if missing and progress is not None:
            progress(len(missing), len(missing), "")
        if not objects:
            return
        engine = self._execution_engine()
        for data in objects.values():
            assert data is not None
            engine.add_object_file(llvm.ObjectFileRef.from_data(data))
        engine.finalize_object()
        for name in objects:
            self._addresses[name] = engine.get_function_address(name)

    def address(self, name: str) -> int:
        return self._addresses[name]

    def _execution_engine(self) -> llvm.ExecutionEngine:
        if self._engine is None:
            machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
            module = llvm.parse_assembly(f'target triple = "{llvm.get_process_triple()}"')
            self._engine = llvm.create_mcjit_compiler(module, machine)
        return self._engine

    def _compile(self, kernel: Kernel) -> bytes:
        if self._machine is None:
            self._machine = target_machine(self.isa)
        data = bytes(self._machine.emit_object(optimized(kernel, self.isa, self._machine)))
        self.compiled += 1
        self._cache.write(self._key(kernel.name), data)
        return data

    def _key(self, name: str) -> str:
        """Return the name of a kernel's file in the cache."""
        version = f"{llvmlite.__version__} {llvm.llvm_version_info}"
        parts = (name, version, self.isa.name, self.isa.cpu, self.isa.features, self.isa.triple)
        return hashlib.sha256(_source_hash() + "\0".join(parts).encode()).hexdigest()[:40] + ".o"
