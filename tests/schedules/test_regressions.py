"""Mistakes of primitives that the fuzzer found, as small as it could make them."""

from __future__ import annotations

from tests.schedules.fuzzing import check

# ---------------------------------------------------------------- triangular loops


def test_partition_gives_the_loops_inside_their_ranges_anew() -> None:
    check(
        """
        kernel loops(y0: float32[3, 8, 7]) -> (y0) {
          for i6 in 0..4 {
            for i7 in 0..(i6 * -1 + 7) {
              y0[i6 % 3, i7, i7] = 1.0f
            }
          }
        }
        """,
        """
        s.partition("i6", 3)
        """,
    )


def test_fuse_gives_the_loops_inside_their_ranges_anew() -> None:
    check(
        """
        kernel loops(y1: int32[8, 8, 8]) -> (y1) {
          for i6 in 0..2 {
            for i7 in 0..1 {
              for i8 in 0..(i6 + 2) {
                y1[0, 0, i8] = 1i32
              }
            }
          }
        }
        """,
        """
        s.fuse("i6", "i7")
        """,
    )


def test_split_gives_the_loops_inside_their_ranges_anew() -> None:
    check(
        """
        kernel loops(y0: int32[2, 1]) -> (y0) {
          for i5 in 0..1 {
            for i6 in 0..(i5 + 1) {
              y0[i5, 0] = 1i32
            }
          }
        }
        """,
        """
        s.split("i5", 2)
        """,
    )


def test_clean_gives_the_loops_inside_their_ranges_anew() -> None:
    check(
        """
        kernel loops<n{2..7}>(y0: int64[5]) -> (y0) {
          for i2 in 0..1 {
            for i3 in 0..min(3, n - i2 * 3) {
              y0[i2] = y0[i2]
            }
          }
        }
        """,
        """
        s.clean()
        """,
        n=2,
    )


def test_collapse_gives_the_loops_inside_their_ranges_anew() -> None:
    check(
        """
        kernel loops(y0: uint8[5, 4]) -> (y0) {
          for i1 in 0..2 {
            for i2 in 0..min(i1 * -4 + 7, 4) {
              y0[0, i1] = 1u8
            }
          }
        }
        """,
        """
        s.split("i1", 1)
        s.collapse()
        """,
    )


def test_a_stage_of_triangular_loops_moves() -> None:
    check(
        """
        kernel loops(y0: int32[2]) -> (y0) {
          alloc t: int32[3]
          for i1 in 0..3 {
            for i2 in 0..(i1 + 1) {
              t[i1] = 1i32
            }
          }
          for i4 in 0..1 {
            if t[0] < 2i32 {
              y0[i4] = 1i32
            }
          }
        }
        """,
        """
        s.compute_at("t", "i4", scope="shared")
        """,
    )


# ---------------------------------------------------------------- axes of a GPU


def test_an_axis_is_bound_once_in_a_nest() -> None:
    check(
        """
        kernel loops(y0: int64[7]) -> (y0) {
          for i3 in 0..2 {
            for i4 in 0..3 {
              y0[i3 * 3 + i4] = 1
            }
          }
        }
        """,
        """
        s.distribute("i3", 5, "block.y", "block.y")
        s.distribute("i4", 2, "thread.z", "block.y")
        s.set_kind("i3", "thread.z")
        s.set_kind("i4.i", "block.y")
        """,
    )


def test_iterations_on_a_gpu_must_not_touch_the_same_element() -> None:
    check(
        """
        kernel loops(x0: int64[1, 3, 3], y0: int64[7, 7]) -> (y0) {
          for i7 in 0..5 {
            y0[2, x0[0, 2, 2] % 7] = y0[i7, x0[0, 2, 2] % 7]
          }
        }
        """,
        """
        s.set_kind("i7", "block.z")
        """,
    )


# ---------------------------------------------------------------- what elements held before


def test_cache_write_keeps_what_is_not_written() -> None:
    check(
        """
        kernel loops(y2: uint8[1, 3]) -> (y2) {
          y2[0, 0] = 1u8
        }
        """,
        """
        s.cache_write("y2", "written")
        """,
    )


