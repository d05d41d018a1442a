"""LLVM IR to objects: what one compilation sets for the process does not reach the next."""

from __future__ import annotations

import numpy as np
import pytest

from tcomp.codegen.llvm.kernel import emit_kernel
from tcomp.codegen.llvm.machine_code import MANY_ADDRESSES, assembly, compile_ir
from tcomp.errors import CodegenError
from tcomp.ir.expr import loop_var
from tcomp.ir.loops import Buffer, For, Kernel, block, store
from tests.codegen.jit import HOST, compile_kernel, kernel


def rows(count: int) -> Kernel:
    """y[i, n] = x[i, n] + x[i, 0] for n < count, row by row."""
    x, y, i = Buffer("x", "float32", (40, count)), Buffer("y", "float32", (40, count)), loop_var("i", 40)
    return kernel("k", [x], [y], For(i, 40, block(*(store(y, (i, n), x[i, n] + x[i, 0]) for n in range(count)))))


def test_code_of_many_addresses_leaves_that_of_others_as_it_was() -> None:
    few, many = emit_kernel(rows(3), HOST), emit_kernel(rows(MANY_ADDRESSES), HOST)
    assert few.count("getelementptr") < MANY_ADDRESSES <= many.count("getelementptr")
    before = compile_ir(few, HOST), compile_ir(many, HOST)
    assert (compile_ir(few, HOST), compile_ir(many, HOST)) == before
    with pytest.raises(CodegenError):
        compile_ir(many.replace("define", "nonsense"), HOST)
    assert compile_ir(few, HOST) == before[0]


def test_code_of_many_addresses_is_right() -> None:
    k = rows(MANY_ADDRESSES)
    x, y = np.random.default_rng(0).standard_normal((40, MANY_ADDRESSES), np.float32), np.zeros((40, MANY_ADDRESSES), np.float32)
    compile_kernel(k)(x, y)
    np.testing.assert_array_equal(y, x + x[:, :1])
    assert "ret" in assembly(emit_kernel(k, HOST), HOST)
