"""The linker, on objects compiled from hand-written IR."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path

import llvmlite.binding as llvm
import pytest
from hypothesis import given, settings, strategies as st

from tcomp.codegen.elf.linker import link
from tcomp.errors import CodegenError

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
HOST = llvm.get_process_triple().split("-")[0] + "-unknown-linux-gnu"


def compile_ir(ir: str, triple: str = HOST, reloc: str = "pic") -> bytes:
    machine = llvm.Target.from_triple(triple).create_target_machine(opt=2, reloc=reloc, codemodel="small")
    module = llvm.parse_assembly(ir)
    module.triple = triple
    return machine.emit_object(module)


def load(code: bytes, folder: Path) -> ctypes.CDLL:
    path = folder / "linked.so"
    path.write_bytes(code)
    return ctypes.CDLL(str(path))


COUNTER = """
@table = internal constant [4 x float] [float 1.0, float 2.0, float 4.0, float 8.0]
@total = internal global i32 0
@step = global i64 10
@handlers = internal constant [2 x ptr] [ptr @triple, ptr @double]
declare i32 @double(i32)
define i32 @triple(i32 %x) {
  %y = mul i32 %x, 3
  ret i32 %y
}
; total += table[i]; return handlers[i & 1](total) + step + (i32) (0.5 * total)
define i32 @count(i32 %i) {
  %t.at = getelementptr [4 x float], ptr @table, i32 0, i32 %i
  %t = load float, ptr %t.at
  %k = fptosi float %t to i32
  %old = load i32, ptr @total
  %new = add i32 %old, %k
  store i32 %new, ptr @total
  %j = and i32 %i, 1
  %h.at = getelementptr [2 x ptr], ptr @handlers, i32 0, i32 %j
  %h = load ptr, ptr %h.at
  %r = call i32 %h(i32 %new)
  %s = load i64, ptr @step
  %s32 = trunc i64 %s to i32
  %f = sitofp i32 %new to double
  %half = fmul double %f, 0.5
  %half32 = fptosi double %half to i32
  %a = add i32 %r, %s32
  %b = add i32 %a, %half32
  ret i32 %b
}
"""
DOUBLE = """
@two = internal constant [2 x i32] [i32 1, i32 2], align 64
@calls = global [100 x i64] zeroinitializer, align 64
@step = external global i64
define i32 @double(i32 %x) {
  %k.at = getelementptr [2 x i32], ptr @two, i32 0, i32 1
  %k = load volatile i32, ptr %k.at
  %y = mul i32 %x, %k
  %c.at = getelementptr [100 x i64], ptr @calls, i32 0, i32 99
  %c = load i64, ptr %c.at
  %d = add i64 %c, 1
  store i64 %d, ptr %c.at
  store i64 20, ptr @step
  ret i32 %y
}
define i64 @calls_of_double() {
  %c = load i64, ptr getelementptr ([100 x i64], ptr @calls, i32 0, i32 99)
  ret i64 %c
}
define ptr @address_of_two() {
  ret ptr @two
}
"""


def test_constants_static_data_bss_and_calls_across_objects(tmp_path: Path) -> None:
    code = link([compile_ir(COUNTER), compile_ir(DOUBLE)], ["count", "calls_of_double", "address_of_two"])
    library = load(code, tmp_path)
    library.address_of_two.restype = ctypes.c_void_p
    assert library.address_of_two() % 64 == 0
    assert library.count(0) == 1 * 3 + 10 + 0
    assert library.calls_of_double() == 0
    assert library.count(3) == 9 * 2 + 20 + 4  # `double` runs before `step` is read
    assert library.count(2) == 13 * 3 + 20 + 6
    assert library.calls_of_double() == 1
    assert not hasattr(library, "double")  # global in its object, but not exported


def test_linking_is_deterministic_and_keeps_names_for_profilers() -> None:
    objects = [compile_ir(COUNTER), compile_ir(DOUBLE)]
    code = link(objects, ["count"])
    assert code == link(objects, ["count"])
    for name in (b"double", b"triple", b"table"):
        assert b"\0" + name + b"\0" in code


IMPORTING = """
@pointer = internal global ptr @labs
declare i64 @labs(i64)
define i64 @direct(i64 %x) {
  %y = call i64 @labs(i64 %x)
  %z = add i64 %y, 1
  ret i64 %z
}
define i64 @indirect(i64 %x) {
  %f = load volatile ptr, ptr @pointer
  %y = call i64 %f(i64 %x)
  ret i64 %y
}
"""


def test_imported_functions(tmp_path: Path) -> None:
    library = load(link([compile_ir(IMPORTING)], ["direct", "indirect"], imports=["labs", "unused"]), tmp_path)
    for function, expected in ((library.direct, 6), (library.indirect, 5)):
        function.argtypes, function.restype = [ctypes.c_int64], ctypes.c_int64
        assert function(-5) == expected


@pytest.mark.parametrize("triple", [X86, ARM])
def test_readelf_finds_nothing_to_complain_about(triple: str, tmp_path: Path) -> None:
    tool = shutil.which("readelf")
    if tool is None:
        pytest.skip("readelf is not installed")
    objects = [compile_ir(ir, triple) for ir in (COUNTER, DOUBLE, IMPORTING)]
    (tmp_path / "a.so").write_bytes(link(objects, ["count", "direct"], imports=["labs"]))
    for options in ("-aW", "-wF"):
        shown = subprocess.run([tool, options, str(tmp_path / "a.so")], capture_output=True, text=True, check=True)
        assert "arning" not in shown.stderr + shown.stdout and "rror" not in shown.stderr
    assert (
        " FUNC    GLOBAL DEFAULT " in subprocess.run([tool, "-sW", tmp_path / "a.so"], capture_output=True, text=True, check=False).stdout
    )


class Image:
    """A shared object as a loader sees it: memory by address, dynamic symbols by name."""

    def __init__(self, code: bytes) -> None:
        (at,), (count,) = struct.unpack_from("<Q", code, 32), struct.unpack_from("<H", code, 56)
        headers = [struct.unpack_from("<IIQQQQQQ", code, at + 56 * index) for index in range(count)]
        self.segments = [(flags, v, code[o : o + size].ljust(m, b"\0")) for kind, flags, o, v, _, size, m, _ in headers if kind == 1]
        tags = {}
        (dynamic,) = [header for header in headers if header[0] == 2]
        for index in range(dynamic[5] // 16):
            tag, value = self.read("<qQ", dynamic[3] + 16 * index)
            tags.setdefault(tag, value)
        (_, chains) = self.read("<II", tags[4])
        self.symbols = {}
        for index in range(1, chains):
            name_at, _, _, section, value, _ = self.read("<IBBHQQ", tags[6] + 24 * index)
            name = self.bytes(tags[5] + name_at, 64).split(b"\0")[0].decode()
            self.symbols[name] = value if section else None
        self.relocations = {}
        for index in range(tags.get(8, 0) // 24):
            place, info, addend = self.read("<QQq", tags[7] + 24 * index)
            self.relocations[place] = (info & 0xFFFFFFFF, list(self.symbols)[(info >> 32) - 1] if info >> 32 else None, addend)

    def bytes(self, address: int, size: int) -> bytes:
        for _, start, data in self.segments:
            if start <= address < start + len(data):
                return data[address - start : address - start + size].ljust(size, b"\0")
        raise AssertionError(f"address {address:#x} is not mapped")

    def read(self, layout: str, address: int) -> tuple[int, ...]:
        return struct.unpack(layout, self.bytes(address, struct.calcsize(layout)))


def test_aarch64_instructions_reach_their_targets() -> None:
    """Follow the patched instructions by hand: this machine cannot run them."""
    local = """
