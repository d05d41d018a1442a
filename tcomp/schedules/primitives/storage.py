"""Where values are kept: copies of buffers, their layout and their scope."""

from __future__ import annotations

from dataclasses import replace

from tcomp.ir import expr as E
from tcomp.ir.expr import Expr, as_dim, as_expr, loop_var
from tcomp.ir.loops import (
    Accumulate,
    Allocate,
    Buffer,
    For,
    Kernel,
    Stmt,
    Store,
    block,
    walk,
)
from tcomp.ir.simplify import simplify
from tcomp.ir.verify import same_dim
from tcomp.schedules.primitives.edit import (
    find_buffer,
    find_loop,
    fresh,
    guard,
    is_local,
    perfect,
    producers,
    rebuild,
    refuse,
    replace_loop,
    swap_buffer,
    temporary,
)
from tcomp.schedules.primitives.sites import sequence
from tcomp.schedules.regions import accesses, region


def cache_write(kernel: Kernel, stage: str, name: str) -> Kernel:
    """Compute a stage into a new temporary `name` and copy it: the temporary can then be moved into the loops of the copy.

    Legal when the stage's first nest stores every element, so that nothing of what a parameter held before is read or left. The copy is
    one nest with the loops `stage.0`, `stage.1`, ...
    """
    target = find_buffer(kernel, stage, "cache_write")
    nests = producers(kernel.body, target)
    if not nests or any(is_local(target, nest) for nest in nests):
        raise refuse(kernel, "cache_write", f"`{stage}` is not computed at the top level")
    if target in kernel.buffers and not _fills(nests[0], target):
        raise refuse(kernel, "cache_write", f"`{stage}` may keep some of what it holds before", "its first nest should store all elements")
    local = Buffer(fresh(kernel, name), target.dtype, target.shape)
    loops = [(loop_var(fresh(kernel, f"{stage}.{d}"), extent), extent) for d, extent in enumerate(target.shape)]
    places = tuple(v for v, _ in loops)
    copy: Stmt = Store(target, places, E.read(local, places))
    for v, extent in reversed(loops):
        copy = For(v, extent, copy)

    items = sequence(kernel.body)
    moved = items[items.index(nests[0]) : items.index(nests[-1]) + 1]  # what stands between the nests may read the stage

    def edit(s: Stmt) -> Stmt | None:
        if s not in moved:
            return None
        new = swap_buffer(s, target, local, lambda indices: indices)
        return block(new, copy) if s is nests[-1] else new

    return kernel.with_body(Allocate(local, rebuild(kernel.body, edit)))


def _fills(nest: Stmt, buffer: Buffer) -> bool:
    """Whether a nest stores to every element, and reads none."""
    loops, leaf = perfect(nest)
    if not isinstance(leaf, Store) or leaf.buffer is not buffer or accesses(nest, buffer, writes=False):
        return False
    extents = {x.var: x.extent for x in loops}
    whole = all(i in extents and same_dim(extents[i], n) for i, n in zip(leaf.indices, buffer.shape, strict=True))
    return whole and len(extents) == len(leaf.indices) == len(set(leaf.indices))


def cache_read(kernel: Kernel, buffer: str, loop: str | None, name: str, scope: str = "global") -> Kernel:
    """Copy the part of a buffer that a loop's body reads into a new buffer first, and read that instead.

    With `loop` None the whole buffer is copied before everything else. Legal when the body does not write the buffer.
    The copy is a stage called `name`, one loop per dimension.
    """
    source = find_buffer(kernel, buffer, "cache_read")
    where = kernel.body if loop is None else find_loop(kernel, loop, "cache_read").body
    if any(isinstance(s, Store | Accumulate) and s.buffer is source for s in walk(where)):
        raise refuse(kernel, "cache_read", f"`{buffer}` is written where the copy would be read")
    if not accesses(where, source):
        raise refuse(kernel, "cache_read", f"`{buffer}` is not read there")
    name = fresh(kernel, name)
    box = region(where, source)
    local = temporary(kernel, "cache_read", name, source.dtype, box.extent, scope)
    loops = [(loop_var(f"{name}.{d}", extent), extent) for d, extent in enumerate(box.extent)]
    places = tuple(v for v, _ in loops)
    index = [simplify(b + v) for b, v in zip(box.base, places, strict=True)]
    copy: Stmt = guard(
        [c for i, n in zip(index, source.shape, strict=True) for c in (i >= 0, i < as_expr(n))], Store(local, places, E.read(source, index))
    )
    for v, extent in reversed(loops):
        copy = For(v, extent, copy)
    inside = swap_buffer(where, source, local, lambda indices: tuple(i - b for i, b in zip(indices, box.base, strict=True)))
    body = Allocate(local, block(copy, inside))
    if loop is None:
        return kernel.with_body(body)
    return replace_loop(kernel, (target := find_loop(kernel, loop)), replace(target, body=body))


def relayout(kernel: Kernel, buffer: str, dim: int, factor: int) -> Kernel:
    """Block one dimension of a temporary: element [.., i, ..] moves to [i // factor, .., i % factor] (a packed panel).

    The block index comes first and the inside last; the extent is padded up. Always legal for temporaries.
    """
    old = find_buffer(kernel, buffer, "relayout")
    if old in kernel.buffers:
        raise refuse(kernel, "relayout", f"`{buffer}` is a parameter; its layout is part of the kernel's signature")
    if not 0 <= dim < len(old.shape) or factor < 1:
        raise refuse(kernel, "relayout", f"`{buffer}` of {len(old.shape)} dimensions cannot be blocked by {factor} along dimension {dim}")
    blocks = as_dim((as_expr(old.shape[dim]) + (factor - 1)) // factor)
    rest = tuple(n for d, n in enumerate(old.shape) if d != dim)
    new = Buffer(old.name, old.dtype, (blocks, *rest, factor), old.scope)

    def mapped(indices: tuple[Expr, ...]) -> tuple[Expr, ...]:
        others = tuple(i for d, i in enumerate(indices) if d != dim)
        return (indices[dim] // factor, *others, indices[dim] % factor)

    def edit(s: Stmt) -> Stmt | None:
        if isinstance(s, Allocate) and s.buffer is old:
            return Allocate(new, swap_buffer(s.body, old, new, mapped))
        return None

    return kernel.with_body(rebuild(kernel.body, edit))


def set_scope(kernel: Kernel, buffer: str, scope: str) -> Kernel:
    """Where a temporary lives: `global`, `shared` or `register` (constant shape)."""
    old = find_buffer(kernel, buffer, "set_scope")
    if old in kernel.buffers:
        raise refuse(kernel, "set_scope", f"`{buffer}` is a parameter, it is in global memory")
    new = temporary(kernel, "set_scope", old.name, old.dtype, old.shape, scope)
    return kernel.with_body(
        rebuild(
            kernel.body,
            lambda s: Allocate(new, swap_buffer(s.body, old, new, lambda i: i)) if isinstance(s, Allocate) and s.buffer is old else None,
        )
    )