def test_cache_write_keeps_what_is_read_first() -> None:
    check(
        """
        kernel loops(y0: int64[2, 2]) -> (y0) {
          y0[1, 0] = y0[0, 0]
        }
        """,
        """
        s.cache_write("y0", "written")
        """,
    )


def test_a_stage_does_not_move_behind_a_store_to_what_it_reads() -> None:
    check(
        """
        kernel loops(y0: int32[7, 7]) -> (y0) {
          alloc t: int32[9, 8, 8]
          for i1 in 0..9 {
            for i2 in 0..8 {
              for i3 in 0..8 {
                t[i1, i2, i3] = y0[min(i3, 6), 6]
              }
            }
          }
          for i4 in 0..7 {
            for i5 in 0..i4 {
              y0[i5, i4] = t[i5, i4, 7 - i4] + 1i32
            }
          }
        }
        """,
        """
        s.compute_at("t", "i5", scope="register")
        """,
    )


# ---------------------------------------------------------------- sizes


def test_a_point_of_a_partition_is_not_negative() -> None:
    check(
        """
        kernel program<n0{1..1000}>(repeated: uint8[n0, 3]) -> (repeated) {
          for repeated.i0 in 0..n0 {
            repeated[repeated.i0, 0] = 1u8
          }
        }
        """,
        """
        s.partition("repeated.i0", "n0 - 3")
        """,
        n0=1,
    )


def test_a_masked_accumulation_does_not_read_its_place_out_of_bounds() -> None:
    check(
        """
        kernel loops(x1: float32[2], y0: float32[3]) -> (y0) {
          for i1 in 0..1 {
            y0[int64(x1[i1]) % 3] += 0.0f
          }
        }
        """,
        """
        s.split("i1", 5, tail="mask")
        """,
    )


# ---------------------------------------------------------------- folds


def test_rfactor_of_a_fold_beside_another_statement() -> None:
    check(
        """
        kernel loops(y0: uint8[6], y1: uint8[9, 7]) -> (y0, y1) {
          for i2 in 0..1 {
            y0[5] min= 1u8
            y1[i2, 0] = 1u8
          }
        }
        """,
        """
        s.rfactor("y0", "i2", 2)
        """,
    )


# ---------------------------------------------------------------- witnesses


def test_a_loop_that_is_never_entered_has_no_conflicts() -> None:
    run = check(
        """
        kernel loops(y1: int64[8, 4]) -> (y1) {
          for i1 in 0..2 {
            for i2 in 0..2 {
              y1[i1, i2] = y1[0, 0]
            }
          }
        }
        """,
        """
        s.partition("i1", 2)
        s.set_kind("i2.t", "vectorized")
        """,
    )
    assert len(run.schedule.trace) == 2


def test_a_witness_is_executed_by_the_loops_around() -> None:
    run = check(
        """
        kernel loops<n{1..7}>(y0: float32[n + 2]) -> (y0) {
          for i3 in 0..(n - 2) {
            for i4 in 0..n {
              y0[0] = 1.0f
            }
          }
        }
        """,
        """
        s.set_kind("i4", "parallel")
        """,
        n=1,
    )
    assert run.refused.total() == 1 and run.witnesses["exact"] == 1


def test_a_witness_of_an_order_is_executed_by_the_loops_around() -> None:
    check(
        """
        kernel loops(y0: int64[2]) -> (y0) {
          for i6 in 0..1 {
            for i9 in 0..1 {
              for i11 in 0..2 {
                y0[i9] = i9
              }
            }
          }
        }
        """,
        """
        s.partition("i6", 1)
        s.affine("i11.t", "{ S0[i0] -> [-1*i0, 0] }", "t0 t1")
        """,
    )


# ---------------------------------------------------------------- affine


