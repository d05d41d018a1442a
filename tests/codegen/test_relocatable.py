"""Shared objects as objects again: linked by tcomp's linker and the system's, into programs and libraries."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tcomp.codegen.archive import archive
from tcomp.codegen.elf.linker import link
from tcomp.codegen.elf.relocatable import data_object, relocatable
from tcomp.errors import CodegenError
from tests.codegen.test_elf import ARM, COUNTER, DOUBLE, HOST, IMPORTING, X86, compile_ir, load

NAMES = ["count", "calls_of_double", "address_of_two"]
MAIN = r"""
#include <stdint.h>
#include <stdio.h>
int count(int);
int64_t calls_of_double(void);
void *address_of_two(void);
int main(void) {
  int a = count(0), b = count(3), c = count(2);
  printf("%d %d %d %d %d", (int)((uintptr_t)address_of_two() % 64), a, b, c, (int)calls_of_double());
  return 0;
}
"""


def shared(triple: str = HOST) -> bytes:
    return link([compile_ir(COUNTER, triple), compile_ir(DOUBLE, triple)], NAMES)


@pytest.mark.parametrize("triple", [X86, ARM])
def test_linking_again_makes_the_same_code(triple: str) -> None:
    """However often: what is placed anew goes where it was."""
    first = shared(triple)
    second = link([relocatable(first)], NAMES)
    assert link([relocatable(second)], NAMES) == second and len(second) == len(first)


def test_it_runs_and_its_other_names_are_local(tmp_path: Path) -> None:
    clash = compile_ir("define i32 @double(i32 %x) {\n  ret i32 7\n}\n@step = global i64 3")
    library = load(link([relocatable(shared()), clash], [*NAMES, "double"]), tmp_path)
    assert [library.count(0), library.count(3), library.double(1)] == [13, 9 * 2 + 20 + 4, 7]


def test_imports_stay_imports(tmp_path: Path) -> None:
    library = load(link([relocatable(link([compile_ir(IMPORTING)], ["direct"], imports=["labs"]))], ["direct"], imports=["labs"]), tmp_path)
    assert library.direct(-4) == 5


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("how", [["-static-pie"], ["-no-pie"], []])
def test_the_system_linker_takes_the_archive(how: list[str], tmp_path: Path) -> None:
    (tmp_path / "main.c").write_text(MAIN)
    (tmp_path / "libcount.a").write_bytes(archive([("count.o", relocatable(shared()), NAMES)]))
    command = ["cc", *how, "-Wl,--fatal-warnings", "main.c", "-L.", "-lcount", "-o", "main"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout == "0 13 42 65 1"


@pytest.mark.parametrize("align", [64, 2 << 20])
def test_data_is_where_its_symbol_says(align: int, tmp_path: Path) -> None:
    """The loader of an older C library aligns to a page at most."""
    reader = "@data = external hidden constant i8\ndefine ptr @where() {\n  ret ptr @data\n}"
    content = bytes(range(200))
    code = link([compile_ir(reader), data_object(HOST.partition("-")[0], "data", content, align)], ["where"])
    assert link([relocatable(code)], ["where"]) == link([relocatable(link([relocatable(code)], ["where"]))], ["where"])
    library = load(code, tmp_path)
    from ctypes import c_void_p, string_at

    library.where.restype = c_void_p
    assert library.where() % min(align, 4096) == 0 and string_at(library.where(), 200) == content


def test_refusals() -> None:
    code = bytearray(shared())
    with pytest.raises(CodegenError, match="malformed"):
        relocatable(code[:100])
    with pytest.raises(CodegenError, match="not a name of a member"):
        archive([("a/b", b"", [])])
    kept = code.find(b".rela.text")
    assert kept > 0
    at = int.from_bytes(code[40:48], "little")
    for header in range(at, len(code), 64):  # as older releases linked: without relocations
        if code[header + 4 : header + 16] == (4).to_bytes(4, "little") + (0x40).to_bytes(8, "little"):
            code[header + 4] = 1
    with pytest.raises(CodegenError, match="cannot be linked anew") as caught:
        relocatable(bytes(code))
    assert "compile the model again" in caught.value.hint


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_damaged_files_are_refused_or_read_but_never_crash(data: st.DataObject) -> None:
    code = bytearray(shared())
    for _ in range(data.draw(st.integers(1, 4))):
        code[data.draw(st.integers(0, len(code) - 1))] = data.draw(st.integers(0, 255))
    try:
        link([relocatable(bytes(code))], NAMES)
    except CodegenError:
        pass
