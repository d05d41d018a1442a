"""`tcomp.compile` of modules and exported programs of PyTorch, and `tcomp compile model.pt2`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")

from torch import nn
from torch.nn import functional

import tcomp
from tcomp.cli.app import app
from tcomp.errors import ImportModelError, InputError, TcompError, UnsupportedError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Any, y: Any) -> Any:
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3)) * self.scale
        return self.last(x) + y.to(torch.float32), x.argmax(1)


def inputs(batch: int) -> tuple[Any, Any]:
    return torch.randn(batch, 3, 8, 8), torch.randn(batch, 5)


def check(module: tcomp.runtime.LoadedModel, net: nn.Module, batch: int) -> None:
    args = inputs(batch)
    found = module(*args)
    for a, b in zip(found, net(*args), strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_modules_with_free_sizes() -> None:
    torch.manual_seed(0)
    net, batch = Net().eval(), torch.export.Dim("batch")
    module = tcomp.compile(net, args=inputs(4), dynamic_shapes={"x": {0: batch}, "y": {0: batch}})
    assert [spec.name for spec in module.inputs] == ["x", "y"]
    for size in (1, 3):
        check(module, net, size)


def test_exported_programs_and_their_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, path = Net().eval(), tmp_path / "net.pt2"
    program = torch.export.export(net, inputs(2))
    check(tcomp.compile(program), net, 2)
    torch.export.save(program, path)
    app(["compile", str(path), "-o", str(tmp_path / "net.tcomp")], standalone_mode=False)
    check(tcomp.load(tmp_path / "net.tcomp"), net, 2)


def refused(kind: type[TcompError], match: str, *given: Any, **options: Any) -> None:
    with pytest.raises(kind, match=match):
        tcomp.compile(*given, **options)


class Several(nn.Module):
    """Operators that torch.export keeps, and torch.compile takes apart."""

    def forward(self, x: Any) -> Any:
        square = x[..., :8] + torch.eye(8)
        return [
            functional.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=True),
            functional.interpolate(x, size=(5, 13), mode="nearest"),
            functional.interpolate(x, scale_factor=2.0, mode="bicubic"),
            functional.adaptive_max_pool2d(x, (4, 5)),
            torch.cdist(x, x + 1),
            torch.linalg.det(square),
            x[..., torch.tril_indices(3, 3)[0]],
        ]


def test_operators_that_exported_programs_keep() -> None:
    module = tcomp.compile(Several(), args=(torch.ones(2, 3, 8, 10),), dynamic_shapes=({0: torch.export.Dim("batch")},), threads=1)
    for batch in (1, 3):
        x = torch.randn(batch, 3, 8, 10)
        for got, wanted in zip(module.run({module.inputs[0].name: x.numpy()}).values(), Several()(x), strict=True):
            np.testing.assert_allclose(got, wanted.numpy(), rtol=2e-4, atol=1e-4)


def test_mistakes(tmp_path: Path) -> None:
    net = Net().eval()
    refused(InputError, "example inputs", net)
    refused(InputError, "leave out args", torch.export.export(net, inputs(2)), args=inputs(2))
    refused(InputError, "no dims", net, args=inputs(2), dims={"batch": 1})
    refused(InputError, "for modules of PyTorch", tmp_path / "model.onnx", args=inputs(2))
    refused(InputError, "within limits takes a file", net, args=inputs(2), max_seconds=60)
    refused(UnsupportedError, "cannot trace the Net", net, args=inputs(2)[:1])
    refused(UnsupportedError, "changes `norm.running_mean`", Net().train(), args=inputs(2))
    refused(UnsupportedError, "draws random numbers", torch.nn.Dropout(), args=(torch.ones(4),))
    (tmp_path / "bad.pt2").write_bytes(b"PK nonsense")
    refused(ImportModelError, "cannot be read", tmp_path / "bad.pt2")
