"""Recurrences of PyTorch through `torch.compile(..., backend=tcomp)`: results and derivatives are those of eager PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")

from torch import nn

from tcomp.torch_backend import tcomp_backend

STRICT = {"strict": True, "threads": 1}
LAYERS = {
    "lstm": lambda: nn.LSTM(3, 5, batch_first=True),
    "gru": lambda: nn.GRU(3, 5, num_layers=2, bidirectional=True),
    "rnn": lambda: nn.RNN(3, 5, nonlinearity="relu", bias=False),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        yield
    torch._dynamo.reset()


def results(layer: Any, run: Any, *args: Any) -> list[Any]:
    """The output, the last states, and the derivatives of a function of both."""
    layer.zero_grad()
    y, states = run(*args)
    states = states if isinstance(states, tuple) else (states,)
    (y.square().sum() + sum((s * s.detach().cos()).sum() for s in states)).backward()
    return [y.detach(), *(s.detach() for s in states), *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize("name", LAYERS)
def test_derivatives(name: str) -> None:
    layer, x = LAYERS[name](), torch.randn(4, 2, 3)
    run = torch.compile(layer, backend=tcomp_backend, options=STRICT)
    torch.testing.assert_close(results(layer, run, x), results(layer, layer, x), rtol=1e-4, atol=1e-5)


def test_inference_of_any_length_with_a_state() -> None:
    layer = nn.LSTM(3, 5).eval()
    run = torch.compile(layer, backend=tcomp_backend, options=STRICT, dynamic=True)
    with torch.no_grad():
        for steps in (4, 7, 1):
            x, state = torch.randn(steps, 2, 3), (torch.randn(1, 2, 5), torch.randn(1, 2, 5))
            torch.testing.assert_close(run(x, state), layer(x, state), rtol=1e-4, atol=1e-5)


def test_layers_with_a_projected_state_are_pytorchs_own() -> None:
    layer, x = nn.LSTM(3, 5, proj_size=2), torch.randn(2, 2, 3)
    run = torch.compile(layer, backend=tcomp_backend, options=STRICT)
    torch.testing.assert_close(results(layer, run, x), results(layer, layer, x), rtol=1e-4, atol=1e-5)


def test_scans() -> None:
    from torch._higher_order_ops.scan import scan

    def step(total: Any, x: Any) -> Any:
        return total + x, (total * x).sin()

    def both(x: Any) -> Any:
        return [scan(step, torch.zeros(3), x, reverse=reverse) for reverse in (False, True)]

    x = torch.randn(4, 3)
    torch.testing.assert_close(torch.compile(both, backend=tcomp_backend, options=STRICT)(x), both(x), rtol=1e-5, atol=1e-6)
