"""The thread pool, driven by native code so that regions follow each other as fast as in a model."""

from __future__ import annotations

import copy
import ctypes
import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tcomp.codegen.elf.linker import link
from tcomp.codegen.llvm.machine_code import compile_ir
from tcomp.codegen.llvm.thread_pool import EXPORTS, IMPORTS, VERSION, pool_ir
from tcomp.errors import TargetError
from tcomp.runtime import pool as runtime_pool
from tcomp.runtime.pool import View
from tcomp.target import CpuTarget

HOST = CpuTarget.parse(f"cpu -march={platform.machine()}")
BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)

DRIVER = """
define void @nothing(ptr %closure, i64 %begin, i64 %end) {
  ret void
}

; *closure += begin + ... + (end - 1), atomically
define void @sum(ptr %closure, i64 %begin, i64 %end) {
  %n = sub i64 %end, %begin
  %last = sub i64 %end, 1
  %pair = add i64 %begin, %last
  %twice = mul i64 %n, %pair
  %s = ashr i64 %twice, 1
  %old = atomicrmw add ptr %closure, i64 %s monotonic
  ret void
}

; closure[i] = smallest normal number / 2, which is zero if denormals are flushed
define void @denormal(ptr %closure, i64 %begin, i64 %end) {
entry:
  br label %loop
loop:
  %i = phi i64 [ %begin, %entry ], [ %next, %loop ]
  %at = getelementptr float, ptr %closure, i64 %i
  %x = load volatile float, ptr %at
  %y = fmul float %x, 0.5
  store volatile float %y, ptr %at
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %end
  br i1 %more, label %loop, label %done
done:
  ret void
}

; `count` regions of the extents low, low + 1, ... (modulo 64), each after `delay` more turns of a loop than the last
define void @regions(ptr %pool, ptr %body, ptr %closure, i64 %low, i64 %count, i64 %delay) {
entry:
  %parallel_for = load ptr, ptr %pool
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %next ]
  %turns = mul i64 %i, %delay
  br label %wait
wait:
  %t = phi i64 [ 0, %loop ], [ %t.next, %wait ]
  %ignored = load volatile ptr, ptr %pool
  %t.next = add i64 %t, 1
  %again = icmp slt i64 %t.next, %turns
  br i1 %again, label %wait, label %run
run:
  %k = and i64 %i, 63
  %extent = add i64 %low, %k
  call void %parallel_for(ptr %pool, ptr %body, ptr %closure, i64 %extent)
  br label %next
next:
  %i.next = add i64 %i, 1
  %more = icmp slt i64 %i.next, %count
  br i1 %more, label %loop, label %done
done:
  ret void
}
"""
DRIVER_EXPORTS = ["nothing", "sum", "denormal", "regions"]


def linked(target: CpuTarget = HOST) -> bytes:
    objects = [compile_ir(pool_ir(target.triple), target), compile_ir(DRIVER, target)]
    return link(objects, [*EXPORTS, *DRIVER_EXPORTS], imports=IMPORTS)