def test_a_temporary_that_lives_through_several_iterations_stands_around_them() -> None:
    run = check(
        """
        kernel loops(y0: int32[3]) -> (y0) {
          for i in 0..1 {
            alloc t: int32[3]
            for a in 0..2 {
              for b in 0..2 {
                if a * 2 + b < 3 {
                  t[a * 2 + b] = 5i32
                }
              }
            }
            for c in 0..3 {
              t[c] max= 1i32
            }
            for d in 0..3 {
              y0[i] max= t[d]
            }
          }
        }
        """,
        """
        s.affine("i", "{ S0[i, a, b] -> [i, a, b, 0]; S1[i, c] -> [i, c, 1, 1]; S2[i, d] -> [i, d + 1, 0, 2] }", "t0 t1 t2 t3")
        """,
    )
    assert len(run.schedule.trace) == 1


def test_orders_that_cannot_be_read_are_refused() -> None:
    run = check(
        """
        kernel loops(y0: int32[3, 3]) -> (y0) {
          for i in 0..3 {
            for j in 0..3 {
              y0[i, j] = 5i32
            }
          }
        }
        """,
        """
        s.affine("i", "nowhere", "a b")
        s.affine("i", "{ S0[i, j] -> [i, j] }", "S1: a b")
        s.affine("i", "{ S0[i, j] -> [i, j] }", "a: b; c")
        s.affine("i", "[q] -> { S0[i, j] -> [i + q, j] }", "a b")
        """,
    )
    assert run.refused["affine"] == 4


# ---------------------------------------------------------------- partial folds


def test_an_element_is_not_initialised_where_nothing_is_folded_into_it() -> None:
    """In the last row the fold is empty, and the element out of range."""
    check(
        """
        kernel loops(x0: int32[5], y0: int32[5]) -> (y0) {
          for i in 0..5 {
            for k in 0..(4 - i) {
              y0[i + 1] += x0[k]
            }
          }
        }
        """,
        """
        s.rfactor("y0", "k", 2)
        """,
    )


def test_nothing_is_initialised_by_loops_that_are_never_entered() -> None:
    check(
        """
        kernel program<n0{1..}>(folded: float32[7]) -> (folded) {
          for folded.i0 in 0..7 {
            for folded.k0 in 0..n0 {
              folded[folded.i0] += 1.0f
            }
          }
        }
        """,
        """
        s.partition("folded.i0", 7)
        s.fuse("folded.i0.t", "folded.k0.t")
        s.rfactor("folded", "folded.i0.t_t", 2)
        """,
        n0=1,
    )


def test_decompose_reduction_moves_the_initialisation() -> None:
    run = check(
        """
        kernel program(r: float32[5]) -> (r) {
          for r.init.i in 0..5 {
            r[r.init.i] = 0.0f
          }
          for r.i in 0..5 {
            for r.k in 0..1 {
              r[r.i] += 1.0f
            }
          }
        }
        """,
        """
        s.decompose_reduction("r", "r.k")
        """,
    )
    assert len(run.schedule.trace) == 1


def test_an_order_makes_no_parallel_loop_inside_of_lanes() -> None:
    run = check(
        """
        kernel loops(y0: int32[4, 4]) -> (y0) {
          for i in 0..4 {
            for j in 0..4 {
              y0[i, j] = 7i32
            }
          }
        }
        """,
        """
        s.set_kind("i", "vectorized")
        s.affine("j", "{ S0[j] -> [j] }", "t0", parallel="t0")
        """,
    )
    assert run.refused["affine"] == 1


# ---------------------------------------------------------------- prefetch


COPIED = """
    kernel program(out: float32[9]) -> (out) {
      alloc y: float32[9]
      for y.i in 0..9 {
        y[y.i] = 2.0f
      }
      for out.i in 0..9 {
        out[out.i] = y[out.i]
      }
    }
    """


def test_what_is_prefetched_moves_with_its_buffer() -> None:
    run = check(
        COPIED,
        """
        s.prefetch("y", "out.i", 3)
        s.relayout("y", "(a/4,a%4)")
        s.collapse()
        s.compute_at("y", "out.i")
        """,
    )
    assert len(run.schedule.trace) >= 3


