"""PyTorch's own samples of all operators through `torch.compile(backend="tcomp")`: `python -m tests.frontends.torch.op_db [--only add,mul]`.

For each operator of `op_db`, element type and sample: the results of eager PyTorch and of the compiled function are compared, and with
`--backward` the gradients. A sample is "equal", "nearer" (than eager PyTorch to the result in float64), "wrong", or an "error" (that eager
PyTorch does not have); "whole" says that no operator of it ran in PyTorch. Lines of JSON go to `--out`, and what is there already is not done again.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.testing import assert_close
from torch.testing._internal.common_device_type import toleranceOverride
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

from tcomp.torch_backend import tcomp_backend

DTYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool, "float16": torch.float16, "bfloat16": torch.bfloat16}
RANDOM = ("rand", "bernoulli", "multinomial", "dropout", "normal", "exponential", "geometric", "cauchy", "empty", "uniform")


class Heard(logging.Handler):
    """What the backend says runs in PyTorch."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def grads(result: Any, inputs: Any) -> list[Any]:
    """Gradients of the sum of all floating results."""
    total = sum(t.sum() for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor) and t.requires_grad)
    wanted = [t for t in tree_flatten(inputs)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    return list(torch.autograd.grad(total, wanted, allow_unused=True)) if isinstance(total, torch.Tensor) and wanted else []


def tolerances(op: Any, dtype: torch.dtype) -> dict[str, float]:
    """The largest that the operator's own entry has for this type, where it has some."""
    found = [
        d.d[dtype] for info in op.decorators for d in getattr(info, "decorators", ()) if isinstance(d, toleranceOverride) and dtype in d.d
    ]
    return {"atol": max(t.atol for t in found), "rtol": max(t.rtol for t in found)} if found else {}


def compare(op: Any, sample: Any, found: Any, wanted: Any, close: dict[str, float]) -> None:
    """Raises `AssertionError` for results that differ; where PyTorch leaves open which of equal elements is meant, any is right."""
    free = op.name in ("topk", "kthvalue") or (op.name == "sort" and not sample.kwargs.get("stable"))
    if free and sample.input.dim():
        given = sample.args[op.name != "sort" :]
        dim = sample.kwargs.get("dim", given[0] if given else -1)
        places = found.indices if found.indices.dim() == sample.input.dim() else found.indices.unsqueeze(dim)
        assert_close(sample.input.gather(dim, places).reshape(found.values.shape), found.values, equal_nan=True, rtol=0, atol=0)
        found, wanted = found.values, wanted.values
    if op.name == "argsort" and not sample.kwargs.get("stable") and sample.input.dim():
        dim = sample.kwargs.get("dim", sample.args[0] if sample.args else -1)
        found, wanted = (sample.input.gather(dim, places) for places in (found, wanted))
    assert_close(found, wanted, equal_nan=True, **close)


def nearer(op: Any, sample: Any, found: Any, wanted: Any, backward: bool = False) -> bool:
    """Whether results, or gradients, are no farther from those in float64 than eager PyTorch's are, which may round more often."""
    x, args, kwargs = tree_map(
        lambda t: t.detach().double().requires_grad_(backward) if isinstance(t, torch.Tensor) and t.is_floating_point() else t,
        (sample.input, sample.args, sample.kwargs),
    )
    exact = op(x, *args, **kwargs)
    exact = grads(exact, (x, args, kwargs)) if backward else exact
    tensors = [[t for t in tree_flatten(r)[0] if isinstance(t, torch.Tensor)] for r in (found, wanted, exact)]
    return all(torch.dist(a.double(), e, 2) <= torch.dist(b.double(), e, 2) * 1.001 for a, b, e in zip(*tensors, strict=True))


def judged(op: Any, sample: Any, backward: bool, dtype: torch.dtype) -> tuple[str, str, str]:
    """(verdict, details, what ran in PyTorch) of one sample."""
    heard, close = Heard(), tolerances(op, dtype)
    logging.getLogger("tcomp").addHandler(heard)
    given = sample.input, sample.args, sample.kwargs

    def fresh() -> Any:
        return tree_map(lambda t: t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t, given)

    def function(x: Any, args: Any, kwargs: Any) -> Any:
        return op(x, *args, **kwargs)

    try:
        arguments = fresh()
        wanted = function(*arguments)
        wanted_grads = grads(wanted, arguments) if backward else []
    except Exception as error:  # noqa: BLE001  a sample that PyTorch itself refuses
        return "skipped", str(error)[:200], ""
    try:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        arguments = fresh()
        found = torch.compile(function, backend=tcomp_backend, options={"threads": 1})(*arguments)
        verdict = "equal"
        try:
            compare(op, sample, found, wanted, close)
        except AssertionError:
            if not dtype.is_floating_point or not nearer(op, sample, found, wanted):
                raise
            verdict = "nearer"
        if backward:
            found_grads = grads(found, arguments)
            try:
                assert_close(found_grads, wanted_grads, equal_nan=True, **close)
            except AssertionError:
                if not nearer(op, sample, found_grads, wanted_grads, True):
                    raise
                verdict = "nearer"
    except AssertionError as error:
        return "wrong", str(error)[:400], "; ".join(heard.messages)
    except Exception as error:  # noqa: BLE001  whatever else is a finding
        return "error", f"{type(error).__name__}: {error}"[:400], "; ".join(heard.messages)
    finally:
        logging.getLogger("tcomp").removeHandler(heard)
    if not torch._dynamo.utils.counters["stats"]["unique_graphs"] and not heard.messages:
        return verdict, "", "Dynamo makes no graph of it"
    return verdict, "", "; ".join(heard.messages)


def samples(op: Any, dtype: torch.dtype, backward: bool, count: int) -> Iterator[Any]:
    yield from (s for _, s in zip(range(count), op.sample_inputs("cpu", dtype, requires_grad=backward), strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of operators, comma-separated")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--every", type=int, default=1, help="take every n-th operator")
    parser.add_argument("--samples", type=int, default=3, help="of each operator and element type")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0, help="of one operator and element type, at which its samples end")
    parser.add_argument("--out", type=Path, default=Path("op_db.jsonl"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("tcomp").propagate = False
    known = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(r["op"], r["dtype"]) for r in known}
    with options.out.open("a") as file:
        for op in op_db[:: options.every]:
            if any(word in op.name for word in RANDOM) or (options.only and op.name not in options.only.split(",")):
                continue
            for name in options.dtypes.split(","):
                label = f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}"
                supported = op.supported_dtypes("cpu") if not options.backward else op.supported_backward_dtypes("cpu")
                if (label, name) in done or DTYPES[name] not in supported or (options.backward and not op.supports_autograd):
                    continue
                verdicts, end = list[tuple[str, str, str]](), time.monotonic() + options.seconds
                try:
                    for sample in samples(op, DTYPES[name], options.backward, options.samples):
                        verdicts.append(judged(op, sample, options.backward, DTYPES[name]))
                        if time.monotonic() > end:
                            break
                except Exception as error:  # noqa: BLE001  samples that cannot be made here
                    verdicts.append(("skipped", str(error)[:200], ""))
                record = {"op": label, "dtype": name, "verdicts": verdicts}
                known.append(record)
                print(json.dumps(record), file=file, flush=True)
    counts = Counter(v[0] for r in known for v in r["verdicts"])
    whole = sum(v[0] in ("equal", "nearer") and not v[2] for r in known for v in r["verdicts"])
    print(f"{sum(counts.values())} samples: {dict(counts)}, {whole} without a piece in PyTorch")
    if bad := [(r["op"], r["dtype"], *v) for r in known for v in r["verdicts"] if v[0] in ("wrong", "error")]:
        raise SystemExit("\n".join(map(str, bad)))


if __name__ == "__main__":
    main()
