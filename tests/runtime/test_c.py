"""A C program that loads and runs a model without Python, through the installed header alone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import tcomp.runtime
from tcomp.runtime import read_artifact
from tests.runtime import native_models as models

MAIN = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include "tcomp.h"

int main(int argc, char **argv) {
  char path[4096];
  snprintf(path, sizeof path, "%s/model.so", argv[1]);
  void *model = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!model) { fprintf(stderr, "%s\n", dlerror()); return 2; }
  tcomp_run_fn *run = (tcomp_run_fn *)dlsym(model, "tcomp_run");
  tcomp_plan_fn *plan = (tcomp_plan_fn *)dlsym(model, "tcomp_plan");
  tcomp_pool_create_fn *create = (tcomp_pool_create_fn *)dlsym(model, "tcomp_pool_create");
  tcomp_pool_destroy_fn *destroy = (tcomp_pool_destroy_fn *)dlsym(model, "tcomp_pool_destroy");

  snprintf(path, sizeof path, "%s/weights.bin", argv[1]);
  FILE *file = fopen(path, "rb");
  void *weights = aligned_alloc(64, 64);
  if (!file || fread(weights, 1, 64, file) != 16) return 3;
  fclose(file);

  int64_t rows = 1000, dims[1] = {rows}, sizes[3];
  plan(dims, sizes);
  if (sizes[1] != rows || sizes[2] != 4) return 4;
  float *x = malloc(rows * 16), s = 3, *y = aligned_alloc(64, rows * 16);
  for (int64_t i = 0; i < rows * 4; i++) x[i] = (float)i;
  const void *inputs[2] = {x, &s};
  void *outputs[1] = {y};
  tcomp_pool *pool = create(atoi(argv[2]), NULL);
  tcomp_call call = {inputs, outputs, weights, aligned_alloc(64, (sizes[0] + 63) / 64 * 64), dims, pool, 0, 0, 0};
  int32_t error = run(&call);
  if (error) return 5;
  fwrite(y, 16, rows, stdout);
  destroy(pool);
  return 0;
}
"""


@pytest.mark.parametrize("language", ["c", "c++"])
def test_a_c_program_runs_a_model(language: str, affine: bytes, tmp_path: Path) -> None:
    compiler = shutil.which("cc" if language == "c" else "c++")
    if compiler is None:
        pytest.skip(f"there is no {language} compiler")
    source = MAIN if language == "c" else MAIN.replace("= malloc", "= (float *)malloc").replace("*y = aligned", "*y = (float *)aligned")
    (tmp_path / "main").with_suffix(".c").write_text(source)
    include = Path(tcomp.runtime.__file__).parent / "include"
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    command = [compiler, "-x", language, *warnings, f"-I{include}", "-o", tmp_path / "main", tmp_path / "main.c", "-ldl"]
    subprocess.run(command, check=True)
    read_artifact(affine).extract(tmp_path / "model")
    x = np.arange(4000, dtype=np.float32).reshape(1000, 4)
    for threads in ("1", "3"):
        done = subprocess.run([tmp_path / "main", tmp_path / "model", threads], capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert np.array_equal(np.frombuffer(done.stdout, np.float32).reshape(1000, 4), 3 * x + models.W)
