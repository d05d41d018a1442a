"""Whether loops for all sizes are those for one: names, loops of one element and threads make no difference, all else does."""

from tcomp.ir import te
from tcomp.ir.expr import dim
from tcomp.schedules.analysis.equality import same_loops
from tcomp.schedules.schedule import Schedule

N = dim("n", 1)


def scaled(n, factor=2.0):
    x = te.placeholder((n, 6, 8), name="X")
    return Schedule(te.compute((n, 6, 8), lambda i, j, k: x[i, j, k] * factor, name="Y"))


def test_a_loop_of_one_element_and_threads_make_no_difference():
    free, one = scaled(N), scaled(1)
    free.parallel(free.fuse("Y.i", "Y.j"))
    one.collapse()
    one.split("Y.j_k", 8)
    assert same_loops(free.kernel, {N: 1}, one.kernel) is False  # dimensions of the buffers are merged
    one = scaled(1)
    assert same_loops(free.kernel, {N: 1}, one.kernel)
    assert not same_loops(free.kernel, {N: 2}, one.kernel)


def test_prefetches_make_no_difference():
    free, one = scaled(N), scaled(1)
    free.vectorize("Y.k")
    free.prefetch("X", "Y.j", 1)
    assert "prefetch" in str(free.kernel)
    one.vectorize("Y.k")
    assert same_loops(free.kernel, {N: 1}, one.kernel)


def test_other_loops_buffers_and_values_do():
    free, one = scaled(N), scaled(1)
    one.vectorize("Y.k")
    assert not same_loops(free.kernel, {N: 1}, one.kernel)
    free.vectorize("Y.k")
    assert same_loops(free.kernel, {N: 1}, one.kernel)
    assert not same_loops(free.kernel, {N: 1}, scaled(1, 3.0).kernel)
    free.split("Y.j", 4)  # with a condition where the last part is not whole
    assert not same_loops(free.kernel, {N: 1}, one.kernel)
    one.split("Y.j", 4)
    assert same_loops(free.kernel, {N: 1}, one.kernel)
