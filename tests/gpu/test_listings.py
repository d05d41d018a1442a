"""What `tcomp compile --emit` says of kernels for a GPU."""

from __future__ import annotations

import pytest

from tcomp.errors import TargetError
from tcomp.options import CompileOptions
from tcomp.pipeline import compile_model
from tests.codegen.cuda.test_cuda import needs_nvrtc
from tests.gpu.test_models import MIXED


@needs_nvrtc
def test_listings_of_kernels() -> None:
    stages = ("schedule", "loops", "cuda", "ptx", "sass-stats")
    texts = compile_model(MIXED, CompileOptions("cuda -arch=sm_80,sm_90a -precision=tf32", emit=stages))[1].stages
    assert set(texts) == set(stages)
    assert "__global__" in texts["cuda"] and "mma.sync" in texts["cuda"] and "// s.tensorize(" in texts["cuda"]
    assert ".target sm_80" in texts["ptx"] and ".entry" in texts["ptx"]
    lines = [line for line in texts["sass-stats"].splitlines() if " registers, " in line]
    assert len(lines) == 2 * texts["cuda"].count("__global__") and {line.split()[0] for line in lines} == {"sm_80", "sm_90a"}
    barriers = sum(int(line.split(" barriers, ")[0].rsplit(" ", 1)[1]) for line in lines)
    assert barriers == 2 * texts["cuda"].count("__syncthreads();") > 0 and all(line.endswith("all proved") for line in lines)


@needs_nvrtc
def test_listings_of_other_machines_are_refused() -> None:
    with pytest.raises(TargetError, match="no stage llvm"):
        compile_model(MIXED, CompileOptions("cuda", emit=("llvm",)))