def test_what_is_inlined_is_not_prefetched() -> None:
    run = check(
        COPIED,
        """
        s.prefetch("y", "out.i", 3)
        s.inline("y")
        """,
    )
    assert len(run.schedule.trace) == 2


def test_what_lives_inside_of_an_iteration_is_not_prefetched() -> None:
    run = check(
        """
        kernel program(x0: int32[1, 2, 2], pool: int32[1, 1, 1]) -> (pool) {
          for pool.i0 in 0..1 {
            for pool.q in 0..1 {
              pool[pool.i0, 0, 0] = x0[pool.i0, 0, pool.q]
            }
          }
        }
        """,
        """
        s.cache_read("x0", "pool.q", "cached", layout="(b,a/3,a%3)")
        s.prefetch("cached", "pool.i0", 3)
        """,
    )
    assert run.refused["prefetch"] == 1


# ---------------------------------------------------------------- inline and pipeline


def test_an_element_of_an_earlier_iteration_is_not_inlined() -> None:
    run = check(
        """
        kernel loops(y0: int32[4]) -> (y0) {
          alloc t: int32[4]
          for i in 0..6 {
            if i < 4 {
              t[i] = 1i32
            }
            if 1 < i {
              y0[i - 2] = t[i - 2]
            }
          }
        }
        """,
        """
        s.inline("t")
        """,
    )
    assert run.refused["inline"] == 1


def test_copies_of_a_pipeline_are_counted_in_64_bits() -> None:
    run = check(
        """
        kernel loops(x0: int32[4], y0: int32[4]) -> (y0) {
          for i in 0..4 {
            alloc t: int32[1]
            t[0] = x0[i]
            y0[i] = t[0]
          }
        }
        """,
        """
        s.pipeline("i", 1180591620717411303424, "t")
        """,
    )
    assert run.refused["pipeline"] == 1


# ---------------------------------------------------------------- mask


def test_a_mask_keeps_what_never_holds_around_a_place_out_of_range() -> None:
    check(
        """
        kernel loops(y0: int32[4]) -> (y0) {
          for i in 0..4 {
            for w in 0..2 {
              if w < 0 {
                y0[i + 5] += 1i32
              }
              if false {
                y0[i + 1] += 1i32
              }
            }
          }
        }
        """,
        """
        s.mask("y0")
        """,
    )


def test_what_is_never_entered_is_divided_joined_and_shifted() -> None:
    run = check(
        """
        kernel loops(y0: float32[3]) -> (y0) {
          for i3 in 0..0 {
            for i5 in 0..2 {
              y0[0] = 0.0f
              y0[0] = 1.0f
            }
            for i6 in 0..2 {
              y0[0] = 2.0f
            }
            for i7 in 0..2 {
              y0[i7] = y0[0]
            }
          }
        }
        """,
        """
        s.fission("i5")
        s.fuse_loops("i6", "i7")
        s.shift("i6", "y0", 1)
        """,
    )
    assert not run.witnesses


def test_fission_compares_like_with_like() -> None:
    run = check(
        """
        kernel loops<n{2..7}>(y0: int32[n + 1, 6]) -> (y0) {
          for i3 in 0..n {
            for i4 in 0..min(4, max(0, n - i3 * 4)) {
              y0[i4, i3] = 1i32
              y0[i3, i4] = y0[1, i4]
            }
          }
        }
        """,
        """
        s.fission("i4")
        """,
        n=2,
    )
    assert run.refused["fission"] == 1


def test_an_order_keeps_extents_that_are_not_affine() -> None:
    run = check(
        """
        kernel program<n0{1..9}, n1{1..1000}>(t: uint8[n0, n1]) -> (t) {
          for t.i0 in 0..n0 {
            for t.i1 in 0..n1 {
              t[t.i0, t.i1] = 1u8
            }
          }
        }
        """,
        """
        s.fuse("t.i0", "t.i1")
        s.shift("t.i0_i1", "t", 0)
        """,
        n0=1,
        n1=1,
    )
    assert len(run.schedule.trace) == 2


