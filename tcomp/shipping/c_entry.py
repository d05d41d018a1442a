"""The functions of a C package, as LLVM IR: what they check, how they find memory, and which entry of the model they call.

A model in C is a structure of 64-bit words, all zero at first: the caller's arena and its size, index and extent of the last access out of
range, then words of the library alone: the `tcomp_call` of the run (include/tcomp.h), memory and weights of its own, the thread pool.
"""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.runtime.workspace import HUGE_PAGE
from tcomp.shipping.c_interface import CODES, FIRST_OWN, CInterface

_CALL = ("inputs", "outputs", "weights", "workspace", "dims", "pool", "status", "call_index", "call_extent")  # tcomp_call
PUBLIC = ("arena", "arena_bytes", "index", "extent")
PRIVATE = (*_CALL, "own", "own_bytes", "mapped", "mapped_bytes", "threads")
_WORDS = {name: n for n, name in enumerate((*PUBLIC, *PRIVATE))}
_CODE = {name: n for n, (name, _) in enumerate(CODES)}
SLACK = 64  # bytes of an arena beyond what the model needs, since it may begin anywhere
_HUGE = 14  # MADV_HUGEPAGE of Linux
WEIGHTS = "tcomp_weights"  # the symbol of weights inside the library

LIBRARY = {
    "aligned_alloc": "ptr (i64, i64)", "free": "void (ptr)", "open": "i32 (ptr, i32, ...)", "close": "i32 (i32)",
    "lseek": "i64 (i32, i64, i32)", "mmap": "ptr (ptr, i64, i32, i32, i32, i64)", "munmap": "i32 (ptr, i64)",
    "madvise": "i32 (ptr, i64, i32)",
}  # fmt: skip
_MODEL = {
    "tcomp_run": "i32 (ptr)", "tcomp_plan": "void (ptr, ptr)", "tcomp_bind": "i32 (ptr, ptr)", "tcomp_pool_create": "ptr (i32, ptr)",
    "tcomp_pool_destroy": "void (ptr)", "tcomp_pool_forget": "void (ptr)",
}  # fmt: skip


def entry_ir(c: CInterface, open_flags: int = 0x80000) -> str:
    """The module with the functions `c.exports`. `open_flags` are O_RDONLY | O_CLOEXEC of the system (default: Linux)."""
    parts = [_messages(c), _plan(c), _run(c), _stop(c), _free(c)]
    parts += [_shapes(c), _arena_bytes(c)] if c.free else []
    parts += [_threads(c)] if c.threaded else []
    parts += [_open(c, open_flags)] if c.beside else []
    text = "\n".join(parts)
    declared = [f"declare {kind.replace(' (', f' @{name}(', 1)}" for name, kind in (LIBRARY | _MODEL).items() if f"@{name}(" in text]
    weights = [] if c.beside or not c.weights else [f"@{WEIGHTS} = external hidden constant i8"]
    return "\n".join([*weights, *declared, text, 'attributes #0 = { nounwind "no-builtins" }', ""])


def _field(name: str, label: str = "") -> str:
    """IR of the address of a word of the model, as `%NAME.at`."""
    return f"  %{label or name}.at = getelementptr i64, ptr %model, i64 {_WORDS[name]}"


def _get(name: str, kind: str = "ptr") -> str:
    return f"{_field(name)}\n  %{name} = load {kind}, ptr %{name}.at"


def _set(name: str, value: str, label: str) -> str:
    """`label` tells this address from others of the same word."""
    return f"{_field(name, label)}\n  store {value}, ptr %{label}.at"


def _messages(c: CInterface) -> str:
    strings, entries = [], []
    for n in range(max(c.messages) + 1):
        if n not in c.messages:
            entries.append("ptr @message.unknown")
            continue
        strings.append(_string(f"message.{n}", c.messages[n]))
        entries.append(f"ptr @message.{n}")
    count = len(entries)
    return "\n".join([*strings, _string("message.unknown", "unknown status"), f"""\
@messages = internal constant [{count} x ptr] [{", ".join(entries)}]
define ptr @{c.name}_message(i32 %status) #0 {{
  %known = icmp ult i32 %status, {count}
  br i1 %known, label %listed, label %other
listed:
  %number = zext i32 %status to i64
  %at = getelementptr [{count} x ptr], ptr @messages, i64 0, i64 %number
  %text = load ptr, ptr %at
  ret ptr %text
other:
  ret ptr @message.unknown
}}"""])  # fmt: skip


