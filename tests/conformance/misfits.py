"""One-node cases of the ONNX backend suite in which one input has another shape, or an attribute another value, which the operator may not
allow: each model is refused with an error of its own, or a run of it touches nothing outside of its arrays, which lie between inaccessible
pages.

`python -m tests.conformance.misfits --start 0 --step 1` runs all of them, `--free` with symbolic extents of all inputs, so that only a run
can tell that they do not fit.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from onnx import AttributeProto, ModelProto, helper

import tcomp
from tcomp.errors import TcompError
from tcomp.runtime.module import Module
from tests.conformance.suite import Suite
from tests.runtime.guarded import run_guarded, spread

MAX_ELEMENTS = 100_000  # of an input
REFUSED, INSIDE, OUTSIDE, FAILED = "refused", "inside", "outside", "failed"


def other_shapes(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Shapes with one extent or one axis more or less."""
    for axis, extent in enumerate(shape):
        yield from ((*shape[:axis], extent + more, *shape[axis + 1 :]) for more in (1, -1, 3) if extent + more > 0)
    if shape:
        yield tuple(shape[1:])
    yield from ((n, *shape) for n in (1, 2))


def other_values(attribute: AttributeProto) -> Iterator[AttributeProto]:
    """An attribute of integers with one of them changed, or one more or less."""
    lists: list[list[int]] = []
    if attribute.type == AttributeProto.INT:
        lists = [[attribute.i + more] for more in (1, -1, 7, 1 << 33)] + [[-attribute.i - 1]]
    elif attribute.type == AttributeProto.INTS:
        ints = [*attribute.ints]
        lists = [ints[:k] + [n + more] + ints[k + 1 :] for k, n in enumerate(ints) for more in (1, -1, 7, 1 << 33)]
        lists += [ints[1:], [*ints, 1]]
    for values in lists:
        other = AttributeProto(name=attribute.name, type=attribute.type)
        if attribute.type == AttributeProto.INT:
            other.i = values[0]
        else:
            other.ints.extend(values)
        yield other


def variants(model: ModelProto, arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, ModelProto, Mapping[str, np.ndarray]]]:
    """(what is another, a model, arrays for its inputs)."""
    for name, array in arrays.items():
        for shape in other_shapes(array.shape) if 0 < array.size <= MAX_ELEMENTS else ():
            yield f"`{name}` {list(array.shape)} -> {list(shape)}", model, {**arrays, name: np.resize(array, shape)}
    for n, node in enumerate(model.graph.node):
        for k, attribute in enumerate(node.attribute):
            for other in other_values(attribute):
                changed = ModelProto()
                changed.CopyFrom(model)
                changed.graph.node[n].attribute[k].CopyFrom(other)
                yield helper.printable_attribute(other), changed, arrays


def judged(suite: Suite, name: str, free: bool = False) -> Iterator[tuple[str, str]]:
    """(outcome, what) of each variant of a case."""
    case = suite.cases[name]
    given = case.data_sets[0][0] if case.model is not None and case.data_sets else []
    if case.model is None or len(given) != len(case.model.graph.input) or not all(isinstance(x, np.ndarray) for x in given):
        return
    arrays = {v.name: x for v, x in zip(case.model.graph.input, given, strict=True)}
    for other, model, inputs in variants(case.model, arrays):
        what = f"{name}: {other}"
        try:
            fault = _fault(model, inputs, free)
            yield (OUTSIDE, f"{what}: {fault}") if fault else (INSIDE, what)
        except (TcompError, OSError):  # there is no memory of 8 GiB and more between guards
            yield REFUSED, what
        except Exception as error:  # noqa: BLE001  a finding, not the end
            yield FAILED, f"{what}: {type(error).__name__}: {error}"


def _fault(model: ModelProto, inputs: Mapping[str, np.ndarray], free: bool) -> str:
    """The first access of a run outside of its arrays, if there is one."""
    other = ModelProto()
    other.CopyFrom(model)
    for value in other.graph.output:
        value.type.tensor_type.ClearField("shape")
    for value in other.graph.input:
        declared = value.type.tensor_type.shape
        declared.Clear()
        declared.SetInParent()
        for axis, extent in enumerate(inputs[value.name].shape):
            declared.dim.add(**{"dim_param": f"{value.name}{axis}"} if free else {"dim_value": extent})
    with spread() as regions:
        module = tcomp.compile(other, threads=1)
        if not isinstance(module, Module):  # the host computes some of it
            module.run(inputs)
            return ""
        _, faults = run_guarded(module, inputs, regions=regions)
    return faults[0] if faults else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=int, default=0, help="the number of the first case")
    parser.add_argument("--step", type=int, default=1, help="one case of so many")
    parser.add_argument("--free", action="store_true", help="with symbolic extents")
    arguments = parser.parse_args()
    suite, counts = Suite(), Counter[str]()
    for name in sorted(n for n, case in suite.cases.items() if case.kind == "node")[arguments.start :: arguments.step]:
        for outcome, what in judged(suite, name, arguments.free):
            counts[outcome] += 1
            if outcome in (OUTSIDE, FAILED):
                print(what, flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