def test_an_empty_loop_is_not_divided() -> None:
    run = check(
        """
        kernel loops(x1: int64[2, 2, 2], y1: int64[2, 4]) -> (y1) {
          for i4 in 0..1 {
            for i5 in 0..2 {
              y1[i4, i5] = select(0 <= i4 + -1, x1[-1, i5, i4], 1)
            }
          }
        }
        """,
        """
        s.cache_read("x1", None, "cached")
        s.fission("cached.2")
        """,
    )
    assert run.refused["fission"] == 1


def test_a_loop_that_is_empty_in_the_peeled_part() -> None:
    check(
        """
        kernel loops(y1: uint8[3, 4], y2: uint8[3]) -> (y1, y2) {
          for i1 in 0..3 {
            y2[0] = 1u8
            for i5 in 0..(i1 * -1 + 3) {
              y1[i5, i1] = 2u8
            }
          }
        }
        """,
        """
        s.shift("i1", "y1", -2)
        s.partition("i1", 4)
        """,
    )


def test_a_copy_of_nothing() -> None:
    check(
        """
        kernel loops(y0: int32[7, 7, 8], y1: int32[7, 5]) -> (y0, y1) {
          for i1 in 0..1 {
            for i3 in 0..i1 {
              y0[1, i3, 1] = y1[0, i3]
            }
          }
        }
        """,
        """
        s.cache_read("y1", "i1", "cached", scope="register", layout="(b/3,a,b%3)")
        """,
    )


def test_loops_whose_variables_choose_between_reads_are_not_merged() -> None:
    check(
        """
        kernel loops(y1: uint8[7, 2], t: uint8[2, 4, 2]) -> (t) {
          for i1 in 0..2 {
            for i2 in 0..4 {
              for i4 in 0..2 {
                t[i1, i2, 0] = select(0 < i1, y1[0, i4], y1[0, 0])
              }
            }
          }
        }
        """,
        """
        s.collapse()
        """,
    )


def test_an_address_that_is_read_is_not_prefetched() -> None:
    run = check(
        """
        kernel loops(x0: float32[2], y0: float32[3]) -> (y0) {
          for i8 in 0..1 {
            y0[0] = y0[int64(x0[i8])]
          }
        }
        """,
        """
        s.prefetch("y0", "i8", 3)
        """,
    )
    assert run.refused["prefetch"] == 1


def test_a_stage_written_backwards_in_blocks_is_computed_where_it_is_read() -> None:
    check(
        """
        kernel pipeline<n0{2..1000}>(t3: int32[n0]) -> (t3) {
          alloc t1: int32[n0]
          for t1.i0 in 0..n0 {
            t1[t1.i0] = 1i32
          }
          for t3.i0 in 0..n0 {
            t3[t3.i0] = t1[1]
          }
        }
        """,
        """
        s.affine("t1.i0", "{ S0[i0] -> [-1*i0 + 0, 0] }", "t0 t1", parallel="t0")
        s.split("t0", 3)
        s.compute_at("t1", "t3.i0")
        """,
        n0=2,
    )


def test_the_loops_of_a_copy_have_names_of_their_own() -> None:
    check(
        """
        kernel program(x1: float64[1, 1, 3], t: float64[1, 1, 3]) -> (t) {
          t[0, 0, 0] = x1[0, 0, 0]
        }
        """,
        """
        s.cache_read("x1", None, "cached")
        s.reverse_compute_at("t", "cached.2")
        s.inline("cached")
        s.cache_read("x1", "cached.1", "cached", layout="(a,b/3,c,b%3)")
        """,
    )


def test_what_lives_inside_of_an_iteration_is_not_promoted() -> None:
    run = check(
        """
        kernel loops(y0: int32[1]) -> (y0) {
          for i4 in 0..1 {
            for i5 in 0..i4 {
              for i6 in 0..1 {
                y0[i5] prod= 1i32
              }
            }
          }
        }
        """,
        """
        s.promote("i6", "y0", "kept")
        s.promote("i4", "kept", "kept")
        """,
    )
    assert run.refused["promote"] == 1


