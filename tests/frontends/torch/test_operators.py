"""Operators of linear algebra and of data-dependent results, forward and backward, as whole graphs, against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")

from torch.nn import functional
from torch.utils._pytree import tree_flatten

from tcomp.torch_backend import tcomp_backend

STRICT = {"strict": True, "threads": 1}
linalg = torch.linalg


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tensors(result: Any) -> list[Any]:
    return [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]


def slopes(result: Any, inputs: list[Any]) -> list[Any]:
    """Gradients of the sum of all floating results, each element with a weight of its own."""
    given = [t.real if t.is_complex() else t for t in tensors(result) if t.requires_grad]
    total = sum((t * torch.linspace(1, 2, t.numel()).reshape(t.shape)).sum() for t in given)
    return list(torch.autograd.grad(total, inputs, allow_unused=True)) if given else []


def same(function: Callable[..., Any], *inputs: Any, tolerance: float = 1e-4) -> None:
    """Results and gradients of both."""
    several = [[x.clone().requires_grad_(x.is_floating_point() or x.is_complex()) for x in inputs] for _ in range(2)]
    found, wanted = torch.compile(function, backend=tcomp_backend, options=STRICT, fullgraph=True)(*several[0]), function(*several[1])
    torch.testing.assert_close(tensors(found), tensors(wanted), rtol=tolerance, atol=tolerance, equal_nan=True)
    found, wanted = (slopes(r, [x for x in xs if x.requires_grad]) for r, xs in ((found, several[0]), (wanted, several[1])))
    torch.testing.assert_close(found, wanted, rtol=10 * tolerance, atol=10 * tolerance, equal_nan=True)


MATRICES: dict[str, Callable[..., Any]] = {
    "cholesky": lambda a, b: linalg.cholesky(a),
    "cholesky of the upper triangle": lambda a, b: linalg.cholesky_ex(a, upper=True)[0],
    "solved by cholesky": lambda a, b: (torch.cholesky_solve(b, linalg.cholesky(a)), torch.cholesky_inverse(linalg.cholesky(a))),
    "solve": lambda a, b: (linalg.solve(a, b), linalg.solve(a, b[..., 0]), linalg.solve(a, b.mT, left=False)),
    "solve_triangular": lambda a, b: (
        linalg.solve_triangular(a.triu(), b, upper=True),
        linalg.solve_triangular(a.tril(), b.mT, upper=False, left=False),
        linalg.solve_triangular(a, b, upper=True, unitriangular=True),
    ),
    "inv": lambda a, b: linalg.inv(a),
    "det": lambda a, b: (linalg.det(a[:, :3, :3].flip(1)), linalg.slogdet(a.flip(1)), linalg.det(a.mT), linalg.slogdet(a)),
    "lu": lambda a, b: (linalg.lu(a.flip(1)), linalg.lu(a[:, :3]), linalg.lu(a[..., :3])),
    "lu_factor": lambda a, b: linalg.lu_solve(*linalg.lu_factor(a.flip(1)), b),
    "adjoint": lambda a, b: (
        linalg.lu_solve(*linalg.lu_factor(a), b, adjoint=True),
        linalg.lu_solve(*linalg.lu_factor(a), b.mT, left=False),
    ),
}
OTHERS = ("solve", "inv", "det", "lu", "lu_factor", "adjoint")  # of matrices that are not symmetric


@pytest.mark.parametrize("name", MATRICES)
def test_linear_algebra(name: str) -> None:
    root = torch.randn(3, 5, 5)
    a = torch.randn(3, 5, 5) + 4 * torch.eye(5) if name in OTHERS else root @ root.mT + 5 * torch.eye(5)
    same(MATRICES[name], a, torch.randn(3, 5, 2))


def test_errors_are_those_of_pytorch() -> None:
    singular, places = torch.zeros(3, 3), torch.tensor([1, 5])
    for function, x, message in (
        (linalg.inv, singular, "input matrix is singular"),
        (linalg.cholesky, -torch.eye(3), "not positive-definite"),
        (lambda x: functional.one_hot(x, 3), places, "smaller than num_classes"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.compile(function, backend=tcomp_backend, options={"threads": 1})(x)


def ties() -> Any:
    x = torch.randn(4, 7).round()
    x[1, 2] = torch.nan
    return x


def test_running_extremes() -> None:
    for dtype in (torch.float32, torch.int64, torch.bool):
        x = (ties().nan_to_num() if dtype != torch.float32 else ties()).to(dtype)
        same(lambda x: (torch.cummax(x, 1), torch.cummin(x, 0)), x)
    same(lambda x: (torch.logcumsumexp(x, 1), torch.logcumsumexp(x, 0)), torch.randn(4, 7) * 30)
    same(lambda x: torch.logcumsumexp(x, 0), torch.tensor([-torch.inf, -torch.inf, 1.0, 90.0, torch.inf]))


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, float("inf")])
def test_distances(p: float) -> None:
    x, y = torch.randn(2, 5, 4), torch.randn(2, 6, 4)
    y[0, 3] = x[0, 2]
    same(lambda a, b: torch.cdist(a, b, p=p, compute_mode="donot_use_mm_for_euclid_dist"), x, y)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_images_at_positions(mode: str, padding: str) -> None:
    positions = torch.rand(2, 4, 4, 2) * 2.4 - 1.2
    same(
        lambda x, at: functional.grid_sample(x, at, mode=mode, padding_mode=padding, align_corners=False),
        torch.randn(2, 3, 5, 6),
        positions,
    )
    if mode == "bilinear":
        same(lambda x, at: functional.grid_sample(x, at, align_corners=True), torch.randn(1, 2, 4, 4, 4), torch.rand(1, 3, 3, 3, 3) * 2 - 1)


def test_histograms() -> None:
    x = torch.tensor([-2.0, -1.9, 0.0, 0.3, 1.99, 2.0, 2.1, -7.0])
    same(lambda x: (torch.histc(x, 8, -2, 2), torch.histc(x, 5), torch.histc(torch.ones(3), 4)), x)


def test_sizes_that_a_run_counts() -> None:
    x = torch.randn(4, 6)
    same(lambda x: torch.nonzero(x > 0), x)
    same(lambda x: (torch.nonzero(x > 0.5, as_tuple=True)[1] + 1, torch.argwhere(x < 0)), x)
    same(lambda x: x[x > 0] * 2, x.abs() - 0.3)
    for width in (3, 7):
        with torch.no_grad():
            same(lambda x: (x[:, x[0] > 0].sum(0), x.masked_select(x > 9)), torch.randn(4, width))


def test_operands_without_axes_and_without_elements() -> None:
    """A scalar is written to as a vector of one element is; what is empty has results."""
    x, one, index = torch.tensor(2.0), torch.tensor(3.0), torch.tensor(0)
    same(lambda x, one: (x.scatter_add(0, index, one), x.scatter(0, index, one), x.scatter_reduce(0, index, one, "mean")), x, one)
    same(lambda x: (x.sort(), x.median(), x.cummax(0), x.kthvalue(1), x.argmax(), x.max(0), x.unfold(0, 1, 1)), x)
    same(lambda x: (linalg.inv(x), linalg.det(x)), torch.zeros(0, 0))
    same(lambda x: functional.multilabel_margin_loss(x, index), x)


def test_parts_are_replaced_in_steps() -> None:
    x, part, row = torch.randn(4, 7), torch.randn(4, 2), torch.randn(7)
    same(lambda x, part: (x.slice_scatter(part, 1, 1, 6, 3), x.slice_scatter(part, 1, -4, -2), x.slice_scatter(part, 1, 5)), x, part)
    same(lambda x, row: (x.select_scatter(row, 0, -2), x.unfold(1, 3, 2), x.unfold(0, 2, 1)), x, row)


def test_derivatives_of_pooling() -> None:
    image = torch.randn(2, 3, 6, 5)
    same(lambda x: (functional.avg_pool2d(x, 2), functional.avg_pool2d(x, 3, 2, 1), functional.avg_pool2d(x[0], 2)), image)
    same(lambda x: functional.max_pool2d(x, (3,), 2, 1, return_indices=True), image)
    volume = torch.randn(1, 2, 4, 5, 6)
    same(lambda x: (functional.avg_pool3d(x, 2), functional.max_pool3d(x, 2)), volume)


def test_the_next_number() -> None:
    x, y = torch.tensor([0.0, 1.0, -1.0, torch.inf, 1e-45]), torch.tensor([1.0, 2.0, torch.nan, 0.0, -1.0])
    with torch.no_grad():
        same(torch.nextafter, x, y)
