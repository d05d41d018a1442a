"""10. A backend of your own: kernels as plain C, made into machine code by the C compiler of the system.

Run me:  python tutorials/10_a_backend.py

A new target is one page, a subclass of `tcomp.backends.Backend`. This one is for bring-up: it works wherever there is a C compiler,
each step can be read, and it is slow, since it computes one element after the other. `tests/backends` run operator tests on it.
"""

import itertools
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx

import tcomp
from tcomp.backends import Backend
from tcomp.backends.protocol import InPlacePairs, Versions
from tcomp.codegen.c import FLAGS, PRELUDE, CText, c_function
from tcomp.errors import CodegenError, TargetError
from tcomp.ir.expr import Expr, as_expr, substitute
from tcomp.ir.loops import Buffer, Kernel, hoist_temporaries
from tcomp.ir.program import Branch, Call, Copy, Program, Ref, Repeat, SetIndex, Step
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tcomp.schedules.knobs import Knobs
from tcomp.target import CpuTarget, Target

INCLUDE = Path(tcomp.__file__).parent / "runtime" / "include"  # tcomp.h is what the runtime wants of a model's code
MEMORIES = {"input": "inputs[{}]", "output": "outputs[{}]", "weights": "weights", "workspace": "workspace", "dims": "dims"}  # of a call
HELPERS = """static void *at(const void *base, long offset) { return (char *)base + offset; }
static int report(tcomp_call *call, int n) { call->index = outside.index; call->extent = outside.extent; return n; }"""


@dataclass(frozen=True)
class CBackend(Backend):
    """C for this machine, of one thread."""

    target: CpuTarget = field(default_factory=Target.host)
    compiler: str = "cc"
    stages = ("c",)

    # A kernel comes as plain loops, which is what they stay: a schedule without steps. `emit` makes their code: here, a C function.

    def schedule(self, kernel: Kernel, knobs: Knobs | None = None) -> tcomp.Schedule:
        return tcomp.Schedule(kernel)

    def emit(self, kernel: Kernel, trace: Sequence[object] = (), in_place: InPlacePairs = (), versions: Versions = ()) -> bytes:
        return c_function(kernel).encode()

    def listing(self, stage: str, schedule: tcomp.Schedule) -> str:
        return c_function(hoist_temporaries(schedule.kernel)[0]) if stage in self.stages else super().listing(stage, schedule)

    # An artifact holds one shared object: the kernels, and the functions through which the runtime runs them.

    def link(self, program: Program, kernels: Mapping[str, bytes]) -> bytes:
        return self.compiled('#include <string.h>\n#include "tcomp.h"', HELPERS, *(k.decode() for k in kernels.values()), *entry(program))

    def link_kernel(self, kernel: Kernel, sizes: Mapping[Expr, int]) -> bytes:
        """One function that takes (call, buffers, scalars), for the tuner."""
        buffers, scalars = [f"b{n}" for n in range(len(kernel.buffers))], [f"s{n}" for n in range(len(kernel.scalars))]
        parameters = ", ".join(["void *call", *(f"void *{b}" for b in buffers), *(f"long {s}" for s in scalars)])
        call = f"void {kernel.name}({parameters}) {{ loops({', '.join([*scalars, *buffers])}); }}"
        return self.compiled(c_function(replace(kernel, name="loops")), call)

    def compiled(self, *parts: str) -> bytes:
        if shutil.which(self.compiler) is None:
            raise TargetError(f"there is no C compiler `{self.compiler}`", hint="install gcc or clang")
        with TemporaryDirectory() as folder:
            source, library = Path(folder, "model.c"), Path(folder, "model.so")
            source.write_text("\n".join([PRELUDE, *parts]))
            command = [self.compiler, "-O1", *FLAGS, "-w", f"-I{INCLUDE}", "-shared", "-fPIC", str(source), "-o", str(library), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise CodegenError("the C compiler refuses the code", why=done.stderr)
            return library.read_bytes()


def entry(program: Program) -> tuple[str, str]:
    """The two functions of tcomp.h, from the host program: what runs when, on which memory. Symbolic dims are elements of an array, and
    kernels may write it. A kernel that finds a value out of range ends the run."""
    buffer = Buffer("dims", "int64", (len(program.dims),))
    dims = {d: buffer[n] for n, d in enumerate(program.dims)}
    run, plan, calls = CText(), CText(), itertools.count(1)  # numbers of messages

    def size(e: int | Expr) -> str:
        return run.value(substitute(as_expr(e), dims))

    def place(ref: Ref) -> str:
        return f"at(call->{MEMORIES[ref.base].format(ref.index)}, {size(ref.offset)})"

    def steps(some: Iterable[Step]) -> None:
        for step in some:
            match step:
                case Call(symbol, buffers, scalars):
                    run.line(f"{symbol}({', '.join([*map(size, scalars), *map(place, buffers)])});")
                    run.line(f"if (outside.status) return report(call, {next(calls)});")
                case Branch(cond, then, otherwise):
                    with run.braces(f"if (*(char *){place(cond)})"):
                        steps(then)
                    with run.braces("else"):
                        steps(otherwise)
                case Repeat(var, trips, body, condition):
                    name, end = run.name(var.name), run.fresh("end")
                    with run.braces(f"for (long {name} = 0, {end} = {size(trips)}; {name} < {end}; {name}++)"):
                        steps(body)
                        if condition is not None:
                            run.line(f"if (!*(char *){place(condition)}) break;")
                case Copy(dst, src, count):
                    run.line(f"memcpy({place(dst)}, {place(src)}, {size(count)});")
                case SetIndex(dst, value):
                    run.line(f"*(long *){place(dst)} = {size(value)};")

    with run.braces("int tcomp_run(tcomp_call *call)"):
        run.line("long *dims = call->dims; outside.status = 0;")
        steps(program.steps)
        run.line("return 0;")

    with plan.braces("void tcomp_plan(const long *dims, long *sizes)"):
        for n, e in enumerate([program.workspace, *(d for shape in program.output_shapes for d in shape)]):
            plan.line(f"sizes[{n}] = {plan.value(substitute(as_expr(e), dims))};")
        for e in program.sizes:
            plan.line(f"if ({plan.value(substitute(as_expr(e), dims))} < 0) sizes[0] = -1;")
    return "\n".join(run.lines), "\n".join(plan.lines)


# That is the backend. It is a target like others: for a model in which the number of rows is not known,
if __name__ == "__main__":
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 20]>
        two_layers (float[n, 8] x, float[8, 16] A, float[16, 4] B) => (float[n, 4] y) {
            h = MatMul(x, A)
            r = Gelu(h)
            z = MatMul(r, B)
            y = Softmax(z)
        }""")
    rng, shapes = np.random.default_rng(0), {"x": (5, 8), "A": (8, 16), "B": (16, 4)}
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    artifact, report = compile_model(model, CompileOptions(target=CBackend(), emit=("c",)))
    print(report.stages["c"])

    # the artifact is loaded and run like that of any CPU, and computes what the default backend computes.
    scalar, default = tcomp.Module(artifact).run(arrays)["y"], tcomp.compile(model).run(arrays)["y"]
    np.testing.assert_allclose(scalar, default, rtol=1e-5)
    print("plain C computes the same")
