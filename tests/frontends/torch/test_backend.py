"""`torch.compile(..., backend=tcomp)`: inference, training, free sizes, parameters that change, and what stays in PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")

from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from tcomp import torch_backend
from tcomp.autotune.database.store import Database
from tcomp.errors import InputError
from tcomp.torch_backend import _Call, _Settings, tcomp_backend

STRICT = {"strict": True, "threads": 1}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.pool = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.MaxPool2d(3, 2, 1)
        self.last = nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        x = functional.relu(self.norm(self.first(x)))
        x = self.pool(x + functional.silu(self.depthwise(x)))
        return self.last(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Transformer(nn.Module):
    """Two heads of attention, causal, and what comes around them."""

    def __init__(self, width: int = 16, words: int = 20) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(16, width)
        self.norm, self.inputs, self.outputs = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.head = nn.Linear(width, words)

    def forward(self, ids: Any) -> Any:
        batch, count = ids.shape
        x = self.words(ids) + self.places(torch.arange(count))
        q, k, v = self.inputs(self.norm(x)).view(batch, count, 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, count, -1)
        x = x + self.outputs(mixed)
        return self.head(x + self.feed(x))


def compiled(module: Any, **options: Any) -> Any:
    return torch.compile(module, backend=tcomp_backend, options=STRICT, **options)


def close(found: Any, wanted: Any, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=1e-5)


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "residual": (Residual, lambda: torch.randn(2, 3, 16, 16)),
    "transformer": (Transformer, lambda: torch.randint(0, 20, (2, 7))),
}


def test_pytorch_finds_the_backend() -> None:
    (found,) = (e for e in entry_points(group="torch_dynamo_backends") if e.name == "tcomp")
    assert found.load() is tcomp_backend


@pytest.mark.parametrize("name", CASES)
def test_inference_of_whole_graphs(name: str) -> None:
    make, inputs = CASES[name]
    module, x = make().eval(), inputs()
    with torch.no_grad():
        close(compiled(module)(x), module(x))


def test_sizes_are_free() -> None:
    module = Transformer().eval()
    run = compiled(module, dynamic=True)
    with torch.no_grad():
        for shape in ((2, 7), (3, 5), (4, 16)):
            ids = torch.randint(0, 20, shape)
            close(run(ids), module(ids))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_parameters_that_change() -> None:
    """They are constants, whose layout is chosen beforehand, until they change."""
    module = Residual().eval()
    run, x = compiled(module), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        for _ in range(2):
            close(run(x), module(x))
            module.first.weight.mul_(2)
            module.norm.running_mean.add_(1)
        close(run(x), module(x))


@pytest.mark.parametrize("name", CASES)
def test_training(name: str) -> None:
    make, inputs = CASES[name]
    x, losses = inputs(), []
    wanted = torch.randint(0, 5, (2,) if name == "residual" else (2, 7))
    for compile_it in (False, True):
        torch.manual_seed(1)
        module = make()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        run, found = compiled(module) if compile_it else module, []
        for _ in range(6):
            y = run(x)
            loss = functional.cross_entropy(y.reshape(-1, y.shape[-1]), wanted.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    close(torch.tensor(losses[1]), torch.tensor(losses[0]))
    assert losses[1][-1] < losses[1][0]


def test_the_backward_pass_gets_sources_of_views(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []
    monkeypatch.setattr(torch_backend, "_Compiled", lambda graph, *_: graphs.append(graph) or graph.forward)

    def f(x: Any, w: Any) -> Any:
        heads = (x @ w.t()).view(4, 6, 2, 4).transpose(1, 2)
        return (heads @ heads.transpose(2, 3)).tanh().sum() + heads[0].sin().sum()

    x, w = torch.randn(24, 5, requires_grad=True), torch.randn(8, 5, requires_grad=True)
    compiled = torch.compile(f, backend="tcomp")
    found, wanted = (torch.autograd.grad(g(x, w), (x, w)) for g in (compiled, f))
    torch.testing.assert_close(found, wanted)
    forward, backward = graphs
    results = forward.graph.output_node().args[0][1:]
    assert [n.name for n in results] == [n.name for n in backward.graph.find_nodes(op="placeholder")][: len(results)]
    assert all(n.target not in (torch.ops.aten.permute.default, torch.ops.aten.view.default) for n in results)


def test_inputs_that_are_saved_are_not_copied() -> None:
    x = torch.randn(3, 4)
    graph = make_fx(lambda x: (x, x.exp()))(x)
    for node in graph.graph.nodes:
        node.meta.setdefault("val", x)
    found = _Call(graph, {}, _Settings(strict=True, threads=1))(x)
    assert found[0] is x
    assert _Call(graph, {}, _Settings(strict=True, threads=1), changed=(0,))(x)[0] is not x


def test_rows_of_attention_may_be_masked_as_a_whole() -> None:
    q, k, v = (torch.randn(2, 3, 7, 4, requires_grad=True) for _ in range(3))
    mask = torch.rand(7, 7) > 0.3
    mask[5] = False
    found, wanted = (
        attend(q, k, v, attn_mask=mask)
        for attend in (torch.compile(functional.scaled_dot_product_attention, backend="tcomp", options=STRICT), functional.scaled_dot_product_attention)
    )  # fmt: skip
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), (q, k, v)) for y in (found, wanted)))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_labels_end_at_the_first_that_is_none(reduction: str) -> None:
    x, target = torch.randn(5, 7, requires_grad=True), torch.randint(0, 7, (5, 7))
    target[0, 3], target[1, 0], target[2, 6] = -1, -1, -1
    for rows in (slice(None), 0):
        wanted = functional.multilabel_margin_loss(x[rows], target[rows], reduction=reduction)
        found = torch.compile(functional.multilabel_margin_loss, backend="tcomp", options=STRICT)(
            x[rows], target[rows], reduction=reduction
        )
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (found, wanted)))


def test_wrong_data_are_told_by_pytorch_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    x, wrong = torch.randn(3, 4), torch.tensor([1, 5])
    with caplog.at_level(logging.WARNING, "tcomp"), pytest.raises(IndexError, match="index 5 is out of bounds"):
        torch.compile(lambda x, i: x[i], backend="tcomp")(x, wrong)
    assert "is done again in PyTorch" in caplog.text
    torch._dynamo.reset()
    with pytest.raises(InputError, match="out of range"):
        torch.compile(lambda x, i: x[i], backend="tcomp", options=STRICT)(x, wrong)


def test_what_there_is_no_operator_for_stays_in_pytorch(caplog: pytest.LogCaptureFixture) -> None:
    def function(x: Any) -> Any:
        return torch.linalg.svdvals(x * 2 + 1).sum() * 3

    x = torch.randn(4, 4)
    with caplog.at_level(logging.WARNING, "tcomp"):
        close(torch.compile(function, backend=tcomp_backend)(x), function(x))
    assert "operators run in PyTorch: aten._linalg_svd" in caplog.text
    torch._dynamo.reset()
    with pytest.raises(Exception, match="_linalg_svd.* is not supported"):
        compiled(function)(x)


def test_sizes_as_results_of_a_graph_of_tensors_alone() -> None:
    """A piece of a graph may have such results, and no placeholder that is the size."""
    graph = make_fx(lambda x: (x * 2, x.shape[0] * 3), tracing_mode="symbolic")(torch.randn(4, 2))
    run = _Call(graph, {}, _Settings(strict=True, threads=1))
    for n in (4, 5):
        x = torch.randn(n, 2)
        doubled, size = run(x)
        close(doubled, x * 2)
        assert size == 3 * n


def test_numbers_that_are_no_extent_of_any_input() -> None:
    def function(x: Any, n: int) -> Any:
        return x.sum() / n + torch.arange(n)

    run = compiled(function, dynamic=True)
    for n in (5, 7, 300):
        x = torch.randn(4, 2)
        close(run(x, n), function(x, n))


def test_reading_memory_of_free_sizes_stays_in_pytorch(caplog: pytest.LogCaptureFixture) -> None:
    """A piece that ends before `as_strided` would leave the elements in another order."""

    def function(x: Any) -> Any:
        return (x + 1).t().as_strided((x.shape[0] - 1, 4), (3, 1)) * 2

    with caplog.at_level(logging.WARNING, "tcomp"):
        x = torch.randn(5, 3)
        close(torch.compile(function, backend=tcomp_backend, dynamic=True)(x), function(x))
    assert "sizes are symbolic" in caplog.text


def test_random_numbers() -> None:
    """Of the right distribution, others in every run, the same after the same seed, and not related to each other."""

    def function(x: Any) -> Any:
        dropped = functional.dropout(x, 0.25)
        made = torch.rand(4000), torch.randn(4000), torch.empty(4000).uniform_(2, 3), torch.empty(4000).normal_(5, 2)
        return dropped, torch.rand_like(x), torch.randn_like(x), torch.bernoulli(x * 0.3), *made

    run, x = compiled(function), torch.ones(4000)
    torch.manual_seed(3)
    first, second = run(x), run(x)
    torch.manual_seed(3)
    assert all(map(torch.equal, run(x), first)) and not any(map(torch.equal, first, second))
    wanted = [(1, 0.577), (0.5, 0.289), (0, 1), (0.3, 0.458), (0.5, 0.289), (0, 1), (2.5, 0.289), (5, 2)]  # means, and deviations
    for found, (mean, deviation) in zip(first, wanted, strict=True):
        assert abs(found.mean() - mean) < 0.08 * deviation and abs(found.std() - deviation) < 0.1 * deviation
    related = torch.corrcoef(torch.stack([*first])) - torch.eye(len(first))
    assert related.abs().max() < 0.08


def test_training_with_dropout() -> None:
    """The derivative knows what was dropped."""
    model = nn.Sequential(nn.Linear(8, 400), nn.Dropout(0.5), nn.Flatten())
    x = torch.randn(4, 8, requires_grad=True)
    y = compiled(model)(x)
    kept = (y != 0).float()
    assert 0.4 < kept.mean() < 0.6
    y.sum().backward()
    close(x.grad, 2 * kept @ model[0].weight.detach())
    model.eval()
    close(compiled(model)(x), model(x))


def test_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was tuned once is found in the next process, for which a reset stands here."""
    pytest.importorskip("xgboost", reason="the tuner is not installed: pip install 'tcomp[tune]'")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, w = torch.randn(8, 32), torch.randn(32, 16)
    options = {**STRICT, "tuning": 0.5}

    def sessions() -> int:
        with Database(tmp_path / "tcomp.db", create=False) as database:
            return len([*database.sessions()])

    for _ in range(2):
        run = torch.compile(lambda x: torch.relu(x @ w), backend=tcomp_backend, options=options)
        close(run(x), torch.relu(x @ w))
        assert sessions() == 1
        torch._dynamo.reset()