def _string(name: str, text: str) -> str:
    content = (text.replace("\0", "").encode() + b"\0").hex("\\")
    return f'@{name} = internal constant [{len(content) // 3 + 1} x i8] c"\\{content}"'


def _plan(c: CInterface) -> str:
    """`plan(inputs, dims, sizes)`: the status; checks the given dims, computes those that values give, then the sizes."""
    lines = ["define internal i32 @plan(ptr %inputs, ptr %dims, ptr %sizes) #0 {"]
    for name, n, d in c.sizes:
        lines += [f"  %d{n}.at = getelementptr i64, ptr %dims, i64 {n}", f"  %d{n} = load i64, ptr %d{n}.at"]
        lines += [
            f"  %d{n}.low = icmp slt i64 %d{n}, {d.min}",
            f"  %d{n}.high = icmp sgt i64 %d{n}, {(1 << 62) if d.max is None else d.max}",
        ]
        lines += [f"  %d{n}.bad = or i1 %d{n}.low, %d{n}.high", f"  br i1 %d{n}.bad, label %bad{n}, label %good{n}"]
        lines += [f"bad{n}:  ; {name.encode('ascii', 'replace').decode()}", f"  ret i32 {FIRST_OWN + n}", f"good{n}:"]
    if c.binds:
        lines += ["  %refused = call i32 @tcomp_bind(ptr %inputs, ptr %dims)", "  %bound = icmp eq i32 %refused, 0"]
        lines += ["  br i1 %bound, label %planning, label %unbound", "unbound:", f"  %dim = add i32 %refused, {FIRST_OWN - 1}"]
        lines += ["  ret i32 %dim", "planning:"]
    return "\n".join([*lines, f"""\
  call void @tcomp_plan(ptr %dims, ptr %sizes)
  %bytes = load i64, ptr %sizes
  %right = icmp sge i64 %bytes, 0
  br i1 %right, label %done, label %wrong
done:
  ret i32 0
wrong:
  %negated = sub i64 0, %bytes
  %reason = trunc i64 %negated to i32
  %general = icmp sle i32 %reason, 2
  %code = add i32 %reason, {_CODE["TOO_SMALL"] - 1}
  %check = add i32 %reason, {c.first_check - 3}
  %status = select i1 %general, i32 %code, i32 %check
  ret i32 %status
}}"""])  # fmt: skip


def _arrays(c: CInterface, given: Sequence[str]) -> list[str]:
    """IR that makes the arrays of inputs (those `given`, or none), dims and sizes, on the stack."""
    extents = 1 + sum(len(t.spec.shape) for t in c.outputs)
    lines = [f"  %inputs = alloca [{max(1, len(c.inputs))} x ptr]", f"  %dims = alloca [{max(1, len(c.manifest.dims))} x i64]"]
    lines += [f"  %sizes = alloca [{extents} x i64]"]
    for n, t in enumerate(c.inputs):
        value = f"%in.{t.name}" if t.name in given else "null"
        lines += [f"  %in{n}.at = getelementptr ptr, ptr %inputs, i64 {n}", f"  store ptr {value}, ptr %in{n}.at"]
    named = {n: name for name, n, _ in c.sizes}
    for n, d in enumerate(c.manifest.dims):
        value = f"%size.{named[n]}" if n in named else "-1" if d.data_dependent else "0"
        lines += [f"  %dim{n}.at = getelementptr i64, ptr %dims, i64 {n}", f"  store i64 {value}, ptr %dim{n}.at"]
    return lines


def _unless_null(pointers: Sequence[str], result: str) -> list[str]:
    """IR that returns if one of these pointers is NULL."""
    lines, last = [], "false"
    for n, pointer in enumerate(pointers):
        lines += [f"  %null{n} = icmp eq ptr {pointer}, null", f"  %any{n} = or i1 {last}, %null{n}"]
        last = f"%any{n}"
    return [*lines, f"  br i1 {last}, label %missing, label %complete", "missing:", f"  ret {result}", "complete:"]


