"""Tiny models made of hand-written LLVM IR, for tests of the runtime alone."""

from __future__ import annotations

import copy
import platform
import tempfile
from typing import Any

import numpy as np

from tcomp.codegen.elf.linker import link
from tcomp.codegen.llvm import machine_code
from tcomp.codegen.llvm.thread_pool import EXPORTS, IMPORTS, pool_ir
from tcomp.runtime import write_artifact
from tcomp.target import CpuTarget

HOST = CpuTarget.parse(f"cpu -march={platform.machine()}")
TRIPLE = HOST.triple


def compile_ir(ir: str) -> bytes:
    return machine_code.compile_ir(ir, HOST)


def _kernel(name: str, expression: str) -> str:
    """A parallel kernel: for each i in [begin, end): out[i] = f(a[i], b[i % 4]), closure = {a, b, out}."""
    return f"""
define void @{name}(ptr %closure, i64 %begin, i64 %end) {{
entry:
  %a = load ptr, ptr %closure
  %b.at = getelementptr ptr, ptr %closure, i64 1
  %b = load ptr, ptr %b.at
  %o.at = getelementptr ptr, ptr %closure, i64 2
  %o = load ptr, ptr %o.at
  %any = icmp slt i64 %begin, %end
  br i1 %any, label %loop, label %done
loop:
  %i = phi i64 [ %begin, %entry ], [ %i.next, %loop ]
  %x.at = getelementptr float, ptr %a, i64 %i
  %x = load float, ptr %x.at
  %j = and i64 %i, 3
  %y.at = getelementptr float, ptr %b, i64 %j
  %y = load float, ptr %y.at
  %s = load float, ptr %b
  %z = {expression}
  %z.at = getelementptr float, ptr %o, i64 %i
  store float %z, ptr %z.at
  %i.next = add i64 %i, 1
  %more = icmp slt i64 %i.next, %end
  br i1 %more, label %loop, label %done
done:
  ret void
}}"""


# y[n, 4] = s * x[n, 4] + w[4], in two regions through the workspace.
AFFINE_KERNELS = (_kernel("scale", "fmul float %x, %s"), _kernel("shift", "fadd float %x, %y"))
AFFINE_MAIN = """
declare void @scale(ptr, i64, i64)
declare void @shift(ptr, i64, i64)

define internal void @region(ptr %pool, ptr %body, ptr %closure, i64 %extent) noinline {
  %none = icmp eq ptr %pool, null
  br i1 %none, label %alone, label %together
alone:
  call void %body(ptr %closure, i64 0, i64 %extent)
  ret void
together:
  %parallel_for = load ptr, ptr %pool
  call void %parallel_for(ptr %pool, ptr %body, ptr %closure, i64 %extent)
  ret void
}

define i32 @tcomp_run(ptr %call) {
  %c = alloca [3 x ptr]
  %c1 = getelementptr ptr, ptr %c, i64 1
  %c2 = getelementptr ptr, ptr %c, i64 2
  %fields = load { ptr, ptr, ptr, ptr, ptr, ptr }, ptr %call
  %inputs = extractvalue { ptr, ptr, ptr, ptr, ptr, ptr } %fields, 0
  %outputs = extractvalue { ptr, ptr, ptr, ptr, ptr, ptr } %fields, 1
  %weights = extractvalue { ptr, ptr, ptr, ptr, ptr, ptr } %fields, 2
  %work = extractvalue { ptr, ptr, ptr, ptr, ptr, ptr } %fields, 3
  %dims = extractvalue { ptr, ptr, ptr, ptr, ptr, ptr } %fields, 4
  %pool = extractvalue { ptr, ptr, ptr, ptr, ptr, ptr } %fields, 5
  %x = load ptr, ptr %inputs
  %s.at = getelementptr ptr, ptr %inputs, i64 1
  %s = load ptr, ptr %s.at
  %y = load ptr, ptr %outputs
  %n = load i64, ptr %dims
  %extent = shl i64 %n, 2
  store ptr %x, ptr %c
  store ptr %s, ptr %c1
  store ptr %work, ptr %c2
  call void @region(ptr %pool, ptr @scale_, ptr %c, i64 %extent)
  store ptr %work, ptr %c
  store ptr %weights, ptr %c1
  store ptr %y, ptr %c2
  call void @region(ptr %pool, ptr @shift, ptr %c, i64 %extent)
  ret i32 0
}

; `scale` reads b[i % 4], but s has one element: copy it to four.
define internal void @scale_(ptr %closure, i64 %begin, i64 %end) {
  %four = alloca [4 x float]
  %c = alloca [3 x ptr]
  %a = load ptr, ptr %closure
  %b.at = getelementptr ptr, ptr %closure, i64 1
  %b = load ptr, ptr %b.at
  %o.at = getelementptr ptr, ptr %closure, i64 2
  %o = load ptr, ptr %o.at
  %s = load float, ptr %b
  %v0 = insertelement <4 x float> poison, float %s, i32 0
  %v = shufflevector <4 x float> %v0, <4 x float> poison, <4 x i32> zeroinitializer
  store <4 x float> %v, ptr %four, align 4
  store ptr %a, ptr %c
  %c1 = getelementptr ptr, ptr %c, i64 1
  store ptr %four, ptr %c1
  %c2 = getelementptr ptr, ptr %c, i64 2
  store ptr %o, ptr %c2
  call void @scale(ptr %c, i64 %begin, i64 %end)
  ret void
}

define void @tcomp_plan(ptr %dims, ptr %sizes) {
  %n = load i64, ptr %dims
  %bytes = shl i64 %n, 4
  store i64 %bytes, ptr %sizes
  %rows = getelementptr i64, ptr %sizes, i64 1
  store i64 %n, ptr %rows
  %columns = getelementptr i64, ptr %sizes, i64 2
  store i64 4, ptr %columns
  ret void
}
"""