def test_options_that_there_are_not() -> None:
    with pytest.raises(Exception, match="no option `fast`"):
        torch.compile(torch.relu, backend=tcomp_backend, options={"fast": 1})(torch.ones(2))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mixed types": lambda x, i: x * i + 2 * i - i / 3,
    "rounded quotients": lambda x, i: (torch.div(i, 3, rounding_mode="floor"), torch.div(i, -2, rounding_mode="trunc"), x // 0.3, i % 3),
    "converted": lambda x, i: (torch.ops.prims.convert_element_type(x * 3, torch.int32), x.to(torch.float64), i.bool()),
    "memory": lambda x, i: (
        (x + 1).t().as_strided((2, 4), (3, 1), 1),
        (x * 2).permute(1, 0)[1:].as_strided((2, 2, 3), (4, 2, 1)),
        x.exp().t().contiguous().t().as_strided((3, 3), (1, 4)),
    ),
    "slices": lambda x, i: (x[:, 1:-1:2], x[-1], x[..., None], torch.cat([x, x[:, :2]], 1), x.flip(1), x.roll(1, 0)),
    "indices": lambda x, i: (x[i[0] % 3], x[:, i[0] % 5], x[i % 3, i % 5], x.gather(1, i % 5), x.index_select(1, i[0] % 5)),
    "writes": lambda x, i: (
        torch.zeros(3, 5).scatter(1, i % 5, x[:, :4]),
        torch.zeros(5).index_put((i[0] % 5,), x[0, :4], accumulate=True),
    ),
    "reductions": lambda x, i: (x.sum(), x.mean(1), x.var(0), x.amax(1), x.max(1), i.sum(0), (x > 0).any(1), x.argmin(0), x.prod(1)),
    "order": lambda x, i: (x.sort(1), x.topk(2, 1), x.cumsum(1), torch.tril(x), torch.triu(x, 1)),
    "reduced writes": lambda x, i: tuple(
        function(x, 1, index, x[:, :4] + 1, how, include_self=own)
        for function, index in ((torch.scatter_reduce, i % 5), (torch.index_reduce, i[0] % 5))
        for how in ("mean", "amax", "prod")
        for own in (True, False)
    ),
    "chosen": lambda x, i: (
        x.median(1),
        torch.where(x > 1, torch.nan, x).median(),
        x.kthvalue(2, 1),
        x.masked_scatter(x > 0, x * 2),
        torch.searchsorted(x[0].sort()[0], x, right=True),
        torch.ops.aten.index_put(x, [None, i[0] % 5], x[:, :4]),
        torch.empty(0, 3) @ torch.ones(3, 16),
    ),
    "functions": lambda x, i: (x.expm1(), (x * x).log1p(), x.abs().rsqrt(), x.erf(), x.abs() ** 1.7, x.clamp(-0.5, 0.5), i.clamp(min=1)),
    "special functions": lambda x, i: (
        torch.erfinv(x.tanh()),
        torch.erfc(x),
        torch.special.erfcx(x),
        torch.lgamma(torch.cat([x, i], 1)),
        torch.digamma(i),
        *(torch.polygamma(n, x * 3) for n in range(4)),
        torch.special.zeta(x[:, :4].abs() + 1.5, i + 1),
        torch.i0(x * 9),
        torch.special.i1(x * 9),
        torch.special.i0e(i),
        torch.special.i1e(x),
        torch.mvlgamma(i + 3, 2),
        torch.special.log_ndtr(x * 3),
    ),
    "made of nothing": lambda x, i: (torch.arange(5) + x, torch.full((3, 5), 2.5) * x, torch.ones_like(i), torch.arange(0, 1, 0.2)),
    "complete windows": lambda x, i: (
        functional.avg_pool2d(x[None, None], 3, 2, 1),
        functional.avg_pool2d(x[None], 2, 2, 1, ceil_mode=True),
        functional.avg_pool2d(x[None], 2, 2, 1, ceil_mode=True, count_include_pad=False),
        functional.pad(x, (1, 2, 0, 1), value=7.0),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators(name: str) -> None:
    x, i = torch.randn(3, 5), torch.randint(0, 9, (3, 5 if name in ("mixed types", "rounded quotients") else 4))
    if name == "made of nothing":
        i = i[:, :1]
    function = FUNCTIONS[name]
    found, wanted = torch.compile(function, backend=tcomp_backend, options=STRICT)(x, i), function(x, i)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats(dtype: Any) -> None:
    x, w = torch.randn(4, 6).to(dtype), torch.randn(6, 3).to(dtype)

    def function(x: Any, w: Any) -> Any:
        return torch.softmax(functional.gelu(x @ w) * 2, -1), torch.linalg.vector_norm(x * 20, 4), functional.instance_norm(x[None])

    torch.testing.assert_close(compiled(function)(x, w), function(x, w), rtol=2e-2, atol=2e-2)


def test_steps_of_optimizers() -> None:
    """Each is one graph; fused multiply-adds are prims that PyTorch defines when it traces a step."""
    adam, sgd = partial(torch.optim.Adam, lr=0.1), partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    fused = partial(torch.optim.AdamW, lr=0.1, fused=True, amsgrad=True, maximize=True), partial(sgd, fused=True, weight_decay=0.1)
    for make in (adam, sgd, partial(torch.optim.RMSprop, lr=0.1), partial(adam, foreach=True), partial(sgd, foreach=True), *fused):
        found = []
        for compile_it in (False, True):
            torch.manual_seed(0)
            parameters = [nn.Parameter(torch.randn(3, n)) for n in (4, 5)]
            optimizer = make(parameters)
            step = compiled(lambda optimizer=optimizer: optimizer.step()) if compile_it else optimizer.step
            for _ in range(3):
                for p in parameters:
                    p.grad = torch.sin(p.detach())
                step()
            found.append([p.detach() for p in parameters])
        close(found[1], found[0])


def test_inputs_are_written_where_they_lie() -> None:
    """What reads a parameter after it is written, or cannot write to it in order, reads what was there before."""

    def step(x: Any, y: Any, z: Any) -> Any:
        old = x * 2
        x.add_(y)
        y.copy_(old)
        z.copy_(z.flip(0) + x)
        return x - y

    given = [torch.arange(6.0).reshape(2, 3), torch.ones(2, 3), torch.ones(3, 2).T]
    wanted = [t.clone() for t in given]
    places = [t.data_ptr() for t in given]
    run = compiled(step)
    for _ in range(2):
        close(run(*given), step(*wanted))
        close(given, wanted)
    assert places == [t.data_ptr() for t in given]


def test_derivatives_of_cross_entropy() -> None:
    labels, weight = torch.tensor([[2, 0, 1], [4, 2, 2]]), torch.tensor([0.5, 1.0, 2.0, 0.1, 1.5])

    def loss(x: Any) -> Any:
        vectors = x.transpose(1, 2).reshape(-1, 5)
        means = functional.cross_entropy(x, labels, ignore_index=2), functional.cross_entropy(vectors[0], labels[0, 0])
        return sum(means) + functional.cross_entropy(x, labels, weight, reduction="none").square().sum()

    x = torch.randn(2, 5, 3, requires_grad=True)
    close(torch.autograd.grad(compiled(loss)(x), x), torch.autograd.grad(loss(x), x))


def test_derivatives_of_strided_convolutions() -> None:
    for channels, size, kernel, groups in ((20, 4, 3, 1), (4, 7, 3, 2), (3, 6, 1, 1)):
        x, w = (
            torch.randn(2, channels, size, size, requires_grad=True),
            (torch.randn(6, channels // groups, kernel, kernel) / 10).requires_grad_(),  # else roundings are as large as the tolerance
        )

        def function(x: Any, w: Any, groups: int = groups) -> Any:
            return functional.conv2d(x, w, stride=2, padding=w.shape[-1] // 2, groups=groups).sin()

        torch._dynamo.reset()  # else sizes are free
        found, wanted = (torch.autograd.grad(f(x, w).sum(), (x, w)) for f in (compiled(function), function))
        close(found, wanted)
