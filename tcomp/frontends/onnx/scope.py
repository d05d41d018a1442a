"""The graph that ONNX nodes are added to, and what is known of its values at compile time, shape arithmetic included (see `symbolic`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from tcomp.errors import ImportModelError, UnsupportedError
from tcomp.frontends.onnx import symbolic
from tcomp.frontends.onnx.signature import LARGEST
from tcomp.ir import shape_operands
from tcomp.ir.broadcasting import BroadcastMismatch, SizeMismatch
from tcomp.ir.dtypes import NARROW, is_float, itemsize, to_numpy
from tcomp.ir.equations import Contradiction, Sizes
from tcomp.ir.expr import Dim, Expr, as_expr, binary, bounds, dim, equal, evaluate_int, postorder, variables, walk, with_sources
from tcomp.ir.graph import (
    SIZE,
    STRUCTURAL,
    Application,
    Graph,
    GraphBuilder,
    Inputs,
    Needed,
    Node,
    Operator,
    Value,
    application,
    is_needed,
    materialised,
    needs,
)  # fmt: skip
from tcomp.ir.interpreters.te import evaluate
from tcomp.ir.simplify import as_dim, prove, same_dim
from tcomp.ops.movement import BROADCAST_TO, DIMS, EXPAND, RESHAPE, WITH_SHAPE

FOLD_LIMIT = 4096  # elements: constants up to this size are computed while importing; larger ones are left to the passes
MAX_RANK = 32
MAX_EQUATIONS = 32  # between sizes that one operator needs
SAMPLED = 64  # sizes of inputs from 1 on, for which a computed size may be 1
MAX_BYTES = 1 << 42  # of one value; anything larger is a damaged or hostile model

Type = tuple[str, Sequence[Dim]]  # (dtype, shape)


class Scope:
    """A graph under construction and what is known at compile time about its values. `elements[v]` lists the elements of `v` in row-major
    order as expressions over symbolic sizes (integers as `int64`). `sizes` takes the equations between symbolic sizes that operators need;
    None in a graph that only some runs execute. `given[v]` lists the elements that values of the model's inputs give before a run: of
    operands of shapes, when they are asked for. `origin` says of which value around it an input of a body is."""

    def __init__(self, name: str, sizes: Sizes | None = None, around: Scope | None = None) -> None:
        self.builder, self.sizes = GraphBuilder(name), sizes
        self.root: Scope = self if around is None else around.root
        self.elements: dict[Value, tuple[Expr, ...]] = {}
        self.names: GraphBuilder = around.names if around is not None else self.builder  # where names of counted sizes are unique
        self.given: dict[Value, tuple[Expr, ...] | None] = {}
        self.origin: dict[Value, tuple[Scope, Value]] = {}
        self.producer: dict[Value, Node] = {}
        self.given_sizes: dict[tuple[Expr, int, int | None, Expr | None], Dim] = {}  # that are computed of given elements
        self.bounds: dict[str, int] = {}  # of numbers of trips, by the names that the caller knows them by
        self.asked: set[str] = set()  # names of bounds that may be given
        self.counted_sizes: set[Expr] = set()  # those that only a run tells

    def known(self, value: Value) -> np.ndarray | None:
        """The array of a value that is known completely."""
        return materialised(self.builder.constants.get(value))

    def known_elements(self, value: Value) -> tuple[Expr, ...] | None:
        """The elements of a small value as expressions, or None."""
        if value.dtype in NARROW:
            return None
        if value not in self.elements and (array := self.known(value)) is not None and array.size <= FOLD_LIMIT:
            self.elements[value] = symbolic.literals(array, value.dtype)
        return self.elements.get(value)

    def given_elements(self, value: Value) -> tuple[Expr, ...] | None:
        """The elements of a small value before a run, as expressions over symbolic sizes and elements of the model's inputs, or None."""
        for v in postorder([value], lambda v: [] if (node := self._waits_for(v)) is None else [i for i in node.inputs if i is not None]):
            if v not in self.given:
                self.given[v] = self._given(v)
        return self.given[value]

    def _waits_for(self, value: Value) -> Node | None:
        """The node whose inputs have to be known before `value` can be."""
        if value in self.given or self.known_elements(value) is not None or not _few(value):
            return None
        if value not in self.producer:
            self.producer.update((v, node) for node in self.builder.nodes for v in node.outputs)
        node = self.producer.get(value)
        return None if node is None or node.op in STRUCTURAL else node

    def _given(self, value: Value) -> tuple[Expr, ...] | None:
        if (known := self.known_elements(value)) is not None or not _few(value):
            return known
        if value in self.origin:
            scope, outer = self.origin[value]
            return scope.given_elements(outer)
        if self.root is self and value in self.builder.inputs:
            number = self.builder.inputs.index(value)
            found = [shape_operands.element(value.name, number, n, value.dtype) for n in range(prod(map(int, value.shape)))]
            return tuple(binary("ne", e, 0) if value.dtype == "bool" else e for e in found)
        node = self._waits_for(value)
        if node is None or not all(map(_few, node.outputs)):
            return None
        made = application(node.op, node.inputs, node.attrs)
        inputs = [(p, v) for p, v in zip(made.inputs, node.inputs, strict=True) if p is not None and v is not None]
        results = symbolic.propagate(made.outputs, {p: e for p, v in inputs if (e := self.given[v]) is not None}, exact=True)
        return None if results is None else dict(zip(node.outputs, results, strict=True))[value]

    def size(self, value: Dim, what: str, name: str, least: int = 0, most: int | None = LARGEST, valid: Expr | None = None) -> Dim:
        """A size, with its range where it depends on values of inputs, or is computed by way of floats; equal ones are one. Runs for which
        it is not `valid` are refused."""
        if not any(
            isinstance(e, Expr) and (shape_operands.depends_on_values(e) or any(is_float(part.dtype) for part in walk(e)))
            for e in (value, valid)
        ):
            return as_dim(value)
        value, valid = symbolic.computed(value), None if valid is None or prove(valid) else symbolic.computed(valid)
        if valid is not None and valid.op == "const":
            if not valid.attr:
                raise ImportModelError(f"{what} is not determined by its operands", where=name)
            valid = None
        if value.op == "const" and valid is None:
            return as_dim(value)
        if late := self.root.counted_sizes.intersection(with_sources(variables(value, *([] if valid is None else [valid])))):
            why = f"it depends on values of inputs, and on `{next(iter(late)).name}`, which only a run counts"
            raise UnsupportedError(f"{what} is not known before a run", why=why)
        sizes, key = self.root.given_sizes, (value, least, most, valid)  # of all graphs together, so that names differ
        if key not in sizes:
            sizes[key] = shape_operands.derived(self.root.builder.fresh(f"{name}.size"), value, least, most, what, valid)
        return sizes[key]

    def from_elements(self, elements: Sequence[Expr], dtype: str, shape: Sequence[int], name: str) -> Value:
        """A value made of known elements: a constant where all are literals, else a node that writes the sizes down."""
        if all(e.op == "const" for e in elements):
            array = np.array([e.attr for e in elements], to_numpy(dtype)).reshape(tuple(shape))
            return self.builder.constant(array, name, dtype)
        attrs = {"dims": tuple(as_dim(e) if e.dtype == "int64" else e for e in elements), "shape": tuple(shape), "dtype": dtype}
        (value,) = self.builder.add(DIMS, (), attrs, name)
        self.elements[value] = tuple(elements)
        return value

    def add(self, op: Operator, inputs: Inputs, attrs: Mapping[str, Any], name: str) -> tuple[Value, ...]:
        """Apply an operator; what can be computed now is. Raises `IRError` if inputs and attributes do not fit it."""
        made, inputs, attrs = self._fitted(op, inputs, attrs, name)
        for tensor in made.outputs:
            check_type(tensor.shape, tensor.dtype, name)
        if (folded := self._folded(made, inputs, f"{name}.{op.name}")) is not None:
            return folded
        return self.append(op, inputs, [(t.dtype, t.shape) for t in made.outputs], attrs, name)

    def _fitted(self, op: Operator, inputs: Inputs, attrs: Mapping[str, Any], name: str) -> tuple[Application, Inputs, Mapping[str, Any]]:
        """The TE of an operator; where sizes have to be equal, its inputs and attributes are rewritten in terms of one of them."""
        for _ in range(MAX_EQUATIONS):
            try:
                return application(op, inputs, attrs), inputs, attrs
            except SizeMismatch as error:
                first, second = error.sizes
                if not (isinstance(first, Expr) or isinstance(second, Expr)):
                    raise
                broadcast = isinstance(error, BroadcastMismatch) and (op is EXPAND or not attrs)
                if broadcast and (stretched := self._stretched(inputs, error.sizes, name)) is not None:
                    inputs = stretched
                    continue
                try:
                    noted = self.sizes is not None and self.sizes.meet(first, second, name)
                except Contradiction as never:
                    raise Contradiction(error.what, why=never.why or "no sizes of the inputs make them equal") from never
                a, b = (d if self.sizes is None else self.sizes.now(d) for d in error.sizes)

                symbolic_first = (a, b) if isinstance(a, Expr) else (b, a)

                def now(x: Any, pair: tuple[Dim, Dim] = symbolic_first) -> Any:
                    if isinstance(x, tuple | list):
                        return tuple(map(now, x))
                    size = self.sizes.now(x) if isinstance(x, Expr) and self.sizes is not None else x
                    return pair[1] if isinstance(size, Expr) and same_dim(size, pair[0]) else size

                shapes: list[Any] = [None if v is None else now(v.shape) for v in inputs]
                if op is RESHAPE and shapes == [v.shape for v in inputs if v is not None]:  # of a product that is equal to another one
                    (flat,) = self.add(RESHAPE, inputs, {"shape": (a,)}, name)
                    inputs, shapes = [flat], [(b,)]
                condition = None if noted else equal(as_expr(a), as_expr(b))
                pairs = list(zip(inputs, shapes, strict=True))
                inputs = [v if v is None or s == v.shape else self.with_shape(v, s, condition, name) for v, s in pairs]
                attrs = {key: now(value) for key, value in attrs.items()}
        raise UnsupportedError("the sizes of its inputs depend on each other in too complex a way", where=name)

    def _stretched(self, inputs: Inputs, pair: tuple[Dim, Dim], name: str) -> Inputs | None:
        """The inputs of an operator, where two sizes meet by broadcasting of which a computed one may be 1: it is stretched to the other
        one, and a run is refused in which it is neither. None where both are to be equal: none is a number, and the equation can be solved
        for the dims; no run shows that the size may be 1; or it is also the size of another axis."""
        known = any(isinstance(d, int) for d in pair)
        if self.sizes is None or (not known and self.sizes.solves(*pair)):
            return None
        size, other = pair if _may_be_stretched(*map(self.sizes.now, pair)) else pair[::-1]
        one, common = as_expr(self.sizes.now(size)), self.sizes.now(other)
        if not _may_be_stretched(one, common):
            return None
        places = [(n, d - len(v.shape)) for n, v in enumerate(inputs) if v is not None for d, x in enumerate(v.shape) if same_dim(x, size)]
        condition = binary("or", equal(one, as_expr(common)), equal(one, 1))
        once = len({n for n, _ in places}) == len(places) and len({at for _, at in places}) == 1
        if not once or not self.sizes.assume(condition, name):
            return None
        result = list(inputs)
        for n, at in places:
            if (v := inputs[n]) is not None:
                shape = (*v.shape[:at], common, *v.shape[len(v.shape) + at + 1 :])
                result[n] = self.add(BROADCAST_TO, [v], {"shape": shape}, name)[0]
        return result

    def with_shape(self, x: Value, shape: Sequence[Dim], condition: Expr | None, name: str) -> Value:
        """`x` under a shape that is its own in every run where `condition` holds; other runs end here. None: there are no others."""
        title = name if condition is None else f"{name} (which needs {condition})"
        return self.append(WITH_SHAPE, [x], [(x.dtype, shape)], {"shape": tuple(shape), "condition": condition}, title)[0]

    def append(
        self, op: Operator, inputs: Inputs, results: Sequence[Type], attrs: Mapping[str, Any], name: str, bodies: Sequence[Graph] = ()
    ) -> tuple[Value, ...]:
        """Append a node whose outputs have the given types."""
        for dtype, shape in results:
            check_type(shape, dtype, name)
        values = tuple(Value(self.builder.fresh(f"{name}.{op.name}"), dtype, shape) for dtype, shape in results)
        self.builder.append(Node(op, tuple(inputs), values, dict(attrs), name, tuple(bodies)))
        return values

    def counted(self, count: Value, bound: Dim, name: str) -> Dim:
        """A size that the run counts: the value of an int64 scalar, which is never more than `bound`, or less than 0."""
        if (elements := self.known_elements(count)) is not None:
            return as_dim(elements[0])
        size = self.new_size(name, bounds(bound)[1])
        self.set_size(size, count, bound, name)
        return size

    def trips_bound(self, name: str) -> int | None:
        """The caller's bound of a number of trips."""
        self.root.asked.add(name)
        return self.root.bounds.get(name)

    def limits(self) -> dict[Expr, Dim]:
        """The sizes that the run counts in this graph, each with what it never exceeds, over the dims around it."""
        return self.builder.build(()).counted()

    def new_size(self, name: str, hi: int | None = None) -> Expr:
        """A dim for a size that the run counts."""
        size = dim(self.names.fresh(re.sub(r"\W", "_", f"{name}_size")), 0, hi)
        self.root.counted_sizes.add(size)
        return size

    def set_size(self, size: Expr, count: Value, bound: Dim, name: str) -> None:
        """Give such a dim its value, that of an int64 scalar, which is never more than `bound`."""
        self.builder.append(Node(SIZE, (count,), (), {"dim": size, "bound": bound}, name))

    def _folded(self, made: Application, inputs: Inputs, name: str) -> tuple[Value, ...] | None:
        """The outputs as known values, or None."""
        outputs = made.outputs
        shapes = [tuple(d for d in t.shape if isinstance(d, int)) for t in outputs]
        if any(len(s) != t.ndim or prod(s) > FOLD_LIMIT for s, t in zip(shapes, outputs, strict=True)):
            return None
        given = [(v, p) for v, p in zip(inputs, made.inputs, strict=True) if v is not None and p is not None]
        arrays = {p: self.builder.constants[v] for v, p in given if v in self.builder.constants}
        if all(p in arrays for _, p in given) and sum(a.size for a in arrays.values()) <= 16 * FOLD_LIMIT and symbolic.closed(outputs):
            results = evaluate(outputs, arrays, {})
            return tuple(self.builder.constant(a, name, t.dtype) for a, t in zip(results, outputs, strict=True))
        if sum(map(prod, shapes)) > symbolic.LIMIT:
            return None
        known = {p: e for v, p in given if (e := self.known_elements(v)) is not None}
        if given and not known:
            return None
        elements = symbolic.propagate(
            outputs, known, assume=lambda condition: self.sizes is not None and self.sizes.assume(condition, name)
        )
        if elements is None:
            return None
        return tuple(self.from_elements(e, t.dtype, s, name) for e, t, s in zip(elements, outputs, shapes, strict=True))

    def finish(self, inputs: Sequence[Value], outputs: Sequence[Value]) -> Graph:
        """The closed graph; only what the outputs need is kept."""
        needed: Needed = {*outputs, *variables(*(d for v in outputs for d in v.shape if isinstance(d, Expr)))}
        nodes, counts = [], any(node.op is SIZE for node in self.builder.nodes)
        for node in reversed(self.builder.nodes):
            if is_needed(node, needed):
                nodes.append(node)
                needed.update(needs(node) if counts else node.inputs)
        constants = {v: a for v, a in self.builder.constants.items() if v in needed}
        return Graph(self.builder.name, tuple(inputs), tuple(outputs), tuple(reversed(nodes)), constants)


