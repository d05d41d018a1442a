"""The thread pool, as LLVM IR that is compiled for the target and linked into every multi-threaded model.

The caller of a parallel region splits it into contiguous chunks, writes one into the mailbox of each worker (128 bytes: a cache line and
its prefetched neighbour) and increments its `seq`; the worker runs the chunk and sets `done` to that. Both sides spin for 50 us, after the
first three offering their core to other threads, then sleep in the kernel on the word they watch (Dekker's protocol):

    sleeper:  flag := 1;  fence;  while word is old: futex_wait(word, old)
    waker:    word := new;  fence;  if flag: futex_wake(word)

One of the (sequentially consistent) fences comes first: then either the waker reads flag = 1, or the sleeper reads the new word. Between
that read and its sleep the kernel compares the word again. A stale flag costs a system call only. Words wrap around; they are compared
for equality. The floating-point mode of the caller travels with the chunk: otherwise results could depend on which thread computes them.

A process has one pool, which serves all models, also those linked with a copy of this code that is not used. A region takes the workers by
setting `busy`; where another one has them, it does not wait: its caller runs all of it, at once. So any number of threads may call, and
regions may nest. A caller sees the pool through a `%pool`, of which there may be many copies, each with its own number of threads; workers
are started by the first region that wants them, and stay until the pool is destroyed.
"""

from __future__ import annotations

from tcomp.codegen.llvm.events import EVENT_IR
from tcomp.codegen.llvm.pool_processors import PROCESSORS
from tcomp.errors import TargetError
from tcomp.platforms import ARCHITECTURES

VERSION = 2  # of what EXPORTS promise: of `tcomp_pool` in tcomp.h, and of who may call when; `tcomp.runtime.pool` knows the same
# What a model's shared object exports of the pool.
EXPORTS = ("tcomp_pool_create", "tcomp_pool_destroy", "tcomp_pool_forget", "tcomp_pool_version", "tcomp_pool_trace")
CAPACITY = 4096  # threads; their mailboxes take 512 KiB of addresses, and memory once they are used
RETRY = 1000  # parallel regions until the next attempt to start a thread, after the system has refused one
LIBRARY = {
    "aligned_alloc": "ptr (i64, i64)", "free": "void (ptr)", "pthread_create": "i32 (ptr, ptr, ptr, ptr)", "pthread_join": "i32 (i64, ptr)",
    "pthread_setaffinity_np": "i32 (i64, i64, ptr)", "sched_yield": "i32 ()", "syscall": "i64 (i64, ...)",
}  # fmt: skip
IMPORTS = tuple(LIBRARY)  # the libc functions that the pool calls: the `imports` of `codegen.elf.linker.link`

MAILBOX = {
    "seq": "i32", "done": "i32", "parked": "i32", "waiting": "i32", "body": "ptr", "closure": "ptr", "begin": "i64", "end": "i64",
    "mode": "i64", "thread": "i64",
}  # fmt: skip
_POST = """\
  %seq = load atomic i32, ptr %box monotonic, align 4
  %seq.next = add i32 %seq, 1
  store atomic i32 %seq.next, ptr %box release, align 4"""
_TEAM = """\
  %team.at = getelementptr %pool, ptr %pool, i64 0, i32 2
  %team = load ptr, ptr %team.at"""
_BUSY = "  %busy.at = getelementptr %team, ptr %team, i64 0, i32 2"
_RUNNING = "  %running.at = getelementptr %team, ptr %team, i64 0, i32 3"
_REFUSED = "  %refused.at = getelementptr %team, ptr %team, i64 0, i32 4"


def _box(name: str, number: str) -> str:
    return f"  %{name} = getelementptr %team, ptr %team, i64 0, i32 6, i64 %{number}"


def _at(box: str, *fields: str) -> str:
    """IR of the addresses of fields of a mailbox, as `%FIELD.at`."""
    return "\n".join(f"  %{f}.at = getelementptr %mailbox, ptr %{box}, i64 0, i32 {[*MAILBOX].index(f)}" for f in fields)