def test_a_digit_of_what_another_index_tells_is_a_condition() -> None:
    check(
        """
        kernel loops(y0: float64[7, 7, 5]) -> (y0) {
          alloc t: float64[6, 6, 9]
          for i1 in 0..5 {
            for i2 in 0..3 {
              for i3 in 0..3 {
                t[i1, i2, i3] = 1.0
              }
            }
          }
          for i4 in 0..3 {
            y0[i4 // 2, 0, i4] = t[i4, i4, i4]
          }
        }
        """,
        """
        s.reverse_compute_at("y0", "i1")
        """,
    )


def test_two_values_of_one_digit_are_a_condition() -> None:
    check(
        """
        kernel loops(x: float64[6], y: float64[3, 3, 6]) -> (y) {
          alloc t: float64[6]
          for i in 0..6 {
            t[i] = x[i]
          }
          for j in 0..6 {
            y[j // 2, j // 2, j] = t[j]
          }
        }
        """,
        """
        s.reverse_compute_at("y", "i")
        """,
    )


def test_a_copy_in_a_loop_that_never_runs() -> None:
    check(
        """
        kernel loops(y0: int32[7, 9], y1: int32[8]) -> (y0, y1) {
          for i4 in 0..1 {
            for i5 in 0..i4 {
              y1[i4] = y0[0, i5]
            }
          }
        }
        """,
        """
        s.partition("i4", "0")
        s.cache_read("y0", "i4", "cached", scope="global")
        """,
    )


def test_loops_of_partial_results_have_names_of_their_own() -> None:
    check(
        """
        kernel program(pool: int32[1, 4, 1]) -> (pool) {
          for pool.i1 in 0..1 {
            for pool.i2 in 0..1 {
              for pool.p in 0..1 {
                pool[0, pool.i1, pool.i2] max= 1i32
              }
            }
          }
        }
        """,
        """
        s.split("pool.i1", 1)
        s.distribute("pool.i1.o", 5, "thread.z", "thread.x", strided=False)
        s.rfactor("pool", "pool.p", 1)
        """,
    )


def test_a_million_iterations_are_not_unrolled() -> None:
    run = check(
        """
        kernel program<n0{1..}>(t: bool[n0]) -> (t) {
          for i in 0..n0 {
            t[i] = false
          }
        }
        """,
        """
        s.distribute("i", 1000000, "thread.z", "thread.y", strided=True)
        s.set_kind("i.i", "unrolled")
        """,
        n0=5,
    )
    assert run.refused["set_kind"] == 1


def test_a_copy_of_what_is_looked_up_has_room_for_all_of_it() -> None:
    check(
        """
        kernel loops(x0: float64[9, 7], y0: float64[2]) -> (y0) {
          for i1 in 0..7 {
            for i2 in 0..min(4, max(i1 * -4 + 7, 0)) {
              y0[i2 % 2] += select(i1 != 0, x0[i1, int64(x0[0, 0]) % 7], x0[i1, 0])
            }
          }
        }
        """,
        """
        s.cache_read("x0", "i1", "cached", scope="shared")
        s.relayout("cached", "(b,a%7)")
        s.pipeline("i1", 2, "cached")
        """,
    )


def test_a_temporary_is_not_copied_before_there_is_one() -> None:
    run = check(
        """
        kernel loops<n{3..7}>(y0: float64[3, 1, n + 1], y1: float64[3, 2]) -> (y0, y1) {
          for i7 in 0..3 {
            for i8 in 0..1 {
              y1[i7, 0] = select(i8 + 1 < 1, y0[i7, i8, -1], 1.0)
            }
          }
        }
        """,
        """
        s.cache_read("y0", "i7", "cached", layout="(a/3,a%3)")
        s.cache_read("cached", "i7", "cached", layout="(a%8)")
        """,
        n=3,
    )
    assert run.refused["cache_read"] == 1


