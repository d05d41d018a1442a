"""`tcomp.build` of schedules and kernels: functions that work on arrays in place."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest

import tcomp
from tcomp import te
from tcomp.errors import InputError, IRError, TargetError
from tcomp.ir.loops import Buffer, Kernel, loop, store
from tcomp.ops import OPERATORS

RNG = np.random.default_rng(0)


def product(n: int | te.Expr = 33) -> list[te.Tensor]:
    a, b = te.placeholder((n, 20), name="A"), te.placeholder((20, 7), name="B")
    k = te.reduce_axis(20, name="k")
    return [a, b, te.compute((n, 7), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")]


def arrays(n: int = 33) -> list[np.ndarray]:
    return [RNG.integers(-4, 5, shape).astype(np.float32) for shape in ((n, 20), (20, 7), (n, 7))]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_schedule_works_on_arrays_in_place(threads: int) -> None:
    s = tcomp.Schedule(product())
    rows, _ = s.split("C.i", 8)
    s.parallel(rows)
    f = tcomp.build(s, threads=threads)
    x, y, z = arrays()
    assert f(x, y, z) is None
    np.testing.assert_array_equal(z, x @ y)


def test_a_kernel_is_compiled_as_it_is_and_buffers_keep_their_order() -> None:
    y, x = Buffer("y", "float32", (9,)), Buffer("x", "float32", (9,))
    f = tcomp.build(Kernel("axpy", (y, x), (y,), (), loop("i", 9, lambda i: store(y, (i,), y[i] + 2.0 * x[i]))))
    out, given = np.arange(9, dtype=np.float32), np.ones(9, np.float32)
    for times in (1, 2):
        f(out, given)
        np.testing.assert_array_equal(out, np.arange(9) + 2 * times)


def test_a_tensor_is_computed_from_its_placeholders_in_order_of_use() -> None:
    a, b = te.placeholder((5,), name="a"), te.placeholder((5,), name="b")
    f = tcomp.build(te.compute((5,), lambda i: b[i] - a[i], name="difference"))
    np.testing.assert_array_equal(f(np.full(5, 3, np.float32), np.ones(5, np.float32)), np.full(5, 2))


def test_the_name_of_a_program_is_no_symbol() -> None:
    x = te.placeholder((4,), name="x")
    for name in ("memcpy", "tcomp_run", "main", "malloc", "a b/c"):
        out = np.zeros(4, np.float32)
        tcomp.build(tcomp.Schedule(te.compute((4,), lambda i: x[i] + 1.0, name=name)))(np.ones(4, np.float32), out)
        assert out.tolist() == [2] * 4


# ---------------------------------------------------------------- sizes


def test_symbolic_sizes_come_from_shapes_and_must_agree() -> None:
    n = te.var("n", 1, 64)
    f = tcomp.build(tcomp.Schedule(product(n)))
    for size in (1, 5, 40, 5):
        x, y, z = arrays(size)
        f(x, y, z)
        np.testing.assert_array_equal(z, x @ y)
    x, y, z = arrays(8)
    with pytest.raises(InputError, match=r"dimension 0 of `C` is 7 instead of 8"):
        f(x, y, z[:7])
    with pytest.raises(InputError, match=r"dimension 1 of `A` is 19 instead of 20"):
        f(np.ascontiguousarray(x[:, :19]), y, z)
    with pytest.raises(InputError, match="`B` has 1 dimensions instead of 2"):
        f(x, y.reshape(-1), z)
    with pytest.raises(InputError, match="the dim `n` is 65"):
        f(*arrays(65))


def test_extents_that_are_expressions() -> None:
    n = te.var("n")
    x = te.placeholder((n + 2,), name="x")
    window = te.compute((n,), lambda i: x[i] + x[i + 1] + x[i + 2], name="window")
    f = tcomp.build(tcomp.Schedule([x, window]))
    out = np.zeros(3, np.float32)
    f(np.arange(5, dtype=np.float32), out)
    assert out.tolist() == [3, 6, 9]
    with pytest.raises(InputError, match="dimension 0 of `window` is 4 instead of 3"):
        f(np.arange(5, dtype=np.float32), np.zeros(4, np.float32))
    with pytest.raises(InputError, match="the dim `n` is -1"):
        f(np.zeros(1, np.float32), np.zeros(0, np.float32))
    y = te.placeholder((n,), name="y")
    z = te.compute((n,), lambda i: x[i] + y[i], name="z")
    g = tcomp.build([x, y, z])
    assert g(np.arange(5, dtype=np.float32), np.ones(3, np.float32)).tolist() == [1, 2, 3]
    with pytest.raises(InputError, match="4"):
        g(np.arange(5, dtype=np.float32), np.ones(4, np.float32))


def test_sizes_that_no_shape_tells_are_passed() -> None:
    m, k = te.var("m", 0, 100), te.var("k", 0)
    x = te.placeholder((4,), name="x")
    f = tcomp.build(tcomp.Schedule(te.compute((4,), lambda i: x[i] + te.cast(m * 10 + k, "float32"), name="y")))
    given, out = np.zeros(4, np.float32), np.zeros(4, np.float32)
    for arguments, sizes, want in (((3, 2), {}, 23), ((), {"m": 2, "k": 3}, 23), ((np.int64(3),), {"k": 2}, 32)):  # in order: k, m
        f(given, out, *arguments, **sizes)
        assert out.tolist() == [want] * 4
    for arguments, sizes, message in (
        ((), {}, "takes the sizes k, m behind its arrays, got none"),
        ((1,), {}, "takes the sizes k, m .* got 1"),
        ((1, 2, 3), {}, "got 1, 2, 3"),
        ((1, 2), {"k": 3}, "got 1, 2, k=3"),
        ((1,), {"n": 2}, "got 1, n=2"),
        ((1, -1), {}, "the size `m` is -1"),
        ((True, 1), {}, "the size `k` is True"),
        ((1, 2.0), {}, r"the size `m` is 2\.0"),
        ((1, [2]), {}, r"the size `m` is \[2\]"),
        ((1, 101), {}, "the dim `m` is 101"),
    ):
        with pytest.raises(InputError, match=message):
            f(given, out, *arguments, **sizes)


def test_temporaries_of_symbolic_size() -> None:
    n = te.var("n")
    x = te.placeholder((n,), name="x")
    k = te.reduce_axis(n, "k")
    total = te.compute((n,), lambda i: te.sum(x[k] * te.cast(i + 1, "float32"), k), name="total")
    f = tcomp.build(tcomp.Schedule(te.compute((n,), lambda i: total[i] + total[n - 1 - i], name="y")))
    for size in (1, 3, 100):
        given, out = RNG.integers(0, 4, size).astype(np.float32), np.zeros(size, np.float32)
        f(given, out)
        np.testing.assert_array_equal(out, np.full(size, given.sum() * (size + 1)))


# ---------------------------------------------------------------- arrays that do not fit


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, lambda a: a.tolist(), "`A` is a list"),
        (2, lambda a: a.astype(np.float64), r"`C` has elements of type float64\n  why: the kernel takes float32"),
        (0, lambda a: a.astype(">f4"), "`A` has elements of type >f4"),
        (0, np.asfortranarray, "the array for `A` cannot be used in place\n  why: its strides are .*\n  try: np.ascontiguousarray"),
        (2, lambda a: np.zeros((33, 14), np.float32)[:, ::2], "the array for `C` cannot be used in place"),
        (2, lambda a: np.frombuffer(a.tobytes(), np.float32).reshape(a.shape), "it is read-only, and the kernel writes it"),
        (2, lambda a: np.ndarray(a.shape, np.float32, np.zeros(a.nbytes + 1, np.uint8), 1), "the array for `C` cannot be used in place"),
    ],
    ids=["list", "dtype", "byte-order", "order", "strided", "read-only", "unaligned"],
)
def test_arrays_that_do_not_fit(place, change, message) -> None:
    f = tcomp.build(tcomp.Schedule(product()))
    given = arrays()
    before = [a.copy() for a in given]
    given[place] = change(given[place])
    with pytest.raises(InputError, match=message):
        f(*given)
    for array, old in zip(given, before, strict=True):
        np.testing.assert_array_equal(array, old if not isinstance(array, np.ndarray) or array.any() else 0)


def test_too_few_arrays_and_too_many() -> None:
    f = tcomp.build(tcomp.Schedule(product()))
    with pytest.raises(InputError, match=r"`C` takes 3 arrays \(A, B, C\), got 2"):
        f(*arrays()[:2])
    with pytest.raises(InputError, match="`C` takes no sizes behind its arrays"):
        f(*arrays(), 3)


def test_arrays_that_overlap() -> None:
    x = te.placeholder((8,), name="x")
    f = tcomp.build(tcomp.Schedule(te.compute((8,), lambda i: x[7 - i], name="y")))
    memory = np.arange(12, dtype=np.float32)
    with pytest.raises(InputError, match="the arrays for `y` and `x` overlap"):
        f(memory[:8], memory[4:])
    f(memory[:4].repeat(2), memory[4:])  # apart
    assert memory[4:].tolist() == [3, 3, 2, 2, 1, 1, 0, 0]
    both = tcomp.build(tcomp.Schedule([x, *te.compute((8,), lambda i: (x[i], x[i] + 1.0), name="z")]))
    with pytest.raises(InputError, match=r"the arrays for `z\.0` and `z\.1` overlap"):
        both(np.zeros(8, np.float32), memory[:8], memory[:8])


def test_other_views_of_memory_are_written_too() -> None:
    """Subclasses of ndarray, and dtypes that are equal but not the same object."""
    f = tcomp.build(tcomp.Schedule(te.compute((4,), lambda i: te.cast(i, "float32"), name="y")))
    plain = np.zeros(4, np.float32)
    unpickled = pickle.loads(pickle.dumps(plain))
    for array in (plain.view(np.recarray), unpickled, np.zeros(4, np.dtype("float32", metadata={"a": 1}))):
        f(array)
        assert np.asarray(array).tolist() == [0, 1, 2, 3]


# ---------------------------------------------------------------- targets, threads


def test_what_cannot_be_built() -> None:
    for bad in (3, "C", None, product()[:2], []):
        with pytest.raises(IRError, match="program"):
            tcomp.build(bad)
    with pytest.raises(TargetError, match="a kernel on a GPU cannot work on NumPy arrays in place"):
        tcomp.build(tcomp.Schedule(product()), target="cuda -arch=sm_90a")
    with pytest.raises(InputError, match="threads must be between"):
        tcomp.build(tcomp.Schedule(product()), threads=0)


@pytest.mark.parametrize("threads", [1, 2])
def test_calls_from_several_threads(threads: int) -> None:
    s = tcomp.Schedule(product())
    s.parallel("C.i")
    f = tcomp.build(s, threads=threads)
    wrong = []

    def work() -> None:
        for _ in range(50):
            number = threading.get_ident() % 7
            x, y, z = np.full((33, 20), number, np.float32), np.full((20, 7), 2, np.float32), np.zeros((33, 7), np.float32)
            f(x, y, z)
            if not (z == number * 40).all():
                wrong.append(z)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_selection_whose_sides_become_the_same() -> None:
    """Both read the prefix sums, one by way of a copy, which is inlined: the selection is folded."""
    x = te.placeholder((5,), name="x")
    (y,) = OPERATORS["cum_sum"].apply([x], {"axis": 0, "exclusive": False, "reverse": False})
    copy = te.compute((5,), lambda i: y[i], "copy")
    z = te.compute((5,), lambda i: te.select(x[i] > 0.0, y[i], copy[i]) * 2.0, "z")
    given = np.array([1, -2, 3, -4, 5], np.float32)
    np.testing.assert_array_equal(tcomp.build([x, z])(given), np.cumsum(given) * 2)