def _few(value: Value) -> bool:
    """Whether a value has a fixed number of elements, few enough to be looked at one by one."""
    return all(isinstance(d, int) for d in value.shape) and prod(map(int, value.shape)) <= symbolic.LIMIT


def _may_be_stretched(size: Dim, other: Dim) -> bool:
    """Whether a computed size is 1 in some runs where `other` is not, and all that it is a product of is not 0."""
    if not isinstance(size, Expr) or (size.op == "var" and size.attr.source is None):
        return False
    names, products = variables(size, as_expr(other)), [e for e in walk(size) if e.op == "mul"]
    for n in range(1, SAMPLED + 1):
        values = {v: max(1, v.attr.lo or 0) if v.attr.source is not None else min(max(n, v.attr.lo), v.attr.hi or n) for v in names}
        if evaluate_int(size, values) == 1 and evaluate_int(other, values) > 1 and all(evaluate_int(e, values) for e in products):
            return True
    return False


def check_type(shape: Sequence[Dim], dtype: str, where: str) -> None:
    """Raises `ImportModelError` for a shape that no real model has."""
    if len(shape) > MAX_RANK:
        raise ImportModelError(f"a value has {len(shape)} dimensions", where=where, why=f"at most {MAX_RANK} are accepted")
    known = [d for d in shape if isinstance(d, int)]
    if min(known, default=0) < 0:
        raise ImportModelError(f"a value has a negative dimension: {list(map(str, shape))}", where=where)
    if any(symbolic.too_complex(d) for d in shape if isinstance(d, Expr)):
        what, why = "the size of a value depends on symbolic sizes in too complex a way", "its formula has too many operators or sizes"
        raise UnsupportedError(what, where=where, why=why, hint="fix symbolic sizes with --dim")
    if (size := itemsize(dtype) * prod(max(d, 1) for d in known)) > MAX_BYTES:
        what = f"a value of shape {list(map(str, shape))} ({dtype}) would take {size:.3g} bytes"
        raise ImportModelError(what, where=where, why=f"more than {MAX_BYTES:.3g} bytes cannot be meant")