# positive[2, m] = row 0: the positive elements of x[n]; row 1: their negatives; m is data-dependent. A NaN is error 1.
FILTER = """
define i32 @tcomp_run(ptr %call) {
entry:
  %fields = load { ptr, ptr, ptr, ptr, ptr, ptr }, ptr %call
  %inputs = extractvalue { ptr, ptr, ptr, ptr, ptr, ptr } %fields, 0
  %outputs = extractvalue { ptr, ptr, ptr, ptr, ptr, ptr } %fields, 1
  %dims = extractvalue { ptr, ptr, ptr, ptr, ptr, ptr } %fields, 4
  %x = load ptr, ptr %inputs
  %out = load ptr, ptr %outputs
  %n = load i64, ptr %dims
  %m.at = getelementptr i64, ptr %dims, i64 1
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %i.next, %next ]
  %m = phi i64 [ 0, %entry ], [ %m.next, %next ]
  %more = icmp slt i64 %i, %n
  br i1 %more, label %body, label %end
body:
  %v.at = getelementptr float, ptr %x, i64 %i
  %v = load float, ptr %v.at
  %nan = fcmp uno float %v, %v
  br i1 %nan, label %bad, label %test
test:
  %positive = fcmp ogt float %v, 0.0
  br i1 %positive, label %keep, label %next
keep:
  %o.at = getelementptr float, ptr %out, i64 %m
  store float %v, ptr %o.at
  %m.more = add i64 %m, 1
  br label %next
next:
  %m.next = phi i64 [ %m, %test ], [ %m.more, %keep ]
  %i.next = add i64 %i, 1
  br label %head
end:
  store i64 %m, ptr %m.at
  %row = getelementptr float, ptr %out, i64 %m
  br label %second
second:
  %j = phi i64 [ 0, %end ], [ %j.next, %negate ]
  %left = icmp slt i64 %j, %m
  br i1 %left, label %negate, label %done
negate:
  %q.at = getelementptr float, ptr %out, i64 %j
  %q = load float, ptr %q.at
  %negative = fneg float %q
  %p.at = getelementptr float, ptr %row, i64 %j
  store float %negative, ptr %p.at
  %j.next = add i64 %j, 1
  br label %second
done:
  ret i32 0
bad:
  ret i32 1
}

define void @tcomp_plan(ptr %dims, ptr %sizes) {
  %n = load i64, ptr %dims
  %m.at = getelementptr i64, ptr %dims, i64 1
  %m = load i64, ptr %m.at
  %unknown = icmp slt i64 %m, 0
  %most = select i1 %unknown, i64 %n, i64 %m
  store i64 0, ptr %sizes
  %a = getelementptr i64, ptr %sizes, i64 1
  store i64 2, ptr %a
  %b = getelementptr i64, ptr %sizes, i64 2
  store i64 %most, ptr %b
  ret void
}
"""

W = np.array([0.5, -1.0, 2.0, 4.0], np.float32)
_COMMON: dict[str, Any] = {"producer": "tests", "triple": TRIPLE, "cpu": "generic", "features": [], "threads": 2, "errors": [], "notes": {}}
AFFINE_MANIFEST: dict[str, Any] = {
    **_COMMON,
    "inputs": [{"name": "x", "dtype": "float32", "shape": ["n", 4]}, {"name": "s", "dtype": "float32", "shape": []}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": ["n", 4]}],
    "dims": [{"name": "n", "min": 0, "max": 4000000, "data_dependent": False}],
}
FILTER_MANIFEST: dict[str, Any] = {
    **_COMMON,
    "threads": 1,
    "inputs": [{"name": "x", "dtype": "float32", "shape": ["n"]}],
    "outputs": [{"name": "positive", "dtype": "float32", "shape": [2, "m"]}],
    "dims": [{"name": "n", "min": 1, "max": None, "data_dependent": False}, {"name": "m", "min": 0, "max": None, "data_dependent": True}],
    "errors": ["NaN in x"],
}


def affine_objects(shift: str = "fadd") -> list[bytes]:
    return [compile_ir(pool_ir(TRIPLE)), compile_ir(AFFINE_MAIN), *(compile_ir(kernel.replace("fadd", shift)) for kernel in AFFINE_KERNELS)]


def affine_code(shift: str = "fadd") -> bytes:
    """Other code with another instruction for the sum."""
    return link(affine_objects(shift), ["tcomp_run", "tcomp_plan", *EXPORTS], imports=IMPORTS)


def filter_code() -> bytes:
    return link([compile_ir(FILTER)], ["tcomp_run", "tcomp_plan"])


def packed(code: bytes, manifest: dict[str, Any], weights: list[tuple[str, Any]], **changes: Any) -> bytes:
    """The bytes of an artifact; `changes` replace entries of the manifest."""
    with tempfile.TemporaryFile() as file:
        write_artifact(file, code, weights, {**copy.deepcopy(manifest), **changes})
        return file.read()
