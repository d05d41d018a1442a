"""Names of symbols made those of one library, in objects of 32 and 64 bits."""

from __future__ import annotations

import pytest

from tcomp.codegen.llvm.machine_code import compile_ir
from tcomp.codegen.renaming import defined, renamed
from tcomp.errors import CodegenError
from tcomp.target import CpuTarget

IR = """
declare void @other()
declare void @kept()
define void @f() { call void @other() call void @kept() ret void }
define internal void @inner() noinline { ret void }
define void @g() { call void @inner() ret void }
"""


@pytest.mark.parametrize("target", ["riscv64", "armv7"])
def test_global_names_get_a_prefix(target):
    code = compile_ir(IR, CpuTarget.parse(target))
    assert defined(code) == {"f", "g"}
    new = renamed(code, "net.", {"f", "g", "other"}, {"g"})
    assert defined(new) == {"net.f", "g"}
    assert b"\0net.other\0" in new and new[: len(code) // 2].count(b"net.") == 0
    assert defined(renamed(new, "a.", {"net.f"}, ())) == {"a.net.f", "g"}


def test_malformed_objects_are_refused():
    code = compile_ir(IR, CpuTarget.parse("riscv64"))
    for cut in (0, 10, 63, len(code) - 1):
        with pytest.raises(CodegenError):
            defined(code[:cut])
