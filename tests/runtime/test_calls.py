"""How a loaded module is called: one thread pool for all, callers at the same time, workspaces, arrays given by the caller, bound calls."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tcomp.codegen.elf.linker import link
from tcomp.codegen.llvm.thread_pool import EXPORTS, IMPORTS
from tcomp.errors import ArtifactError, InputError
from tcomp.runtime import Module, RunRecord, workspace
from tcomp.runtime.stopping import answer_interrupts
from tcomp.runtime.trace import Events
from tests.models import nets
from tests.runtime import native_models as models
from tests.runtime.alone import alone
from tests.runtime.test_module import DLPack, random, reference

ONE = np.float32(1)


def tasks() -> int:
    answer_interrupts()  # whose thread is there to stay
    gc.collect()
    return len(os.listdir("/proc/self/task"))


# ---- one pool ---------------------------------------------------------------------------------


@alone
def test_modules_share_the_threads_of_one_pool(affine: bytes) -> None:
    before, x = tasks(), random(5000)
    loaded = [Module.load(affine, threads=threads) for threads in (2, 4, 3, 4, 1)]
    assert tasks() == before  # none has run
    for module, most in zip(loaded, (1, 3, 3, 3, 3), strict=True):
        assert np.array_equal(module(x, ONE), reference(x, 1))
        assert tasks() == before + most
    del loaded, module
    assert tasks() == before


@alone
def test_the_pool_outlives_the_module_that_made_it(affine: bytes) -> None:
    before, x = tasks(), random(5000)
    first, second = Module.load(affine, threads=2), Module.load(affine, threads=3)
    first(x, ONE)
    del first
    gc.collect()
    for _ in range(3):
        assert np.array_equal(second(x, ONE), reference(x, 1))
    del second
    assert tasks() == before


def test_code_made_for_another_kind_of_pool_is_refused() -> None:
    old = [name for name in EXPORTS if name != "tcomp_pool_version"]
    code = link(models.affine_objects(), ["tcomp_run", "tcomp_plan", *old], imports=IMPORTS)
    artifact = models.packed(code, models.AFFINE_MANIFEST, [("w", models.W)])
    with pytest.raises(ArtifactError, match="thread pools of version 1(.|\n)*compile the model again"):
        Module.load(artifact)
    assert np.array_equal(Module.load(artifact, threads=1)(random(3), ONE), reference(random(3), 1))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_child_with_the_number_of_its_parent(affine: bytes, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As numbers of processes are recycled, a grandchild may have that of a grandparent, whose workers it does not have."""
    module, x = Module.load(affine, threads=threads), random(5000)
    bound = module.bind({"x": x, "s": ONE})
    assert np.array_equal(module(x, ONE), reference(x, 1))
    number = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: number)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        right = [np.array_equal(y, reference(x, 1)) for y in (module(x, ONE), module(x, ONE), bound.run()["y"])]
        os._exit(0 if all(right) and len(os.listdir("/proc/self/task")) == threads else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_a_signal_handler_runs_the_module_that_is_running(affine: bytes, threads: int) -> None:
    """In a child, which ends by an alarm if the handler waits for what it interrupted."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        module, x, turns = Module.load(affine, threads=threads), random(200_000), [0, 0]
        expected = reference(x, 1)

        def handler(*_: object) -> None:
            turns[1] += np.array_equal(module(x[:100], ONE), expected[:100])

        signal.signal(signal.SIGPROF, handler)
        signal.setitimer(signal.ITIMER_PROF, 0.002, 0.002)
        while min(turns) < 20:
            turns[0] += np.array_equal(module(x, ONE), expected)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---- memory -----------------------------------------------------------------------------------


def test_sizes_that_grow_leave_one_workspace(affine: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_idle", [])
    module = Module.load(affine, threads=1)
    for rows in (50_000, 60_000, 70_000, 130_000, 100_000):
        module(random(rows), ONE)
    assert [w.size for w in workspace._idle] == [130_000 * 16]


def test_workspaces_are_shared_and_do_not_pile_up(affine: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_idle", [])
    monkeypatch.setattr(workspace, "IDLE_BYTES", 1 << 20)
    first, second, small = Module.load(affine, threads=1), Module.load(affine, threads=1), random(30_000)  # 480 kB
    for module in (first, second, first):
        assert np.array_equal(module(small, ONE), reference(small, 1))
        assert workspace.idle_bytes() == small.nbytes
    first(random(50_000), ONE)  # 800 kB more: too much in all
    assert workspace.idle_bytes() == 800_000
    first(random(4_000_000), ONE)
    assert workspace.idle_bytes() == 64_000_000  # the last one stays, whatever its size
    together = [threading.Thread(target=first, args=(small, ONE)) for _ in range(12)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join(60)
    assert workspace.idle_bytes() <= 1 << 20 or len(workspace._idle) == 1


def test_a_limit_of_memory(affine: bytes) -> None:
    module = Module.load(affine, max_memory=32_000)  # 16 bytes a row of workspace, 16 of output
    assert module.max_memory == 32_000 and np.array_equal(module(random(1000), ONE), reference(random(1000), 1))
    expected = r"needs 32032 bytes, more than max_memory=32000(.|\n)*16016 for its workspace and 16016 for its outputs"
    for call in (lambda: module(random(1001), ONE), lambda: module.bind({"x": random(1001), "s": ONE})):
        with pytest.raises(InputError, match=expected):
            call()
    for bad in (-1, 1.5, True):
        with pytest.raises(InputError, match="max_memory"):
            Module.load(affine, max_memory=bad)


def test_views_that_are_too_large_to_copy_are_refused(affine: bytes) -> None:
    module = Module.load(affine)
    huge = np.broadcast_to(np.float32(0), (1 << 40, 4))
    with pytest.raises(InputError, match=r"'x' cannot be copied to contiguous memory(.|\n)*17592186044416 bytes"):
        module(huge, ONE)
    with pytest.raises(InputError, match=r"'x' has the wrong shape: expected \(n, 4\), got \(1099511627776, 5\)"):
        module(np.broadcast_to(np.float32(0), (1 << 40, 5)), ONE)


# ---- what is given ----------------------------------------------------------------------------


def test_what_is_no_mapping_or_has_a_mask_is_refused(affine: bytes) -> None:
    module, x = Module.load(affine), random(3)
    for inputs in ([x, ONE], 5, None, "xs", {"x", "s"}):
        for call in (module.run, module.bind, module.facts, module.profile):
            with pytest.raises(InputError, match="the inputs must be a mapping from names to arrays"):
                call(inputs)
    with pytest.raises(InputError, match=r"'x' is a masked array(.|\n)*filled"):
        module(np.ma.masked_less(x, 0), ONE)


def test_outputs_given_by_the_caller(affine: bytes) -> None:
    module, x = Module.load(affine), random(300)
    for place in (np.empty((300, 4), np.float32), np.frombuffer(bytearray(4804), np.float32)[1:].reshape(300, 4)):
        for _ in range(2):
            place[...] = 0
            assert module.run({"x": x, "s": ONE}, out={"y": place})["y"] is place
            assert np.array_equal(place, reference(x, 1))
    assert np.array_equal(module.run({"x": x, "s": ONE}, out={})["y"], reference(x, 1))
    read_only = np.empty((300, 4), np.float32)
    read_only.flags.writeable = False
    unaligned = np.frombuffer(bytearray(4801), np.uint8)[1:].view(np.float32).reshape(300, 4)
    for place, message in (
        (np.empty((300, 4)), r"output 'y' cannot be written(.|\n)*expected float32\[300, 4\], got float64\[300, 4\]"),
        (np.empty((299, 4), np.float32), r"got float32\[299, 4\]"),
        (np.empty((4, 300), np.float32).T, "not C-contiguous"),
        (unaligned, "not aligned"),
        (read_only, "not writeable"),
        (np.ma.masked_array(np.empty((300, 4), np.float32)), "masked"),
        (x, "overlaps an input"),
        ([[0.0] * 4] * 300, "output 'y' is not an array"),
    ):
        for call in (module.run, module.bind):
            with pytest.raises(InputError, match=message):
                call({"x": x, "s": ONE}, out={"y": place})
    with pytest.raises(InputError, match=r"unknown outputs: z(.|\n)*y: float32"):
        module.run({"x": x, "s": ONE}, out={"z": read_only})
    with pytest.raises(InputError, match="`out` must be a mapping"):
        module.run({"x": x, "s": ONE}, out=[read_only])


def test_given_outputs_with_data_dependent_extents(filtering: bytes) -> None:
    module, place = Module.load(filtering), np.empty((2, 3), np.float32)
    result = module.run({"x": np.array([1, -2, 3], np.float32)}, out={"positive": place})["positive"]
    assert result.tolist() == [[1, 3], [-1, -3]] and np.shares_memory(result, place)


# ---- bound calls ------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3])
def test_bound_calls_compute_what_the_arrays_hold(affine: bytes, threads: int) -> None:
    module, x, y = Module.load(affine, threads=threads), random(30_000), np.empty((30_000, 4), np.float32)
    bound, scalar = module.bind({"x": x, "s": 2}, {"y": y}), module.bind({"x": x, "s": ONE})
    assert bound.inputs["x"] is x and bound.outputs["y"] is y and bound.inputs["s"].dtype == np.float32
    del module
    gc.collect()
    for seed in (1, 2):
        x[...] = random(30_000, seed)
        assert bound.run() is bound.outputs and np.array_equal(y, reference(x, 2))
        bound.inputs["s"][...] = 3
        assert np.array_equal(bound.run()["y"], reference(x, 3)) and np.array_equal(scalar.run()["y"], reference(x, 1))
        bound.inputs["s"][...] = 2


def test_bound_calls_at_the_same_time(affine: bytes) -> None:
    module, failures = Module.load(affine, threads=2), list[int]()

    def work(seed: int) -> None:
        x = random(1 + 700 * seed, seed)
        bound, expected = module.bind({"x": x, "s": np.float32(seed)}), reference(x, seed)
        failures.extend(seed for _ in range(50) if not np.array_equal(bound.run()["y"], expected))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_bound_calls_with_data_dependent_extents_and_errors(filtering: bytes) -> None:
    x = np.array([1, -2, 3], np.float32)
    bound = Module.load(filtering).bind({"x": x})
    for _ in range(2):
        x[:] = 1, -2, 3
        assert bound.run()["positive"].tolist() == [[1, 3], [-1, -3]]
        x[0] = np.nan
        with pytest.raises(InputError, match="the model stopped: NaN in x"):
            bound.run()
        x[:] = -1
        assert bound.run()["positive"].shape == (2, 0) == bound.outputs["positive"].shape


def test_what_would_be_copied_cannot_be_bound(affine: bytes) -> None:
    module = Module.load(affine)
    for view in (random(6)[::2], np.asfortranarray(random(6)), DLPack(random(6)[::2])):
        with pytest.raises(InputError, match="'x' is not C-contiguous"):
            module.bind({"x": view, "s": ONE})


# ---- arrays of other libraries ----------------------------------------------------------------


def test_dlpack_takes_read_only_and_strided_arrays(affine: bytes) -> None:
    module, x = Module.load(affine), random(6)
    read_only = x.copy()
    read_only.flags.writeable = False
    for given in (DLPack(x[::2]), DLPack(x[:, ::-1]), DLPack(read_only)):
        assert np.array_equal(module(given, ONE), reference(given.array, 1))
    with pytest.raises(InputError, match="output 'y'"):
        module.run({"x": x, "s": ONE}, out={"y": DLPack(read_only)})


def test_torch_there_and_back(affine: bytes) -> None:
    torch: Any = pytest.importorskip("torch", reason="torch is not installed")
    module = Module.load(affine, threads=2)
    x, y = torch.randn(500, 4), torch.empty(500, 4)
    expected = reference(x.numpy(), 2)
    result = torch.from_dlpack(module.run({"x": x, "s": 2})["y"])  # without a copy, in and out
    assert np.array_equal(result.numpy(), expected)
    module.run({"x": x, "s": 2}, out={"y": y})
    assert torch.equal(y, result)
    bound = module.bind({"x": x, "s": 2}, {"y": y})
    x *= 2
    bound.run()
    assert np.array_equal(y.numpy(), reference(x.numpy(), 2))
    assert np.array_equal(module(x.t().contiguous().t(), 2), y.numpy())  # strided
    with pytest.raises(InputError, match=r"'x' is not an array(.|\n)*(grad|meta)"):
        module(torch.empty(5, 4, device="meta"), 2)


@alone
def test_this_process_is_not_left_with_anything(affine: bytes) -> None:
    """Callers with one thread leave no threads; modules leave no libraries."""
    before = tasks(), Path("/proc/self/maps").read_text().count("tcomp-model")
    modules = [Module.load(affine, threads=1 + n % 2) for n in range(6)]
    callers = [threading.Thread(target=module, args=(random(100), ONE)) for module in modules for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    del modules, callers, caller
    gc.collect()
    assert (tasks(), Path("/proc/self/maps").read_text().count("tcomp-model")) == before


# ---- what is observed -------------------------------------------------------------------------


def test_a_hook_is_told_of_every_run(affine: bytes, filtering: bytes) -> None:
    module, x = Module.load(affine, threads=2), random(100)
    seen: list[RunRecord] = []
    module(x, ONE)
    module.hook = seen.append
    before = time.perf_counter()
    module.run({"x": x, "s": ONE})
    module.bind({"x": x, "s": ONE}).run()
    assert [(r.model, r.inputs, r.outputs, r.workspace, r.status) for r in seen] == [(module, 1604, 1600, 1600, 0)] * 2
    assert before <= seen[0].start <= seen[0].start + seen[0].seconds <= seen[1].start <= time.perf_counter()
    module.hook = None
    module(x, ONE)
    assert len(seen) == 2
    other = Module.load(filtering)
    other.hook = seen.append
    with pytest.raises(InputError, match="NaN"):
        other([np.nan])
    assert seen[2].status == 1


def test_waits_for_other_threads() -> None:
    events = Events()
    cells = (ctypes.c_int64 * 34).from_address(events.address)
    # Two regions of thread 7, which waits 5 ticks in the first for thread 8, and in the second for nobody; then one that 8 ends 10 later.
    chunks = [(100, 120, 7), (101, 125, 8), (130, 150, 7), (131, 140, 8), (150, 160, 7), (152, 170, 8), (151, 155, 9)]
    for n, (start, end, thread) in enumerate(chunks):
        cells[2 + 4 * n : 6 + 4 * n] = [-1, thread, start, end]
    cells[1] = len(chunks)
    assert events.waited(7, 0.7) == pytest.approx(0.15)  # seconds: 70 ticks take 0.7
    assert events.waited(7, 0.7) == 0


def test_a_hook_is_told_of_waits() -> None:
    import tcomp

    net = nets.Net("product")
    product = tcomp.compile(net.build(net.linear(net.input("x", (256, 256)), 256, 256)), threads=2)
    seen: list[RunRecord] = []
    product.hook, x = seen.append, np.ones((256, 256), np.float32)
    for _ in range(5):
        product(x)
    assert all(0 <= r.waited < r.seconds for r in seen)
    assert any(r.waited for r in seen)


def test_a_model_without_times_of_kernels_has_no_trace(affine: bytes) -> None:
    with pytest.raises(ArtifactError, match="cannot be profiled"):
        Module.load(affine).trace({"x": random(3), "s": ONE})


def test_what_happens_is_logged_under_one_name(affine: bytes, caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()
    with caplog.at_level("DEBUG", "tcomp"):
        Module.load(affine, threads=3)
    assert {record.name for record in caplog.records} == {"tcomp"}
    assert "loaded the given bytes for 3 threads" in caplog.messages
