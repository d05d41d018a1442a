"""LLVM IR text to machine code. LLVM's state is process-wide: one lock serialises this module; to compile in parallel, use processes."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import llvmlite.binding as llvm

from tcomp.errors import CodegenError
from tcomp.target import CpuTarget

MANY_ADDRESSES = 4 * 16  # of a block: four for each integer register
_LABEL = re.compile(r"^[\w.]+:$", re.MULTILINE)

_lock = threading.Lock()


def compile_ir(ir_text: str, target: CpuTarget, opt_level: int = 2, exported: Collection[str] = ()) -> bytes:
    """A relocatable object, position independent, in the format of the platform. Where another linker than ours joins objects, it shows
    the `exported` functions alone to others. Raises `CodegenError` with LLVM's message on malformed IR."""
    with _lock:
        module, machine = _optimised(ir_text, target, opt_level)
        if target.platform.linker:
            _hide(module, target, exported)
        with _strength_reduction(ir_text):
            return bytes(machine.emit_object(module))


def _hide(module: llvm.ModuleRef, target: CpuTarget, exported: Collection[str]) -> None:
    """Mark what a shared library shows, and what it does not."""
    for defined in (*module.functions, *module.global_variables):
        if defined.is_declaration or defined.linkage != llvm.Linkage.external:
            continue
        if defined.name not in exported:
            defined.visibility = "hidden"
        elif target.platform.os == "windows":
            defined.storage_class = "dllexport"


def assembly(ir_text: str, target: CpuTarget) -> str:
    """The same as assembly text, for people and for tests."""
    with _lock:
        module, machine = _optimised(ir_text, target, 2)
        with _strength_reduction(ir_text):
            return str(machine.emit_assembly(module))


def _optimised(ir_text: str, target: CpuTarget, opt_level: int) -> tuple[llvm.ModuleRef, llvm.TargetMachine]:
    machine = _machine(target.triple, target.cpu, target.llvm_features, opt_level)
    try:
        module = llvm.parse_assembly(ir_text)
        module.verify()
    except RuntimeError as error:
        found = re.search(r"<string>:(\d+):", str(error))  # the line that LLVM complains about
        where = "".join(ir_text.splitlines()[int(found[1]) - 1 : int(found[1])]).strip() if found else ""
        raise CodegenError("LLVM refused the generated code", where=where, why=str(error)) from error
    module.triple, module.data_layout = target.triple, str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=opt_level)
    # Vectors and unrolled copies are explicit in the loop program; LLVM must not add its own.
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = options.loop_interleaving = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module, machine


@contextmanager
def _strength_reduction(ir_text: str) -> Iterator[None]:
    """LLVM's reduction of the strength of addresses (an option of the process), but for code with many of them in one block: it weighs ways
    to hold the addresses of a loop in registers against each other, which takes longer than the rest of code generation together where a
    register tile is unrolled. There they lie at constant distances of a few, and to compute these in each turn costs nothing beside the
    tile. Kernels of many loops of few statements keep it."""
    if max(block.count("getelementptr") for block in _LABEL.split(ir_text)) < MANY_ADDRESSES:
        yield
        return
    llvm.set_option("tcomp", "-disable-lsr")
    try:
        yield
    finally:
        llvm.set_option("tcomp", "-disable-lsr=false")


@functools.cache
def _initialise() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    # The pre-allocation scheduler hoists loads above the multiply-adds of a register tile, which then spills.
    llvm.set_option("tcomp", "-enable-misched=false")
    # Without optimisation it folds loads of 4 bytes into operands of 16 (vblendvps), which may lie on a page that is not there.
    llvm.set_option("tcomp", "-fast-isel=false")
    # Looks for cheaper spellings of vector code that is already as it should be, for half of the optimiser's time.
    llvm.set_option("tcomp", "-disable-vector-combine")


@functools.lru_cache(maxsize=16)
def _machine(triple: str, cpu: str, features: str, opt_level: int) -> llvm.TargetMachine:
    _initialise()
    return llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=opt_level, reloc="pic", codemodel="small")
