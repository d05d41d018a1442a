"""What of the thread pool depends on the processor, under Linux: system calls, a pause, the clock, the floating-point mode."""

from __future__ import annotations

from typing import NamedTuple


class Processor(NamedTuple):
    """Numbers of system calls, and LLVM IR."""

    futex: int
    prctl: int
    sigprocmask: int
    gettid: int
    pause: str  # an instruction that takes 10 to 60 ns
    functions: str  # `clock`, in ticks; `spin_ticks`, those of 50 us; `get_mode` and `set_mode` of floating point


_X86_64 = """\
declare void @llvm.x86.sse2.pause()
declare i64 @llvm.readcyclecounter()
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)

define internal i64 @clock() alwaysinline {
  %now = call i64 @llvm.readcyclecounter()
  ret i64 %now
}
define internal i64 @spin_ticks() alwaysinline {
  %ticks = add i64 0, 150000  ; the time-stamp counter runs at 2 to 5 GHz
  ret i64 %ticks
}
define internal i64 @get_mode() alwaysinline {
  %word = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %word)
  %all = load i32, ptr %word
  %control = and i32 %all, -64  ; the low six bits of MXCSR are sticky exception flags
  %mode = zext i32 %control to i64
  ret i64 %mode
}
define internal void @set_mode(i64 %mode) alwaysinline {
  %word = alloca i32
  %low = trunc i64 %mode to i32
  store i32 %low, ptr %word
  call void @llvm.x86.sse.ldmxcsr(ptr %word)
  ret void
}"""
_AARCH64 = """\
declare void @llvm.aarch64.isb(i32)
declare i64 @llvm.read_volatile_register.i64(metadata)
declare i64 @llvm.aarch64.get.fpcr()
declare void @llvm.aarch64.set.fpcr(i64)

define internal i64 @clock() alwaysinline {
  %now = call i64 @llvm.read_volatile_register.i64(metadata !{!"CNTVCT_EL0"})
  ret i64 %now
}
define internal i64 @spin_ticks() alwaysinline {
  %hertz = call i64 @llvm.read_volatile_register.i64(metadata !{!"CNTFRQ_EL0"})
  %ticks = udiv i64 %hertz, 20000
  ret i64 %ticks
}
define internal i64 @get_mode() alwaysinline {
  %mode = call i64 @llvm.aarch64.get.fpcr()
  ret i64 %mode
}
define internal void @set_mode(i64 %mode) alwaysinline {
  call void @llvm.aarch64.set.fpcr(i64 %mode)
  ret void
}"""
_RISCV64 = """\
declare i64 @llvm.readsteadycounter()
declare i32 @llvm.get.rounding()
declare void @llvm.set.rounding(i32)

define internal i64 @clock() alwaysinline {
  %now = call i64 @llvm.readsteadycounter()
  ret i64 %now
}
define internal i64 @spin_ticks() alwaysinline {
  %ticks = add i64 0, 500  ; the timer runs at 10 MHz to 1 GHz, as programs are not told
  ret i64 %ticks
}
define internal i64 @get_mode() alwaysinline {
  %rounding = call i32 @llvm.get.rounding()
  %mode = sext i32 %rounding to i64
  ret i64 %mode
}
define internal void @set_mode(i64 %mode) alwaysinline {
  %rounding = trunc i64 %mode to i32
  call void @llvm.set.rounding(i32 %rounding)
  ret void
}"""
PROCESSORS = {
    "x86_64": Processor(202, 157, 14, 186, "call void @llvm.x86.sse2.pause()", _X86_64),
    "aarch64": Processor(98, 167, 135, 178, "call void @llvm.aarch64.isb(i32 15)", _AARCH64),  # `yield` is a no-op on most cores
    "riscv64": Processor(98, 167, 135, 178, "fence seq_cst", _RISCV64),
}
