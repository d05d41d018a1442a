"""What the forward pass saves for the backward pass: what views are of, instead of the views. PyTorch saves a transposed weight, say, which
takes nothing where views do not; compiled code would have to copy it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten
VIEWS = (
    aten._unsafe_view, aten.alias, aten.clone, aten.detach, aten.expand, aten.permute, aten.reshape, aten.select, aten.slice, aten.squeeze,
    aten.t, aten.transpose, aten.unsqueeze, aten.view,
)  # fmt: skip
"""Operators whose elements are those of their first operand."""


def partition(module: GraphModule, inputs: Any, **settings: Any) -> tuple[GraphModule, GraphModule]:
    """(forward, backward) of a joint graph, as `min_cut_rematerialization_partition` cuts it, with the sources of views saved."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    forward, backward = min_cut_rematerialization_partition(module, inputs, **settings)
    (output,), count = forward.graph.find_nodes(op="output"), settings["num_fwd_outputs"]
    results, saved = output.args[0][:count], output.args[0][count:]
    written = {n.args[0] for n in forward.graph.nodes if n.target is aten.copy_.default}
    known = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}  # the backward pass calls what it takes by the same names
    chains = {n: chain for n in saved if n.name in known and (chain := _views(n, saved, written))}
    sources = {n: chain[0].args[0] for n, chain in chains.items()}
    sources = {n: source for n, source in sources.items() if n not in sources.values()}
    kept, first = list[Node](), next(n for n in backward.graph.nodes if n.op != "placeholder")
    for node in saved:
        source = sources.get(node, node)
        if source is not node and source.name not in known:
            with backward.graph.inserting_before(known[node.name]):
                known[source.name] = backward.graph.placeholder(source.name)
                known[source.name].meta = dict(source.meta)
            kept.append(source)
        elif source is node:
            kept.append(node)
        if source is not node:
            copies: dict[Node, Node] = {source: known[source.name]}
            with backward.graph.inserting_before(first):
                for view in chains[node]:
                    copies[view] = backward.graph.node_copy(view, copies.__getitem__)
            known[node.name].replace_all_uses_with(copies[node])
            backward.graph.erase_node(known[node.name])
    output.args = ((*results, *kept),)
    for graph in (forward, backward):
        graph.graph.lint()
        graph.recompile()
    return forward, backward


def _views(node: Node, saved: Collection[Node], written: Collection[Node]) -> list[Node]:
    """The views, one after the other, that make a saved value of something which takes no more memory: it is saved as well, is an input
    that the forward pass does not write, or is not larger. None, if there is nothing of that kind."""
    chain, best = list[Node](), list[Node]()
    while getattr(node.target, "overloadpacket", None) in VIEWS and node.all_input_nodes == [node.args[0]]:
        source = node.args[0]
        assert isinstance(source, Node)
        chain.insert(0, node)
        held = source in saved or (source.op == "placeholder" and source not in written)
        sizes = [n.meta["val"].numel() for n in (source, chain[-1])]
        if held or (source.op != "placeholder" and all(isinstance(n, int) for n in sizes) and sizes[0] <= sizes[1]):
            best = [*chain]
        node = source
    return best
