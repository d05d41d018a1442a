"""Register tiles: what the model chooses, by the sizes of a product and of the machine."""

from __future__ import annotations

import pytest

from tcomp.ir import te
from tcomp.ir.loops import UNROLLED
from tcomp.schedules.cost.register_tiles import Tile, choose_tile, least_rows, outer_row_counts, tiles
from tcomp.schedules.cpu.default import schedule
from tcomp.schedules.knobs import Knobs
from tcomp.schedules.lowering import lower
from tcomp.target import CpuTarget

SKYLAKE = CpuTarget.parse("cpu -march=x86_64 -mcpu=skylake-avx512")


@pytest.mark.parametrize("registers", (16, 32))
def test_tiles_fit_into_the_registers(registers: int) -> None:
    for outer_rows in outer_row_counts(7):
        for tile in tiles(7, 4, registers, outer_rows):
            fits = tile.rows * tile.vectors * outer_rows + tile.vectors < registers
            assert tile.outer_rows == outer_rows and (fits or tile == Tile(1, 1, outer_rows))


def test_tiles_of_short_rows_have_outer_rows() -> None:
    """Rows of 7 leave half of the registers unused, or want wide panels that are loaded again and again."""

    def near(vectors: int) -> tuple[float, float]:
        return 0.0, 0.5 * vectors

    assert choose_tile(7, 512, 16, 32, SKYLAKE.core, outer_rows=7, outer_options=outer_row_counts(7), loading=near).outer_rows == 2
    assert choose_tile(28, 512, 16, 32, SKYLAKE.core, outer_rows=28, outer_options=outer_row_counts(28), loading=near) == Tile(14, 2)
    assert choose_tile(7, 512, 16, 32, SKYLAKE.core, loading=near) == Tile(7, 3)


def test_tiles_divide_a_part_unless_others_gain_more_than_the_tail_costs() -> None:
    """98 rows: seven of them by three vectors take 25 of 32 registers, by one vector 9 of 16."""
    narrow = CpuTarget.parse("cpu -mcpu=znver3")
    assert choose_tile(98, 336, 16, 32, SKYLAKE.core, part=98) == Tile(7, 3)
    assert choose_tile(98, 336, 8, 16, narrow.core, part=98) == Tile(4, 3)
    assert choose_tile(98, 336, 8, 16, narrow.core, multiple=98) == Tile(2, 5)


def test_panels_stay_in_a_cache() -> None:
    def loading(vectors: int) -> tuple[float, float]:
        return (8.0 * vectors, 0.0) if vectors > 2 else (0.0, 0.5 * vectors)

    assert (
        choose_tile(6, 512, 16, 32, SKYLAKE.core) == Tile(6, 4) and choose_tile(12, 512, 16, 32, SKYLAKE.core, loading=loading).vectors == 2
    )
    assert choose_tile(6, 512, 16, 32, SKYLAKE.core, loading=loading) == Tile(6, 4)  # there are no other rows to load it again for


def test_rows_of_unknown_number_have_small_tiles() -> None:
    """The last tile takes as long as a whole one; taller tiles pay where the other operand comes from further away for each of them."""

    def rows(on_top: float, free: int) -> int:
        """Of the tile, where loading a vector again takes `on_top` cycles more than one from the first-level cache."""
        return choose_tile(512, 512, 16, 32, SKYLAKE.core, loading=lambda vectors: (0.0, on_top * vectors), free=free).rows

    assert rows(0.0, 8) < rows(0.5, 8) < rows(0.5, 0) == rows(2.0, 8) and rows(0.0, 8) < rows(0.0, 256)


def test_several_free_dims_make_more_rows() -> None:
    n, h, w = (te.var(name) for name in "nhw")
    assert [least_rows(d) for d in (n, n * h, n * 16, n * h * w, n * (h * 2 + 1) * (w + 3) * 2)] == [8, 8, 16, 64, 128]


def depthwise(size: int) -> Knobs:
    x, w = te.placeholder((size + 2, size + 2, 64), name="x"), te.placeholder((3, 3, 64), name="w")
    i, j = te.reduce_axis(3, "i"), te.reduce_axis(3, "j")
    y = te.compute((size, size, 64), lambda h, v, c: te.sum(x[h + i, v + j, c] * w[i, j, c], [i, j]), name="y")
    knobs = Knobs()
    s = schedule(lower("k", [x, w], [y]), SKYLAKE, knobs)
    assert s.loops["y.i"].kind == s.loops["y.j"].kind == UNROLLED
    return knobs


def test_windows_that_share_their_vectors_are_unrolled() -> None:
    """Depthwise: three steps of a window read the same pixels for neighbouring rows."""
    asked = depthwise(28).asked
    assert asked["y.acc.tile"].value == (7, 1) and asked["y.acc.window"].value is True and asked["x.prefetch"].value == 0


def test_images_that_no_cache_holds_are_walked_pixel_by_pixel() -> None:
    assert depthwise(28).asked["y.acc.columns_outside"].value is True
    assert depthwise(112).asked["y.acc.columns_outside"].value is False


def test_windows_along_the_lanes_have_rows_too() -> None:
    """Each of the 30 vectors that 8 rows read is loaded once, not 72 of them; from memory the next rows are asked for meanwhile."""
    x, w = te.placeholder((64, 514, 514), name="x"), te.placeholder((64, 3, 3), name="w")
    i, j = te.reduce_axis(3, "i"), te.reduce_axis(3, "j")
    y = te.compute((64, 512, 512), lambda c, h, v: te.sum(x[c, h + i, v + j] * w[c, i, j], [i, j]), name="y")
    knobs = Knobs()
    s = schedule(lower("k", [x, w], [y]), SKYLAKE, knobs)
    assert knobs.asked["y.acc.tile"].value == (8, 1) and s.loops["y.i"].kind == s.loops["y.j"].kind == UNROLLED
    assert knobs.asked["x.ahead"].value is True and knobs.asked["y.stream"].value is True and "y.ahead" not in knobs.asked
