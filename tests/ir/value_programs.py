"""Random element-wise bodies of all dtypes over a 3 x 4 grid, reading tensors A, B (float32), P, Q (int32) and R (uint8)."""

import numpy as np
from hypothesis import strategies as st

from tcomp.ir import expr as E, te

SHAPE = (3, 4)
INPUTS = {
    name: te.placeholder(SHAPE, dtype, name) for name, dtype in zip("ABPQR", ["float32"] * 2 + ["int32"] * 2 + ["uint8"], strict=True)
}
I, J = E.loop_var("i", SHAPE[0]), E.loop_var("j", SHAPE[1])


def arrays(seed: int) -> dict[str, np.ndarray]:
    """Values for the inputs, with NaN, infinities, signed zeros and the ends of integer ranges among them."""
    rng = np.random.default_rng(seed)
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e30, -2.5, 0.5], np.float32)
    ends = np.array([0, -1, 2**31 - 1, -(2**31), 7, -3], np.int32)
    made = {}
    for name, t in INPUTS.items():
        if t.dtype == "float32":
            made[name] = np.where(rng.random(SHAPE) < 0.3, rng.choice(special, SHAPE), rng.normal(size=SHAPE).astype(np.float32))
        elif t.dtype == "int32":
            made[name] = np.where(rng.random(SHAPE) < 0.4, rng.choice(ends, SHAPE), rng.integers(-9, 9, SHAPE, np.int32))
        else:
            made[name] = rng.integers(0, 256, SHAPE, np.uint8)
    return made


def _reads(names: str) -> st.SearchStrategy[E.Expr]:
    index = st.sampled_from([(I, J), (2 - I, J), ((I + J) % 3, J), (I, J // 2), (I, E.minimum(J + 1, 3)), (0, 3)])
    guarded = st.sampled_from(names).map(lambda n: E.select(J > 0, INPUTS[n][I, J - 1], E.cast(I, INPUTS[n].dtype)))
    return st.one_of(st.builds(lambda n, at: INPUTS[n][at], st.sampled_from(names), index), guarded)


def _values(dtype: str) -> st.SearchStrategy[E.Expr]:
    names, constants = {
        "float32": ("AB", [0.0, -0.0, 1.5, float("inf"), float("nan"), 1e-40]),
        "int32": ("PQ", [0, 1, -1, 5, 2**31 - 1]),
        "uint8": ("R", [0, 1, 7, 255]),
    }[dtype]
    leaves = st.one_of(_reads(names), st.sampled_from(constants).map(lambda v: E.const(v, dtype)))
    return st.recursive(leaves, lambda inner: _combined(dtype, inner), max_leaves=6)


def _combined(dtype: str, inner: st.SearchStrategy[E.Expr]) -> st.SearchStrategy[E.Expr]:
    binary = ["add", "sub", "mul", "min", "max", "floordiv", "mod", "truncdiv", "truncmod"]
    binary += ["div"] if dtype == "float32" else ["and", "or", "xor"]
    unary = ["neg", "abs"] + (["sqrt", "floor", "ceil", "round", "trunc", "tanh", "erf"] if dtype == "float32" else ["not", "popcount"])
    condition = st.builds(E.binary, st.sampled_from(["lt", "le", "eq", "ne"]), inner, inner)
    others = [d for d in ("float32", "int32", "uint8") if d != dtype]
    leaves = {d: _reads({"float32": "AB", "int32": "PQ", "uint8": "R"}[d]) for d in others}
    return st.one_of(
        st.builds(E.binary, st.sampled_from(binary), inner, inner),
        st.builds(E.unary, st.sampled_from(unary), inner),
        st.builds(E.select, condition, inner, inner),
        *(leaves[d].map(lambda e: E.cast(e, dtype)) for d in others),
    )


BODIES = st.sampled_from(["float32", "int32", "uint8"]).flatmap(_values)


def tensor(body: E.Expr) -> te.Tensor:
    return te.Tensor("T", SHAPE, body.dtype, (I, J), body)