def _extents(c: CInterface, wanted: Sequence[str], label: str) -> list[str]:
    """IR that copies the extents of these outputs out of `%sizes`, where the pointer for them is not NULL."""
    lines, at = [], 1
    for t in c.outputs:
        if t.name in wanted and t.spec.shape:
            shape, here = f"%shape.{t.name}", f"{label}.{t.name}"
            lines += [f"  %{here}.none = icmp eq ptr {shape}, null", f"  br i1 %{here}.none, label %{here}.after, label %{here}.copy"]
            lines += [f"{here}.copy:"]
            for axis in range(len(t.spec.shape)):
                lines += [f"  %{here}.from{axis} = getelementptr i64, ptr %sizes, i64 {at + axis}"]
                lines += [f"  %{here}.v{axis} = load i64, ptr %{here}.from{axis}"]
                lines += [f"  %{here}.to{axis} = getelementptr i64, ptr {shape}, i64 {axis}"]
                lines += [f"  store i64 %{here}.v{axis}, ptr %{here}.to{axis}"]
            lines += [f"  br label %{here}.after", f"{here}.after:"]
        at += len(t.spec.shape)
    return lines


def _run(c: CInterface) -> str:
    inputs, outputs = [f"%in.{t.name}" for t in c.inputs], [f"%out.{t.name}" for t in c.outputs]
    arguments = ["ptr %model", *(f"i64 %size.{name}" for name, _, _ in c.sizes), *(f"ptr {v}" for v in inputs)]
    for t in c.outputs:
        arguments += [f"ptr %out.{t.name}", *[f"ptr %shape.{t.name}"] * t.counted]
    lines = [f"define i32 @{c.name}_run({', '.join(arguments)}) #0 {{", *_arrays(c, [t.name for t in c.inputs])]
    lines += [f"  %outputs = alloca [{max(1, len(outputs))} x ptr]"]
    for n, value in enumerate(outputs):
        lines += [f"  %out{n}.at = getelementptr ptr, ptr %outputs, i64 {n}", f"  store ptr {value}, ptr %out{n}.at"]
    lines += _unless_null(["%model", *inputs, *outputs], f"i32 {_CODE['NULL_POINTER']}")
    lines += [
        """\
  %planned = call i32 @plan(ptr %inputs, ptr %dims, ptr %sizes)
  %fits = icmp eq i32 %planned, 0
  br i1 %fits, label %weighing, label %refused
refused:
  ret i32 %planned
weighing:"""
    ]
    if c.beside and c.weights:
        lines += [_get("mapped"), "  %unloaded = icmp eq ptr %mapped, null", "  br i1 %unloaded, label %weightless, label %placing"]
        lines += ["weightless:", f"  ret i32 {_CODE['NO_WEIGHTS']}"]
        weights = "%mapped"
    else:
        lines += ["  br label %placing"]
        weights = f"@{WEIGHTS}" if c.weights else "null"
    lines += [f"""\
placing:
  %bytes = load i64, ptr %sizes
{_get("arena")}
  %owned = icmp eq ptr %arena, null
  br i1 %owned, label %owning, label %given
given:
{_get("arena_bytes", "i64")}
  %begin = ptrtoint ptr %arena to i64
  %up = add i64 %begin, 63
  %aligned = and i64 %up, -64
  %skipped = sub i64 %aligned, %begin
  %left = sub i64 %arena_bytes, %skipped
  %enough = icmp sle i64 %bytes, %left
  %at = getelementptr i8, ptr %arena, i64 %skipped
  br i1 %enough, label %running, label %small
small:
  ret i32 {_CODE["ARENA_TOO_SMALL"]}
owning:
{_get("own")}
{_get("own_bytes", "i64")}
  %kept = icmp sle i64 %bytes, %own_bytes
  br i1 %kept, label %running, label %growing
growing:
  call void @free(ptr %own)
  %large = icmp sge i64 %bytes, {2 * HUGE_PAGE}
  %unit = select i1 %large, i64 {HUGE_PAGE}, i64 64
  %last = sub i64 %unit, 1
  %mask = sub i64 0, %unit
  %more = add i64 %bytes, %last
  %rounded = and i64 %more, %mask
  %new = call ptr @aligned_alloc(i64 %unit, i64 %rounded)
  %failed = icmp eq ptr %new, null
  %advised = select i1 %large, i64 %rounded, i64 0  ; a kernel without huge pages is only slower
  %asked = call i32 @madvise(ptr %new, i64 %advised, i32 {_HUGE})
  %new_bytes = select i1 %failed, i64 0, i64 %rounded
  store ptr %new, ptr %own.at
  store i64 %new_bytes, ptr %own_bytes.at
  br i1 %failed, label %starved, label %running
starved:
  ret i32 {_CODE["NO_MEMORY"]}
running:
  %workspace = phi ptr [ %at, %given ], [ %own, %owning ], [ %new, %growing ]
{_get("threads")}
{_set("inputs", "ptr %inputs", "c0")}
{_set("outputs", "ptr %outputs", "c1")}
{_set("weights", f"ptr {weights}", "c2")}
{_set("workspace", "ptr %workspace", "c3")}
{_set("dims", "ptr %dims", "c4")}
{_set("pool", "ptr %threads", "c5")}
{_field("status")}
  store atomic i64 0, ptr %status.at monotonic, align 8
{_set("call_index", "i64 0", "c7")}
{_set("call_extent", "i64 0", "c8")}
  %result = call i32 @tcomp_run(ptr %c0.at)
  %index = load i64, ptr %c7.at
  %extent = load i64, ptr %c8.at
{_set("index", "i64 %index", "p0")}
{_set("extent", "i64 %extent", "p1")}
  switch i32 %result, label %error [ i32 0, label %ran i32 -1, label %stopped ]
stopped:
  ret i32 {_CODE["STOPPED"]}
error:
  %code = add i32 %result, {c.first_error - 1}
  ret i32 %code
ran:"""]  # fmt: skip
    if any(t.counted for t in c.outputs):
        lines += ["  call void @tcomp_plan(ptr %dims, ptr %sizes)", *_extents(c, [t.name for t in c.outputs if t.counted], "true")]
    return "\n".join([*lines, "  ret i32 0", "}"])


