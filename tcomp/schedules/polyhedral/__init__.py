"""The polyhedral scheduler: an order of all instances that isl proposes from the dependences, shaped for the machine.

isl's scheduler (Pluto's algorithm, U. Bondhugula et al., "A practical automatic polyhedral parallelizer and locality optimizer", 2008)
distributes the statements into a tree of *bands*: loops that may be interchanged and tiled. Each band becomes one of

    contraction   accumulation over a loop inside: a tile of rows x vectors stays in registers, blocks of the operands in the caches
    columns       no axis runs along memory except the accumulated one: rows side by side, so that their sums do not wait for each other
    elementwise   vector lanes along memory, threads along the outermost independent loop
    wavefront     no independent loop at all (stencils in time): tiles that run in parallel along a diagonal
    blocks        each step updates a whole matrix (factorisations in place): several steps at once, the update a contraction

and enters the schedule through `affine`, the primitive that proves it; `split`, `vectorize`, `unroll` and `parallel` do the rest.

Read `scheduler` first, then `bands` (the tree of bands becomes a `plan`) with `nests` and `blocks` (the templates above).
"""

from tcomp.schedules.polyhedral.scheduler import polyhedral, polyhedral_or_not

__all__ = ["polyhedral", "polyhedral_or_not"]