def _load(*fields: str) -> str:
    """IR of the values of fields, of which `_at` gave the addresses."""
    return "\n".join(f"  %{f} = load {MAILBOX[f]}, ptr %{f}.at" for f in fields)


def _store(**values: str) -> str:
    """IR that stores into fields of the mailbox `%box`."""
    return "\n".join(f"{_at('box', f)}\n  store {MAILBOX[f]} {value}, ptr %{f}.at" for f, value in values.items())


def pool_ir(triple: str) -> str:
    """The pool's LLVM IR for a Linux target triple such as `x86_64-unknown-linux-gnu`: it defines EXPORTS and needs IMPORTS, and is
    compiled with the relocation model `pic`. Raises TargetError for a processor without a pool."""
    name = triple.partition("-")[0]
    if (name := ARCHITECTURES.get(name, name)) not in PROCESSORS:
        raise TargetError(f"there is no thread pool for {triple!r}", hint=f"use 1 thread, or one of {', '.join(PROCESSORS)}")
    cpu = PROCESSORS[name]
    # All but ILL, TRAP, BUS, FPE and SEGV, which belong to the thread that causes them.
    blocked = (1 << 64) - 1 - sum(1 << signal - 1 for signal in (4, 5, 7, 8, 11))
    declarations = "\n".join(f"declare {t.replace('(', f'@{name}(', 1)}" for name, t in LIBRARY.items())
    return f"""\
target triple = "{triple}"

%mailbox = type {{ {", ".join(MAILBOX.values())}, [64 x i8] }}
;           0 parallel_for 1 threads, caller included 2 team
%pool = type {{ ptr, i32, ptr }}
;           2 busy 3 running, caller included 4 regions until a thread is started again, after one was refused
%team = type {{ %pool, [104 x i8], i32, i32, i32, [116 x i8], [0 x %mailbox] }}

%traced = type {{ %pool, ptr }}

@signals = internal constant i64 {blocked}
@name = internal constant [6 x i8] c"tcomp\\00"

{declarations}
{cpu.functions}

define internal void @futex_wait(ptr %word, i32 %old) noinline {{
  %r = call i64 (i64, ...) @syscall(i64 {cpu.futex}, ptr %word, i32 128, i32 %old, ptr null)
  ret void
}}

define internal void @futex_wake(ptr %word) noinline {{
  %r = call i64 (i64, ...) @syscall(i64 {cpu.futex}, ptr %word, i32 129, i32 1)
  ret void
}}

; Wait until *word differs from old, spinning first; *flag tells the other side that a wake-up is needed. Returns *word.
define internal i32 @await(ptr %word, ptr %flag, i32 %old) alwaysinline {{
entry:
  %start = call i64 @clock()
  %ticks = call i64 @spin_ticks()
  %patience = lshr i64 %ticks, 4
  br label %spin
spin:
  %early = load atomic i32, ptr %word acquire, align 4
  %changed = icmp ne i32 %early, %old
  br i1 %changed, label %spun, label %pause
pause:
  {cpu.pause}
  %now = call i64 @clock()
  %waited = sub i64 %now, %start
  %soon = icmp ult i64 %waited, %patience
  br i1 %soon, label %spin, label %yield
yield:
  %y = call i32 @sched_yield()
  %again = icmp ult i64 %waited, %ticks
  br i1 %again, label %spin, label %park
park:
  store atomic i32 1, ptr %flag seq_cst, align 4
  fence seq_cst
  br label %check
check:
  %late = load atomic i32, ptr %word acquire, align 4
  %woken = icmp ne i32 %late, %old
  br i1 %woken, label %unpark, label %sleep
sleep:
  call void @futex_wait(ptr %word, i32 %old)
  br label %check
unpark:
  store atomic i32 0, ptr %flag monotonic, align 4
  ret i32 %late
spun:
  ret i32 %early
}}

define internal void @wake_if(ptr %flag, ptr %word) alwaysinline {{
  %sleeps = load atomic i32, ptr %flag monotonic, align 4
  %needed = icmp ne i32 %sleeps, 0
  br i1 %needed, label %wake, label %end
wake:
  call void @futex_wake(ptr %word)
  br label %end
end:
  ret void
}}

define internal ptr @tcomp_pool_worker(ptr %box) {{
entry:
  %s = call i64 (i64, ...) @syscall(i64 {cpu.sigprocmask}, i32 2, ptr @signals, ptr null, i64 8)
  %n = call i64 (i64, ...) @syscall(i64 {cpu.prctl}, i32 15, ptr @name, i64 0, i64 0, i64 0)
{_at("box", *(f for f in MAILBOX if f not in ("seq", "thread")))}
  br label %wait
wait:
  %seen = phi i32 [ 0, %entry ], [ %seq, %finish ]
  %current = phi i64 [ -1, %entry ], [ %mode, %finish ]
  %seq = call i32 @await(ptr %box, ptr %parked.at, i32 %seen)
{_load("body")}
  %stop = icmp eq ptr %body, null
  br i1 %stop, label %exit, label %prepare
prepare:
{_load("closure", "begin", "end", "mode")}
  %same = icmp eq i64 %mode, %current
  br i1 %same, label %work, label %switch
switch:
  call void @set_mode(i64 %mode)
  br label %work
work:
  call void %body(ptr %closure, i64 %begin, i64 %end)
  br label %finish
finish:
  store atomic i32 %seq, ptr %done.at release, align 4
  fence seq_cst
  call void @wake_if(ptr %waiting.at, ptr %done.at)
  br label %wait
exit:
  ret ptr null
}}

define internal void @tcomp_pool_parallel_for(ptr %pool, ptr %body, ptr %closure, i64 %extent) {{
entry:
  %threads.at = getelementptr %pool, ptr %pool, i64 0, i32 1
  %threads = load i32, ptr %threads.at
  %most = sext i32 %threads to i64
  %fewer = icmp slt i64 %extent, %most
  %wanted = select i1 %fewer, i64 %extent, i64 %most
  %alone = icmp sle i64 %wanted, 1
  br i1 %alone, label %serial, label %take
serial:
  %empty = icmp sle i64 %extent, 0
  br i1 %empty, label %end, label %inline
inline:
  call void %body(ptr %closure, i64 0, i64 %extent)
  br label %end
take:
{_TEAM}
{_BUSY}
  %claim = cmpxchg ptr %busy.at, i32 0, i32 1 acquire monotonic
  %taken = extractvalue {{ i32, i1 }} %claim, 1
  br i1 %taken, label %count, label %serial
count:
{_RUNNING}
  %running32 = load i32, ptr %running.at
  %running = sext i32 %running32 to i64
  %enough = icmp sge i64 %running, %wanted
  br i1 %enough, label %fork, label %recruit
recruit:
  %target32 = trunc i64 %wanted to i32
  %started32 = call i32 @start(ptr %team, i32 %target32, ptr null)
  %started = sext i32 %started32 to i64
  %none = icmp sle i64 %started, 1
  br i1 %none, label %leave, label %fork
leave:
  store atomic i32 0, ptr %busy.at release, align 4
  br label %serial
fork:
  %chunks = phi i64 [ %wanted, %count ], [ %started, %recruit ]
  %base = udiv i64 %extent, %chunks
  %product = mul i64 %base, %chunks
  %extra = sub i64 %extent, %product
  %some = icmp ne i64 %extra, 0
  %one = zext i1 %some to i64
  %first = add i64 %base, %one
  %mode = call i64 @get_mode()
  br label %post
post:
  %i = phi i64 [ 1, %fork ], [ %i.next, %post ]
  %begin = phi i64 [ %first, %fork ], [ %stop, %post ]
  %longer = icmp ult i64 %i, %extra
  %more = zext i1 %longer to i64
  %size = add i64 %base, %more
  %stop = add i64 %begin, %size
  %slot = sub i64 %i, 1
{_box("box", "slot")}
{_store(body="%body", closure="%closure", begin="%begin", end="%stop", mode="%mode")}
{_POST}
  %i.next = add i64 %i, 1
  %posted = icmp eq i64 %i.next, %chunks
  br i1 %posted, label %fence, label %post
fence:
  fence seq_cst
  br label %wake
wake:
  %j = phi i64 [ 0, %fence ], [ %j.next, %wake ]
{_box("sleeper", "j")}
{_at("sleeper", "parked")}
  call void @wake_if(ptr %parked.at, ptr %sleeper)
  %j.next = add i64 %j, 1
  %woken = add i64 %j.next, 1
  %awake = icmp eq i64 %woken, %chunks
  br i1 %awake, label %own, label %wake
own:
  call void %body(ptr %closure, i64 0, i64 %first)
  br label %join
join:
  %k = phi i64 [ 0, %own ], [ %k.next, %join ]
{_box("worker", "k")}
{_at("worker", "done", "waiting")}
  %target = load atomic i32, ptr %worker monotonic, align 4
  %old = sub i32 %target, 1
  %now = call i32 @await(ptr %done.at, ptr %waiting.at, i32 %old)
  %k.next = add i64 %k, 1
  %joined = add i64 %k.next, 1
  %all = icmp eq i64 %joined, %chunks
  br i1 %all, label %release, label %join
release:
  store atomic i32 0, ptr %busy.at release, align 4
  br label %end
end:
  ret void
}}

{EVENT_IR}
define internal void @traced_body(ptr %closure, i64 %begin, i64 %end) {{
  %body = load ptr, ptr %closure
  %inner.at = getelementptr ptr, ptr %closure, i64 1
  %inner = load ptr, ptr %inner.at
  %events.at = getelementptr ptr, ptr %closure, i64 2
  %events = load ptr, ptr %events.at
  %start = call i64 @clock()
  call void %body(ptr %inner, i64 %begin, i64 %end)
  %stop = call i64 @clock()
  %thread = call i64 (i64, ...) @syscall(i64 {cpu.gettid})
  call void @tcomp_event(ptr %events, i64 -1, i64 %thread, i64 %start, i64 %stop)
  ret void
}}

define internal void @parallel_for_traced(ptr %pool, ptr %body, ptr %closure, i64 %extent) {{
  %outer = alloca [3 x ptr]
  store ptr %body, ptr %outer
  %inner.at = getelementptr ptr, ptr %outer, i64 1
  store ptr %closure, ptr %inner.at
  %from.at = getelementptr %traced, ptr %pool, i64 0, i32 1
  %events = load ptr, ptr %from.at
  %events.at = getelementptr ptr, ptr %outer, i64 2
  store ptr %events, ptr %events.at
  call void @tcomp_pool_parallel_for(ptr %pool, ptr @traced_body, ptr %outer, i64 %extent)
  ret void
}}

; Make a view of the pool, with events behind it, record each chunk.
define void @tcomp_pool_trace(ptr %traced) {{
  store ptr @parallel_for_traced, ptr %traced
  ret void
}}

; Start threads until `wanted` run, unless the system has refused one lately. Returns how many do. Only for who holds the workers.
define internal i32 @start(ptr %team, i32 %wanted, ptr %cpus) noinline {{
entry:
  %mask = alloca [16 x i64], align 64
{_RUNNING}
{_REFUSED}
  %running32 = load i32, ptr %running.at
  %running = zext i32 %running32 to i64
  %pause = load i32, ptr %refused.at
  %paused = icmp sgt i32 %pause, 0
  br i1 %paused, label %later, label %head
later:
  %shorter = sub i32 %pause, 1
  store i32 %shorter, ptr %refused.at
  ret i32 %running32
head:
  %i = phi i64 [ %running, %entry ], [ %i.next, %next ]
  %count = trunc i64 %i to i32
  %more = icmp slt i32 %count, %wanted
  %room = icmp slt i32 %count, {CAPACITY}
  %again = and i1 %more, %room
  br i1 %again, label %begin, label %end
begin:
  %slot = sub i64 %i, 1
{_box("box", "slot")}
  store <16 x i8> zeroinitializer, ptr %box, align 16
{_at("box", "thread")}
  %error = call i32 @pthread_create(ptr %thread.at, ptr null, ptr @tcomp_pool_worker, ptr %box)
  %failed = icmp ne i32 %error, 0
  br i1 %failed, label %refuse, label %started
refuse:
  store i32 {RETRY}, ptr %refused.at
  ret i32 %count
started:
  %i.next = add i64 %i, 1
  %now = trunc i64 %i.next to i32
  store i32 %now, ptr %running.at
  %anywhere = icmp eq ptr %cpus, null
  br i1 %anywhere, label %next, label %choose
choose:
  %cpu.at = getelementptr i32, ptr %cpus, i64 %i
  %cpu = load i32, ptr %cpu.at
  %known = icmp ult i32 %cpu, 1024
  br i1 %known, label %pin, label %next
pin:
  store <16 x i64> zeroinitializer, ptr %mask, align 64
  %word = lshr i32 %cpu, 6
  %bit = and i32 %cpu, 63
  %wide = zext i32 %bit to i64
  %set = shl i64 1, %wide
  %word.at = getelementptr i64, ptr %mask, i32 %word
  store i64 %set, ptr %word.at
{_load("thread")}
  %ignored = call i32 @pthread_setaffinity_np(i64 %thread, i64 128, ptr %mask)
  br label %next
next:
  br label %head
end:
  ret i32 %count
}}

define i32 @tcomp_pool_version() {{
  ret i32 {VERSION}
}}

; NULL if there is no memory.
define ptr @tcomp_pool_create(i32 %threads, ptr %cpus) {{
entry:
  %team = call ptr @aligned_alloc(i64 128, i64 {128 * (2 + CAPACITY)})
  %failed = icmp eq ptr %team, null
  br i1 %failed, label %end, label %fill
fill:
  %positive = icmp sgt i32 %threads, 1
  %some = select i1 %positive, i32 %threads, i32 1
  %large = icmp sgt i32 %some, {CAPACITY}
  %most = select i1 %large, i32 {CAPACITY}, i32 %some
  store ptr @tcomp_pool_parallel_for, ptr %team
  %threads.at = getelementptr %pool, ptr %team, i64 0, i32 1
  store i32 %most, ptr %threads.at
  %team.at = getelementptr %pool, ptr %team, i64 0, i32 2
  store ptr %team, ptr %team.at
  call void @tcomp_pool_forget(ptr %team)
  %running = call i32 @start(ptr %team, i32 %most, ptr %cpus)
  br label %end
end:
  ret ptr %team
}}

; In a child of fork, which has no workers.
define void @tcomp_pool_forget(ptr %pool) {{
{_TEAM}
{_BUSY}
{_RUNNING}
{_REFUSED}
  store i32 0, ptr %busy.at
  store i32 1, ptr %running.at
  store i32 0, ptr %refused.at
  ret void
}}

; The pool must be idle; it may be NULL.
define void @tcomp_pool_destroy(ptr %pool) {{
entry:
  %nothing = icmp eq ptr %pool, null
  br i1 %nothing, label %end, label %begin
begin:
{_TEAM}
{_RUNNING}
  %running = load i32, ptr %running.at
  %workers32 = sub i32 %running, 1
  %workers = zext i32 %workers32 to i64
  br label %head
head:
  %i = phi i64 [ 0, %begin ], [ %i.next, %stop ]
  %more = icmp ult i64 %i, %workers
  br i1 %more, label %stop, label %release
stop:
{_box("box", "i")}
{_store(body="null")}
{_POST}
  fence seq_cst
{_at("box", "parked", "thread")}
  call void @wake_if(ptr %parked.at, ptr %box)
{_load("thread")}
  %r = call i32 @pthread_join(i64 %thread, ptr null)
  %i.next = add i64 %i, 1
  br label %head
release:
  call void @free(ptr %team)
  br label %end
end:
  ret void
}}
"""