def test_a_loop_that_never_runs_is_not_prefetched_for() -> None:
    check(
        """
        kernel pipeline(x0: int32[3, 3], t2: int32[3, 3]) -> (t2) {
          for t2.i1 in 0..1 {
            t2[0, t2.i1] = x0[1, t2.i1]
          }
        }
        """,
        """
        s.cache_read("x0", "t2.i1", "cached")
        s.split("cached.1", 4, tail="peel")
        s.prefetch("x0", "cached.0", 3)
        """,
    )


def test_where_a_copy_stands_is_known_before_it() -> None:
    check(
        """
        kernel loops(x0: float64[3, 2, 8], x1: float64[4, 6, 2], y0: float64[2, 3]) -> (y0) {
          for i1 in 0..1 {
            y0[i1, 0] = x0[int64(x1[i1, i1, i1]), 0, i1]
          }
        }
        """,
        """
        s.cache_read("x1", "i1", "cached", scope="global", layout="(a/4,a%4)")
        s.cache_read("x0", "i1", "cached", scope="register", layout="(b/1,c,a,b%1)")
        """,
    )


def test_a_clamped_index_does_not_store_all() -> None:
    run = check(
        """
        kernel loops(y0: int32[2, 7]) -> (y0) {
          for i1 in 0..7 {
            y0[min(i1, 1), i1] = 3i32
          }
        }
        """,
        """
        s.cache_write("y0", "written")
        """,
    )
    assert run.refused["cache_write"] == 1


def test_what_is_never_accumulated_is_not_promoted() -> None:
    run = check(
        """
        kernel loops(y0: int64[4, 2]) -> (y0) {
          for i3 in 0..1 {
            y0[0, 0] = 9223372036854775807
            for i4 in 0..0 {
              y0[0, 0] min= y0[0, 0]
            }
          }
        }
        """,
        """
        s.promote("i3", "y0", "kept")
        """,
    )
    assert run.refused["promote"] == 1


def test_nothing_is_looked_up_outside_of_a_loop_that_is_shifted() -> None:
    check(
        """
        kernel loops<n{3..7}>(x1: float64[n, 9], y0: float64[n, n + 2]) -> (y0) {
          for i1 in 0..n {
            for i2 in 0..(n - 2) {
              if x1[i1, 0] < 2.0 {
                y0[i2, i1] = 1.0
              }
            }
          }
        }
        """,
        """
        s.split("i2", 1)
        s.fuse("i1", "i2.o")
        s.shift("i1_o", "y0", 2)
        """,
        n=3,
    )


def test_what_says_where_there_is_something_to_look_up_stays_around_it() -> None:
    check(
        """
        kernel loops(x0: int32[2, 1], y0: int32[3, 1, 2]) -> (y0) {
          for i7 in 0..1 {
            if x0[0, i7] < 2i32 {
              y0[0, 0, 0] min= 1i32
            }
          }
        }
        """,
        """
        s.rfactor("y0", "i7", 2)
        s.compute_at("y0.p", "y0.lane", scope="shared")
        """,
    )


def test_masks_look_things_up_only_where_there_are_any() -> None:
    check(
        """
        kernel loops(x0: int32[5], y0: int32[3]) -> (y0) {
          for i in 0..5 {
            if x0[i] < 2i32 {
              y0[0] += 1i32
            }
          }
        }
        """,
        """
        s.rfactor("y0", "i", 2)
        s.mask("y0.p")
        """,
    )


def test_copies_do_not_stand_where_is_looked_up_under_a_condition() -> None:
    check(
        """
        kernel loops(x0: float64[7], y0: float64[9, 6]) -> (y0) {
          alloc t: float64[6, 8]
          for i1 in 0..5 {
            for i2 in 0..3 {
              t[i1, i2] = -inf
            }
          }
          for i4 in 0..6 {
            y0[0, 0] = t[int64(x0[i4]) % 6, 2]
          }
        }
        """,
        """
        s.split("i4", 5)
        s.cache_read("t", "i4.i", "cached", layout="(a)")
        """,
    )
