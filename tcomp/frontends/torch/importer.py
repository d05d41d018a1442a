"""FX graphs of functional ATen operators → Graph, node by node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, getitem
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from tcomp.errors import TcompError, UnsupportedError
from tcomp.frontends.context import Values
from tcomp.frontends.torch.context import DTYPES, Context, Dims, Table, array_of, dtype_name
from tcomp.frontends.torch.handlers import elementwise, indexing, linalg, movement, nn, random, reduction
from tcomp.frontends.torch.operators import FUNCTIONS
from tcomp.ir.expr import Expr, variables
from tcomp.ir.graph import Graph, GraphBuilder, Value
from tcomp.ir.shape_operands import element
from tcomp.ops.elementwise import EQUAL, REQUIRED

HANDLERS: Table = {
    op: handler for family in (elementwise, indexing, linalg, movement, nn, random, reduction) for op, handler in family.TABLE.items()
}
aten = torch.ops.aten


EFFECT, TOKEN = torch.ops.higher_order.with_effects, "token"  # what keeps effects in order: there is nothing in it
SEED = -1  # the number of the input, uint32 [1], that random numbers of a run come from


@dataclass(frozen=True)
class Imported:
    """A graph, and where its inputs and results are in the FX graph.

    inputs: numbers of placeholders, or `SEED`
    results: for each result of the FX graph ("output", number of an output), ("input", number of a placeholder that is returned as it
        is), ("size", a size), or ("none", what else it is)
    sizes: where to find each symbol of sizes: (number of a placeholder, None) if that is the size, (number, axis) if it is an extent of
        that tensor; ~number of an output, for one that the run counts
    """

    graph: Graph
    inputs: tuple[int, ...]
    results: tuple[tuple[str, Any], ...]
    sizes: Mapping[Expr, tuple[int, int | None]]


def import_fx(
    module: GraphModule,
    constants: Mapping[int, torch.Tensor] | None = None,
    ranges: Mapping[Any, Any] | None = None,
    passed: Callable[[int], bool] = lambda number: False,
) -> Imported:
    """The graph of a module whose nodes are functional ATen operators with `meta["val"]`. `constants`: placeholders, by number, that are
    these tensors for good; `ranges` of symbols of sizes, if they are others than those of the trace; `passed`: whether a placeholder that
    is a result needs no copy. Raises `UnsupportedError` for what cannot be compiled."""
    return _Importer(module, constants or {}, Context(GraphBuilder("torch"), Dims(ranges))).run(passed)


def unsupported_nodes(module: GraphModule) -> dict[Node, str]:
    """The operators of an FX graph that cannot be compiled, and why."""
    importer, found = _Importer(module, {}, Context(GraphBuilder("torch"), Dims())), dict[Node, str]()
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        try:
            importer.node(node)
        except TcompError as error:
            if node.op == "call_function":
                found[node] = "; ".join(text for text in (error.what, error.why) if text)
            try:
                importer.values[node] = importer.unknown(node)
            except UnsupportedError:
                importer.foreign.add(node)
    return found


class _Importer:
    def __init__(self, module: GraphModule, constants: Mapping[int, torch.Tensor], context: Context) -> None:
        self.module, self.constants, self.context = module, constants, context
        self.values = self.context.values
        self.placeholders: list[int] = []
        self.sizes: dict[Expr, tuple[int, int | None]] = {}
        self.foreign: set[Node] = set()  # of types that tcomp does not have
        self.count = 0
        shapes = [n.meta["val"].shape for n in module.graph.nodes if n.op == "placeholder" and isinstance(n.meta.get("val"), torch.Tensor)]
        self.told = {d.node.expr for shape in shapes for d in shape if isinstance(d, torch.SymInt)}  # symbols that are extents

    def run(self, passed: Callable[[int], bool]) -> Imported:
        for node in self.module.graph.nodes:
            if node.op != "output":
                self.node(node)
        (output,) = (node for node in self.module.graph.nodes if node.op == "output")
        (given,) = output.args
        numbers = {node: n for n, node in enumerate(self.module.graph.find_nodes(op="placeholder"))}
        outputs, results = list[Value](), list[tuple[str, Any]]()
        self.context.node = output
        for node in given if isinstance(given, list | tuple) else [given]:
            value = self.values[node] if isinstance(node, Node) else node
            if not isinstance(value, Value):
                results.append(("size" if isinstance(value, int | Expr) else "none", value))
                continue
            if node in numbers and passed(numbers[node]):
                results.append(("input", numbers[node]))
                continue
            results.append(("output", len(outputs)))
            outputs.append(value)
        for n, output in enumerate(outputs):
            self.sizes |= {d: (~n, axis) for axis, d in enumerate(output.shape) if isinstance(d, Expr) and d in self.context.counted}
        asked = variables(*(v for _, v in results if isinstance(v, Expr)))
        if any(d in self.context.counted and d not in self.sizes for d in asked):
            raise self.context.unsupported("a size that a run counts is a result, and that of no tensor among the results")
        self.require(outputs)
        inputs = (*self.placeholders, *([] if self.context.seed is None else [SEED]))
        return Imported(self.context.finished(outputs), inputs, tuple(results), self.sizes)

    def require(self, outputs: list[Value]) -> None:
        """Have an output depend on the conditions that a run has to fulfil."""
        if (place := next((n for n, v in enumerate(outputs) if 0 not in v.shape), None)) is not None:
            for condition in self.context.required:
                outputs[place] = self.context.add(REQUIRED, outputs[place], condition)

    def node(self, node: Node) -> None:
        self.context.node = node
        match node.op:
            case "placeholder":
                self.values[node] = self.placeholder(node, self.count)
                self.count += 1
            case "get_attr":
                self.values[node] = self.constant(node, attrgetter(str(node.target))(self.module))
            case "call_function":
                self.values[node] = self.call(node)
            case _:
                raise UnsupportedError(f"a node is a `{node.op}`", where=node.name)

    def placeholder(self, node: Node, number: int) -> Any:
        example = node.meta.get("val")
        if number in self.constants:
            return self.constant(node, self.constants[number])
        if isinstance(example, torch.SymInt):
            if example.node.expr.is_Symbol and example.node.expr not in self.told:
                builder = self.context.builder
                value = builder.input(node.name, "int64", ())
                self.context.dims.give(example, element(value.name, len(self.placeholders), 0, "int64"))
                self.placeholders.append(number)
            size = self.context.dims(example)
            if isinstance(size, Expr):
                self.sizes[size] = number, None
            return size
        if not isinstance(example, torch.Tensor) or any(user.target is EFFECT and user.args[0] is node for user in node.users):
            return TOKEN if isinstance(example, torch.Tensor) else example
        self.placeholders.append(number)
        value = self.unknown(node)
        for axis, size in enumerate(value.shape):
            if isinstance(size, Expr):
                self.sizes.setdefault(size, (number, axis))
        return value

    def unknown(self, node: Node) -> Any:
        """An input of the graph of the type that a node has."""

        def value(example: Any) -> Any:
            if isinstance(example, torch.SymInt):
                return self.context.dims(example)
            if not isinstance(example, torch.Tensor):
                return example
            shape = [self.context.dims(d) for d in example.shape]
            return self.context.builder.input(node.name, DTYPES.get(example.dtype, "float32"), shape)

        example = node.meta.get("val")
        if isinstance(example, torch.Tensor):
            dtype_name(example.dtype)
        return tuple(map(value, example)) if isinstance(example, list | tuple) else value(example)

    def constant(self, node: Node, tensor: Any) -> Any:
        if isinstance(tensor, GraphModule):
            return tensor
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedError("an attribute is not a tensor", where=node.name)
        return self.context.builder.constant(array_of(tensor), node.name, dtype_name(tensor.dtype))

    def call(self, node: Node) -> Any:
        example = node.meta.get("val")
        if not self.foreign.isdisjoint(node.all_input_nodes):
            raise UnsupportedError("an operand is of a type that is not supported", where=node.name)
        args, kwargs = map_arg(node.args, self.values.__getitem__), map_arg(node.kwargs, self.values.__getitem__)
        if node.target is getitem:
            if args[0][args[1]] is None and example is not None:
                raise UnsupportedError(f"result {args[1]} of `{node.args[0]}` is not computed", where=node.name)
            return args[0][args[1]]
        if isinstance(example, int | torch.SymInt) and not isinstance(example, bool):
            return self.context.dims(example)
        operator = getattr(node.target, "overloadpacket", node.target)
        if operator in (aten._assert_tensor_metadata, aten._assert_scalar) or isinstance(example, torch.SymBool):
            return None  # of what was known when the program was traced, or which follows from the range of a size
        if operator is EFFECT:
            return self.effect(*args, **kwargs)
        if operator is torch.ops.higher_order.scan:
            return self.scan(node, *args)
        if operator in FUNCTIONS:
            return self.context.own(FUNCTIONS[operator], *args[0])
        if (handler := HANDLERS.get(operator) or HANDLERS.get(str(operator))) is None:
            raise UnsupportedError(f"`{node.target}` is not supported", where=node.name)
        try:
            result = handler(self.context, *args, **kwargs)
        except (TypeError, ValueError, IndexError, AttributeError, ArithmeticError, AssertionError) as error:
            what, why = f"`{node.target}` cannot be compiled as it is used here", f"{type(error).__name__}: {error}"
            raise UnsupportedError(what, where=node.name, why=why) from error
        if isinstance(result, tuple):
            return tuple(r if r is None or e is None else self.checked(r, e) for r, e in zip(result, example, strict=False))
        return result if result is None else self.checked(result, example)

    def effect(self, token: Any, operator: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """An operator that PyTorch keeps in order with others by a token, which is passed on."""
        if operator is not aten._linalg_check_errors.default:
            raise self.context.unsupported(f"it calls `{operator}`")
        zero = self.context.add(EQUAL, args[0], self.context.number(0, args[0].dtype))
        self.context.require(zero)
        return token, None

    def scan(self, node: Node, step: GraphModule, carry: Values, xs: Values, captured: Sequence[Any]) -> tuple[Value, ...]:
        """All rows may be given from the last one on: then they are read so, and what is made of them is stacked so."""
        if not all(isinstance(v, Value) for v in (*carry, *xs, *captured)):
            raise self.context.unsupported("it uses a number")
        flipped = [self.context.flips.get(x) for x in xs]
        reverse = all(f is not None and f[1] == (0,) for f in flipped)
        ctx, length = self.context, xs[0].shape[0]

        def body(builder: GraphBuilder, *formal: list[Value]) -> tuple[Values, Values, Graph]:
            inner = _Importer(step, {}, Context(builder, ctx.dims, node))
            given = iter(chain.from_iterable(formal))
            for n in step.graph.nodes:
                if n.op == "placeholder":
                    inner.values[n] = next(given)
                elif n.op != "output":
                    inner.node(n)
            if inner.context.seed is not None or inner.context.required:
                raise ctx.unsupported("it draws random numbers, or checks what it is given")
            (output,) = (n for n in step.graph.nodes if n.op == "output")
            found = [inner.values[n] for n in output.args[0]]
            return found[: len(carry)], found[len(carry) :], inner.context.finished(found)

        sources = [f[0] for f in flipped if f is not None] if reverse else xs
        found = ctx.scan(length, carry, sources, captured, reverse, body)
        rows = found[len(carry) :]
        return *found[: len(carry)], *((ctx.flip(r, (0,)) for r in rows) if reverse else rows)

    def checked(self, value: Value, example: torch.Tensor) -> Value:
        """The value in the element type that PyTorch says it has. Raises `UnsupportedError` if it is of another shape."""
        return self.context.fitting(value, dtype_name(example.dtype), [self.context.dims(d) for d in example.shape])