class Pool:
    kept: View

    def __init__(self, library: ctypes.CDLL, threads: int, cpus: list[int] | None = None) -> None:
        self.library, self.threads = library, threads
        library.tcomp_pool_create.restype = ctypes.c_void_p
        self.address = library.tcomp_pool_create(threads, (ctypes.c_int32 * threads)(*cpus) if cpus else None)
        parallel_for = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        self._parallel_for = parallel_for(ctypes.c_void_p.from_address(self.address).value)

    def parallel_for(self, body: Any, closure: int | None, extent: int) -> None:
        self._parallel_for(self.address, ctypes.cast(body, ctypes.c_void_p), closure, extent)

    def regions(self, body: str, closure: int | None, low: int, count: int, delay: int = 0) -> None:
        function = self.library.regions
        function.restype, function.argtypes = None, [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 3
        address = ctypes.cast(getattr(self.library, body), ctypes.c_void_p)
        function(self.address, address, closure, low, count, delay)

    def view(self, threads: int) -> Pool:
        """The same workers, for regions of another number of threads."""
        other = copy.copy(self)
        whole = View.from_address(self.address)
        other.kept = View(whole.parallel_for, threads, whole.workers)
        other.address, other.threads = ctypes.addressof(other.kept), threads
        return other

    def forget(self) -> None:
        self.library.tcomp_pool_forget(ctypes.c_void_p(self.address))

    def close(self) -> None:
        self.library.tcomp_pool_destroy(ctypes.c_void_p(self.address))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("pool") / "pool.so"
    path.write_bytes(linked())
    return ctypes.CDLL(str(path))


@pytest.fixture(params=[1, 2, 3, 5])
def pool(library: ctypes.CDLL, request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = Pool(library, request.param)
    yield pool
    pool.close()


def test_chunks_are_contiguous_balanced_and_the_caller_runs_the_first(pool: Pool) -> None:
    for extent in (0, 1, 2, 3, 4, 5, 7, 100, 10**15):
        chunks: list[tuple[int, int, int]] = []
        body = BODY(lambda closure, begin, end, chunks=chunks: chunks.append((begin, end, threading.get_ident())))
        pool.parallel_for(body, None, extent)
        chunks.sort()
        count = min(extent, pool.threads)
        assert len(chunks) == count
        if count:
            assert [begin for begin, _, _ in chunks] == [0, *(end for _, end, _ in chunks[:-1])] and chunks[-1][1] == extent
            sizes = [end - begin for begin, end, _ in chunks]
            assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
            assert chunks[0][2] == threading.get_ident()
            assert len({thread for _, _, thread in chunks}) == count


def expected_sum(low: int, count: int) -> int:
    return sum(n * (n - 1) // 2 for n in (low + (i & 63) for i in range(count)))


@pytest.mark.parametrize("delay", [0, 60, 400])
def test_every_iteration_runs_once_whatever_the_pace(pool: Pool, delay: int) -> None:
    """Delays grow through the spinning time of the workers: regions meet workers that spin, sleep, or are about to."""
    count = 3000 if delay == 0 else 1500
    total = ctypes.c_int64(0)
    pool.regions("sum", ctypes.addressof(total), 0, count, delay)
    assert total.value == expected_sum(0, count)


def test_many_pools_at_once_on_few_cores(library: ctypes.CDLL) -> None:
    totals = [ctypes.c_int64(0) for _ in range(4)]

    def work(total: ctypes.c_int64) -> None:
        pool = Pool(library, 4)
        pool.regions("sum", ctypes.addressof(total), 0, 500)
        pool.close()

    threads = [threading.Thread(target=work, args=(total,)) for total in totals]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [total.value for total in totals] == [expected_sum(0, 500)] * 4


def chunks(pool: Pool, extent: int) -> list[tuple[int, int]]:
    """Those that the bodies of one region got."""
    found: list[tuple[int, int]] = []
    pool.parallel_for(BODY(lambda closure, begin, end: found.append((begin, end))), None, extent)
    return sorted(found)


def test_a_caller_does_not_wait_for_workers_that_others_use(library: ctypes.CDLL) -> None:
    """The first region ends only after the second, from another thread, has run: on its caller alone."""
    pool = Pool(library, 3)
    started, done = threading.Event(), threading.Event()
    seen: list[tuple[int, int]] = []

    def second() -> None:
        assert started.wait(30)
        seen.extend(chunks(pool, 7))
        done.set()

    other = threading.Thread(target=second)
    other.start()
    waited: list[bool] = []

    def body(closure: object, begin: int, end: int) -> None:
        started.set()
        waited.append(done.wait(30))

    pool.parallel_for(BODY(body), None, 3)
    other.join()
    assert waited == [True] * 3 and seen == [(0, 7)]
    assert chunks(pool, 3) == [(0, 1), (1, 2), (2, 3)]  # the workers are free again
    pool.close()


def test_callers_at_the_same_time_lose_no_iteration(library: ctypes.CDLL) -> None:
    pool = Pool(library, 3)
    total = ctypes.c_int64(0)
    callers = [threading.Thread(target=pool.regions, args=("sum", ctypes.addressof(total), 0, 5000)) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert total.value == 4 * expected_sum(0, 5000)
    pool.close()


def test_regions_in_regions_run_on_their_caller(library: ctypes.CDLL) -> None:
    pool = Pool(library, 3)
    seen: list[list[tuple[int, int]]] = []
    pool.parallel_for(BODY(lambda closure, begin, end: seen.append(chunks(pool, 4))), None, 3)
    assert seen == [[(0, 4)]] * 3
    pool.close()


def test_views_share_workers_that_start_when_they_are_needed(library: ctypes.CDLL) -> None:
    others = workers()
    pool = Pool(library, 1)
    narrow, wide = pool.view(2), pool.view(5)
    for view, extent, chunked, started in ((wide, 1, 1, 0), (narrow, 9, 2, 1), (wide, 3, 3, 2), (wide, 9, 5, 4), (narrow, 9, 2, 4)):
        assert len(chunks(view, extent)) == chunked
        assert len(workers() - others) == started
    pool.close()
    assert workers() <= others


def test_a_child_of_fork_forgets_the_workers(library: ctypes.CDLL) -> None:
    """The fork happens in the midst of a region: the child's copy of the pool says that the workers are busy."""
    pool = Pool(library, 2)
    inside, leave = threading.Event(), threading.Event()

    def body(closure: object, begin: int, end: int) -> None:
        inside.set()
        leave.wait(30)

    busy = threading.Thread(target=pool.parallel_for, args=(BODY(body), None, 2))
    busy.start()
    assert inside.wait(30)
    child = os.fork()
    if child == 0:
        pool.forget()
        os._exit(0 if [chunks(pool, 4) for _ in range(3)] == [[(0, 2), (2, 4)]] * 3 else 1)
    leave.set()
    busy.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.close()


def test_the_runtime_knows_this_version(library: ctypes.CDLL) -> None:
    assert library.tcomp_pool_version() == VERSION == runtime_pool.VERSION


def workers() -> set[str]:
    """Threads of all pools in this process; other tests may have left some."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if Path(f"/proc/self/task/{task}/comm").read_text().strip() == "tcomp":
                found.add(task)
    return found


def test_pools_come_and_go_without_leaving_threads(library: ctypes.CDLL) -> None:
    before = workers()
    for round_ in range(100):
        pool = Pool(library, 3)
        if round_ % 2:
            pool.regions("nothing", None, 8, 3)
        pool.close()
    library.tcomp_pool_destroy(None)
    assert workers() <= before


def test_idle_workers_sleep(library: ctypes.CDLL) -> None:
    others = workers()
    pool = Pool(library, 3)
    pool.regions("nothing", None, 8, 10)
    time.sleep(0.05)

    def ticks() -> list[int]:
        fields = [Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split() for task in workers() - others]
        assert [field[0] for field in fields] == ["S", "S"]
        return [int(field[11]) + int(field[12]) for field in fields]

    before = ticks()
    time.sleep(0.1)
    assert ticks() == before
    pool.close()


def test_workers_leave_signals_to_the_main_thread(library: ctypes.CDLL) -> None:
    others = workers()
    pool = Pool(library, 2)
    pool.regions("nothing", None, 8, 10)
    (worker,) = workers() - others
    status = dict(line.split(":", 1) for line in Path(f"/proc/self/task/{worker}/status").read_text().splitlines())
    blocked = int(status["SigBlk"], 16)
    assert blocked >> 1 & 1 and blocked >> 14 & 1  # INT, TERM
    assert not blocked >> 10 & 1  # SEGV
    pool.close()


def test_workers_can_be_pinned(library: ctypes.CDLL) -> None:
    last = max(os.sched_getaffinity(0))
    pool = Pool(library, 3, [-1, last, last])
    seen: list[set[int]] = []
    body = BODY(lambda closure, begin, end: seen.append(os.sched_getaffinity(0)) if begin else None)
    pool.parallel_for(body, None, 3)
    assert seen == [{last}, {last}]
    pool.close()


@pytest.mark.skipif(HOST.arch != "x86_64", reason="sets MXCSR")
def test_workers_use_the_floating_point_mode_of_the_caller(library: ctypes.CDLL, tmp_path: Path) -> None:
    ir = "declare void @llvm.x86.sse.ldmxcsr(ptr)\n"
    ir += "define void @set(ptr %mode) {\n  call void @llvm.x86.sse.ldmxcsr(ptr %mode)\n  ret void\n}"
    (tmp_path / "mode.so").write_bytes(link([compile_ir(ir, HOST)], ["set"]))
    set_mode = ctypes.CDLL(str(tmp_path / "mode.so")).set
    pool = Pool(library, 3)
    smallest = 2.0**-126
    for mode, expected in ((0x1F80, smallest / 2), (0x9FC0, 0.0), (0x1F80, smallest / 2)):
        values = (ctypes.c_float * 9)(*[smallest] * 9)
        set_mode(ctypes.byref(ctypes.c_uint32(mode)))
        pool.parallel_for(library.denormal, ctypes.addressof(values), 9)
        set_mode(ctypes.byref(ctypes.c_uint32(0x1F80)))
        assert list(values) == [expected] * 9
    pool.close()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_unknown_processors_are_refused() -> None:
    with pytest.raises(TargetError, match="powerpc64le"):
        pool_ir("powerpc64le-unknown-linux-gnu")


EMULATED = r"""
#include <dlfcn.h>
#include <stdint.h>
#include <unistd.h>
typedef void body_t(void *, int64_t, int64_t);
int main(int argc, char **argv) {
  void *library = dlopen(argv[1], RTLD_NOW);
  if (!library) return 2;
  void **(*create)(int, const int *) = (void **(*)(int, const int *))dlsym(library, "tcomp_pool_create");
  void (*destroy)(void **) = (void (*)(void **))dlsym(library, "tcomp_pool_destroy");
  body_t *sum = (body_t *)dlsym(library, "sum");
  for (int threads = 1; threads < 5; threads++) {
    int64_t total = 0, expected = 0;
    void **pool = create(threads, 0);
    void (*parallel_for)(void **, body_t *, void *, int64_t) = (void (*)(void **, body_t *, void *, int64_t))*pool;
    for (int64_t i = 0; i < 1000; i++) {
      parallel_for(pool, sum, &total, i % 50);
      expected += (i % 50) * (i % 50 - 1) / 2;
      if (i % 200 == 0) usleep(2000);
    }
    destroy(pool);
    if (total != expected) return 1;
  }
  return 0;
}
"""


def test_aarch64_under_emulation(tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs qemu-aarch64 and aarch64-linux-gnu-gcc")
    (tmp_path / "main.c").write_text(EMULATED)
    (tmp_path / "pool.so").write_bytes(linked(CpuTarget.parse("cpu -march=aarch64")))
    subprocess.run([compiler, "-O1", "-o", tmp_path / "main", tmp_path / "main.c"], check=True)
    command = [emulator, "-L", "/usr/aarch64-linux-gnu", tmp_path / "main", tmp_path / "pool.so"]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