@c = internal constant [2 x i64] [i64 1234567890123, i64 7], align 16
@g = global i64 42
declare i64 @helper(i64)
define i64 @low() {
  %v = load volatile i64, ptr @c
  ret i64 %v
}
define i64 @got() {
  %v = load volatile i64, ptr @g
  ret i64 %v
}
define i64 @jump(i64 %x) {
  %y = tail call i64 @helper(i64 %x)
  ret i64 %y
}
define i64 @out(i64 %x) {
  %y = tail call i64 @labs(i64 %x)
  ret i64 %y
}
declare i64 @labs(i64)
"""
    helper = "define i64 @helper(i64 %x) {\n  %y = add i64 %x, 1\n  ret i64 %y\n}"
    names = ["low", "got", "jump", "out", "helper", "g"]
    image = Image(link([compile_ir(local, ARM), compile_ir(helper, ARM)], names, imports=["labs"]))
    assert [flags for flags, _, _ in image.segments] == [4, 5, 6]  # read; read and execute; read and write

    def adrp_ldr(address: int) -> int:
        adrp, ldr = image.read("<II", address)
        assert adrp & 0x9F000000 == 0x90000000 and ldr & 0xFFC00000 == 0xF9400000
        pages = (adrp >> 5 & 0x7FFFF) << 2 | adrp >> 29 & 3
        pages -= (pages & 1 << 20) << 1
        return (address >> 12) + pages << 12 | (ldr >> 10 & 0xFFF) << 3

    def branch(address: int) -> int:
        (code,) = image.read("<I", address)
        assert code & 0xFC000000 == 0x14000000
        return address + 4 * ((code & 0x3FFFFFF) - (code & 1 << 25) * 2)

    assert image.read("<Q", adrp_ldr(image.symbols["low"])) == (1234567890123,)
    assert image.relocations[adrp_ldr(image.symbols["got"])] == (1027, None, image.symbols["g"])  # RELATIVE
    assert branch(image.symbols["jump"]) == image.symbols["helper"]
    stub = branch(image.symbols["out"])
    assert image.relocations[adrp_ldr(stub)] == (1025, "labs", 0)  # GLOB_DAT
    assert image.read("<I", stub + 8) == (0xD61F0220,)  # br x17


def test_weak_definitions_merge(tmp_path: Path) -> None:
    weak = "define linkonce_odr i32 @shared() {\n  ret i32 5\n}\n"
    weak += "define i32 @NAME() {\n  %x = call i32 @shared()\n  ret i32 %x\n}"
    objects = [compile_ir(weak.replace("NAME", name)) for name in ("a", "b")]
    library = load(link(objects, ["a", "b", "shared"]), tmp_path)
    assert library.a() == library.b() == 5


F = "define i32 @f() {\n  ret i32 1\n}\n"


@pytest.mark.parametrize(
    ("objects", "exports", "message"),
    [
        (
            [F.replace("ret i32 1", "%x = call i32 @g()\n  ret i32 %x") + "declare i32 @g()"],
            ["f"],
            r"'g' is not defined(.|\n)*object 0 \(defines f\)",
        ),
        ([F, F], ["f"], "'f' is defined twice"),
        ([F], ["f", "h"], "'h' is not defined by any object"),
        ([F + "@t = thread_local global i32 1"], ["f"], "neither code nor plain data"),
        (
            [F + "@llvm.global_ctors = appending global [1 x { i32, ptr, ptr }] " + "[{ i32, ptr, ptr } { i32 1, ptr @f, ptr null }]"],
            ["f"],
            "neither code nor plain data",
        ),
        ([F + "@x = common global i32 0"], ["f"], "common, absolute"),
        ([F + "@big = global [3000000000 x i8] zeroinitializer"], ["f"], "bad alignment, size"),
        ([F + "@wide = global i8 1, align 1048576"], ["f"], "alignment of 1048576"),
        ([], ["f"], "no objects"),
    ],
)
def test_refusals(objects: list[str], exports: list[str], message: str) -> None:
    with pytest.raises(CodegenError, match=message):
        link([compile_ir(ir) for ir in objects], exports)


def test_refuses_code_that_is_not_position_independent() -> None:
    static = compile_ir(
        "@a = internal global [4 x i32] zeroinitializer\n"
        "define ptr @f(i64 %i) {\n  %p = getelementptr i32, ptr @a, i64 %i\n  ret ptr %p\n}",
        X86,
        "static",
    )
    with pytest.raises(CodegenError, match="relocation type 1[01] is not supported"):
        link([static], ["f"])


def test_refuses_a_mixture_of_processors() -> None:
    with pytest.raises(CodegenError, match="different processors"):
        link([compile_ir(F, X86), compile_ir(F.replace("@f", "@g"), ARM)], ["f"])


SAMPLES = {triple: [compile_ir(ir, triple) for ir in (COUNTER, DOUBLE, IMPORTING)] for triple in (X86, ARM)}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_damaged_objects_are_refused_or_linked_but_never_crash(data: st.DataObject) -> None:
    objects = list(SAMPLES[data.draw(st.sampled_from([X86, ARM]))])
    index = data.draw(st.integers(0, len(objects) - 1))
    damaged = bytearray(objects[index])
    for _ in range(data.draw(st.integers(1, 4))):
        # Half of the damage goes to the section headers, at the end of the file.
        start = data.draw(st.sampled_from([0, len(damaged) - 64 * 14]))
        damaged[data.draw(st.integers(start, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    objects[index] = bytes(damaged[: data.draw(st.sampled_from([len(damaged), len(damaged) - 8, 100, 0]))])
    try:
        assert link(objects, ["count", "direct"], imports=["labs"])[:4] == b"\x7fELF"
    except CodegenError:
        pass
