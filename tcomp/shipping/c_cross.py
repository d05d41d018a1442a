"""The libraries of a C package for platforms of whose objects this package is not a linker: RISC-V, ARMv7, Windows, macOS.

The functions of the package (`c_entry`) are compiled for the platform, weights become an object by the assembler of the linker's package.
For Linux there is a static library, too, whose symbols have names of their own.
"""

from __future__ import annotations

import re

from tcomp.codegen.archive import archive, members
from tcomp.codegen.llvm.machine_code import compile_ir
from tcomp.codegen.renaming import defined, renamed
from tcomp.errors import InputError
from tcomp.platforms import Platform
from tcomp.runtime import Artifact
from tcomp.shipping.c_entry import WEIGHTS, entry_ir
from tcomp.shipping.c_interface import CInterface
from tcomp.shipping.linker import assembled, check_linker, link_shared
from tcomp.target import CpuTarget

_SECTIONS = {"elf": '.section .rodata.weights,"a"', "coff": '.section .rdata,"dr"', "macho": ".section __TEXT,__const"}
# How memory is allocated where that is not `aligned_alloc` of C11 with sizes of 64 bits.
_WINDOWS = """\
declare ptr @_aligned_malloc(i64, i64)
declare void @_aligned_free(ptr)
define internal ptr @aligned_alloc(i64 %align, i64 %bytes) #0 {
  %memory = call ptr @_aligned_malloc(i64 %bytes, i64 %align)
  ret ptr %memory
}
define internal void @free(ptr %memory) #0 {
  call void @_aligned_free(ptr %memory)
  ret void
}
"""
# Huge pages are asked for by Linux of 64 bits alone.
_NO_ADVICE = """\
define internal i32 @madvise(ptr %memory, i64 %bytes, i32 %advice) #0 {
  ret i32 -1
}
"""
_NARROW = """\
declare i32 @posix_memalign(ptr, i32, i32)
define internal ptr @aligned_alloc(i64 %align, i64 %bytes) #0 {
  %place = alloca ptr
  %large = icmp ugt i64 %bytes, 2147483647
  br i1 %large, label %none, label %some
some:
  %size = trunc i64 %bytes to i32
  %alignment = trunc i64 %align to i32
  %failed = call i32 @posix_memalign(ptr %place, i32 %alignment, i32 %size)
  %right = icmp eq i32 %failed, 0
  br i1 %right, label %done, label %none
none:
  ret ptr null
done:
  %memory = load ptr, ptr %place
  ret ptr %memory
}
"""


def check_cross(platform: Platform, beside: bool) -> None:
    """Raises TargetError without a linker, InputError where weights cannot lie beside the library."""
    check_linker(platform)
    if beside and (platform.os == "windows" or platform.pointer_bits == 32):
        why = "such are mapped by calls of Linux and macOS for 64 bits"
        raise InputError(f"weights cannot lie beside a library for {platform.triple}", why=why, hint="--weights-at inside")


def cross_libraries(artifact: Artifact, c: CInterface) -> dict[str, bytes]:
    """The libraries, by their place in the package. Raises CodegenError if the linker refuses them."""
    target = CpuTarget.baseline(artifact.manifest.triple)
    platform, name = target.platform, c.name
    objects = [*members(artifact.code), compile_ir(_entry(c, platform), target, exported=c.exports)]
    if c.weights and not c.beside:
        objects.append(assembled(_weights(platform), artifact.weights.data, platform))
    if platform.os == "windows":
        library, imports = link_shared(objects, platform, f"{name}.dll")
        return {f"bin/{name}.dll": library, f"lib/lib{name}.dll.a": imports or b""}
    if platform.os == "macos":
        return {f"lib/lib{name}.dylib": link_shared(objects, platform, f"lib{name}.dylib")[0]}
    library, _ = link_shared(objects, platform, f"lib{name}.so")
    own = set[str]().union(*map(defined, objects))
    own_names = [renamed(code, f"{name}.", own, c.exports) for code in objects]
    static = archive([(f"{n}.o", code, sorted(defined(code))) for n, code in enumerate(own_names)])
    return {f"lib/lib{name}.so": library, f"lib/lib{name}.a": static}


def build_commands(c: CInterface, platform: Platform) -> str:
    """How the example is built where CMake and pkg-config are not told."""
    name = c.name
    if platform.os == "windows":
        return (
            f"x86_64-w64-mingw32-gcc -std=c99 -Iinclude example/main.c lib/lib{name}.dll.a -o main.exe     # and bin/{name}.dll beside it"
        )
    return f"cc -std=c99 -Iinclude example/main.c -Llib -l{name} -Wl,-rpath,@executable_path/lib -o main"


def _entry(c: CInterface, platform: Platform) -> str:
    text = entry_ir(c, open_flags=0x1000000 if platform.os == "macos" else 0x80000)
    if platform.os != "linux" or platform.pointer_bits == 32:
        text = _NO_ADVICE + re.sub(r"declare i32 @madvise\(.*\n", "", text)
    if platform.os == "windows":
        return _WINDOWS + re.sub(r"declare (ptr @aligned_alloc|void @free)\(.*\n", "", text)
    if platform.pointer_bits == 32:
        return _NARROW + re.sub(r"declare ptr @aligned_alloc\(.*\n", "", text)
    return text


def _weights(platform: Platform) -> str:
    """Assembly of the constant WEIGHTS, a file `data`."""
    symbol = f"_{WEIGHTS}" if platform.format == "macho" else WEIGHTS
    hidden = {"elf": f".hidden {symbol}\n", "macho": f".private_extern {symbol}\n"}.get(platform.format, "")
    return f'{_SECTIONS[platform.format]}\n.globl {symbol}\n{hidden}.p2align 6\n{symbol}:\n.incbin "data"\n'
