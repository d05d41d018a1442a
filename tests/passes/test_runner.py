"""The pass runner."""

from dataclasses import replace

import pytest

from tcomp.errors import IRError
from tcomp.ir.graph import GraphBuilder
from tcomp.ops.elementwise import ADD, NEG
from tcomp.passes.cse import merge_equal
from tcomp.passes.dce import eliminate_dead
from tcomp.passes.runner import PassReport, run_passes

PASSES = [("merge", merge_equal), ("eliminate", eliminate_dead)]


def graph():
    b = GraphBuilder()
    x = b.input("x", "float32", (3,))
    y = b.add(ADD, b.add(NEG, [x], name="first") + b.add(NEG, [x], name="second"))
    return b.build(y)


def test_passes_run_in_order_and_are_reported():
    seen: list[PassReport] = []
    after, reports = run_passes(graph(), PASSES, verify=True, on_pass=seen.append)
    assert [node.op.name for node in after.nodes] == ["neg", "add"]
    assert [(r.name, r.nodes_before, r.nodes_after) for r in reports] == [("merge", 3, 2), ("eliminate", 2, 2)]
    assert seen == reports and all(r.seconds >= 0 for r in reports)


def test_dump_writes_graphs_and_differences(tmp_path):
    before = graph()
    after, _ = run_passes(before, PASSES, verify=False, dump=tmp_path / "dump")
    files = {p.name: p.read_text() for p in (tmp_path / "dump").iterdir()}
    assert set(files) == {"00-input.txt", "01-merge.txt", "01-merge.diff", "02-eliminate.txt", "02-eliminate.diff"}
    assert files["00-input.txt"] == str(before)
    assert files["01-merge.txt"] == files["02-eliminate.txt"] == str(after)
    removed = [line for line in files["01-merge.diff"].splitlines() if line.startswith("-  ")]
    assert any("%second" in line for line in removed) and files["02-eliminate.diff"] == ""


def test_a_pass_that_breaks_the_graph_is_named():
    def breaks(g):
        return replace(g, nodes=g.nodes[1:])

    with pytest.raises(IRError, match="pass `breaks` made a malformed graph"):
        run_passes(graph(), [*PASSES, ("breaks", breaks)], verify=True)