def _sized(c: CInterface) -> tuple[list[str], list[str], list[str]]:
    """Arguments, arrays and checks of functions that only ask for sizes."""
    deciding = [t.name for t in c.deciding]
    arguments = [*(f"i64 %size.{name}" for name, _, _ in c.sizes), *(f"ptr %in.{name}" for name in deciding)]
    return arguments, _arrays(c, deciding), [f"%in.{name}" for name in deciding]


def _shapes(c: CInterface) -> str:
    arguments, arrays, pointers = _sized(c)
    arguments += [f"ptr %shape.{t.name}" for t in c.outputs if t.spec.shape]
    lines = [f"define i32 @{c.name}_shapes({', '.join(arguments)}) #0 {{", *arrays]
    lines += _unless_null(pointers, f"i32 {_CODE['NULL_POINTER']}")
    lines += ["  %status = call i32 @plan(ptr %inputs, ptr %dims, ptr %sizes)", "  %fits = icmp eq i32 %status, 0"]
    lines += ["  br i1 %fits, label %planned, label %refused", "refused:", "  ret i32 %status", "planned:"]
    return "\n".join([*lines, *_extents(c, [t.name for t in c.outputs], "planned"), "  ret i32 0", "}"])


def _arena_bytes(c: CInterface) -> str:
    arguments, arrays, pointers = _sized(c)
    lines = [f"define i64 @{c.name}_arena_bytes({', '.join(arguments)}) #0 {{", *arrays]
    lines += _unless_null(pointers, f"i64 -{_CODE['NULL_POINTER']}")
    return "\n".join([*lines, f"""\
  %status = call i32 @plan(ptr %inputs, ptr %dims, ptr %sizes)
  %fits = icmp eq i32 %status, 0
  %bytes = load i64, ptr %sizes
  %needed = add i64 %bytes, {SLACK}
  %code = sext i32 %status to i64
  %negative = sub i64 0, %code
  %result = select i1 %fits, i64 %needed, i64 %negative
  ret i64 %result
}}"""])  # fmt: skip


