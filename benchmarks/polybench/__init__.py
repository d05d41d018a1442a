"""The 30 kernels of PolyBench/C 4.2.1 (Pouchet and Yuki), written anew as loop programs in Python from their published definitions."""

from . import blas, medley, products, solvers, statistics, stencils
from .suite import Benchmark

BENCHMARKS: dict[str, Benchmark] = {
    b.name: b for family in (statistics, blas, products, solvers, medley, stencils) for b in family.BENCHMARKS
}