def _stop(c: CInterface) -> str:
    return f"""\
define void @{c.name}_stop(ptr %model) #0 {{
{_field("status")}
  store atomic i64 -1, ptr %status.at monotonic, align 8
  ret void
}}"""


def _free(c: CInterface) -> str:
    lines = [f"define void @{c.name}_free(ptr %model) #0 {{", "  %none = icmp eq ptr %model, null"]
    lines += ["  br i1 %none, label %done, label %some", "done:", "  ret void", "some:", _get("own"), "  call void @free(ptr %own)"]
    if c.threaded:
        lines += [_get("threads"), "  call void @tcomp_pool_destroy(ptr %threads)", "  store ptr null, ptr %threads.at"]
    if c.beside:
        lines += [_get("mapped"), _get("mapped_bytes", "i64"), "  %unmapped = call i32 @munmap(ptr %mapped, i64 %mapped_bytes)"]
        lines += ["  store ptr null, ptr %mapped.at", "  store i64 0, ptr %mapped_bytes.at"]
    return "\n".join([*lines, "  store ptr null, ptr %own.at", _set("own_bytes", "i64 0", "none"), "  ret void", "}"])


def _threads(c: CInterface) -> str:
    return f"""\
define i32 @{c.name}_set_threads(ptr %model, i32 %count) #0 {{
  %missing = icmp eq ptr %model, null
  br i1 %missing, label %null, label %some
null:
  ret i32 {_CODE["NULL_POINTER"]}
some:
  %less = sub i32 %count, 1
  %right = icmp ult i32 %less, 4096
  br i1 %right, label %replace, label %wrong
wrong:
  ret i32 {_CODE["BAD_THREADS"]}
replace:
{_get("threads")}
  call void @tcomp_pool_destroy(ptr %threads)
  store ptr null, ptr %threads.at
  %one = icmp eq i32 %count, 1
  br i1 %one, label %done, label %create
create:
  %new = call ptr @tcomp_pool_create(i32 %count, ptr null)
  store ptr %new, ptr %threads.at
  %failed = icmp eq ptr %new, null
  br i1 %failed, label %starved, label %done
starved:
  ret i32 {_CODE["NO_MEMORY"]}
done:
  ret i32 0
}}
define void @{c.name}_after_fork(ptr %model) #0 {{
{_get("threads")}
  %alone = icmp eq ptr %threads, null
  br i1 %alone, label %done, label %forget
forget:
  call void @tcomp_pool_forget(ptr %threads)
  br label %done
done:
  ret void
}}"""


def _open(c: CInterface, flags: int) -> str:
    """Maps the file with the weights: SEEK_END, PROT_READ and MAP_PRIVATE as on Linux and macOS."""
    return f"""\
define i32 @{c.name}_open(ptr %model, ptr %path) #0 {{
{chr(10).join(_unless_null(["%model", "%path"], f"i32 {_CODE['NULL_POINTER']}"))}
  %file = call i32 (ptr, i32, ...) @open(ptr %path, i32 {flags})
  %closed = icmp slt i32 %file, 0
  br i1 %closed, label %unreadable, label %opened
unreadable:
  ret i32 {_CODE["NO_WEIGHTS"]}
opened:
  %size = call i64 @lseek(i32 %file, i64 0, i32 2)
  %right = icmp eq i64 %size, {c.weights}
  br i1 %right, label %mapping, label %failed
mapping:
  %new = call ptr @mmap(ptr null, i64 %size, i32 1, i32 2, i32 %file, i64 0)
  %number = ptrtoint ptr %new to i64
  %refused = icmp eq i64 %number, -1
  br i1 %refused, label %failed, label %done
failed:
  %ignored = call i32 @close(i32 %file)
  ret i32 {_CODE["NO_WEIGHTS"]}
done:
  %shut = call i32 @close(i32 %file)
{_get("mapped")}
{_get("mapped_bytes", "i64")}
  %unmapped = call i32 @munmap(ptr %mapped, i64 %mapped_bytes)
  store ptr %new, ptr %mapped.at
  store i64 %size, ptr %mapped_bytes.at
  ret i32 0
}}"""
