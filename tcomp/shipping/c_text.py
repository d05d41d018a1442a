"""The texts of a C package: header, example, README, and what CMake and pkg-config read."""

from __future__ import annotations

from collections.abc import Sequence

from tcomp.runtime.manifest import TensorSpec
from tcomp.shipping.c_entry import PRIVATE, SLACK
from tcomp.shipping.c_interface import CODES, CInterface, Tensor, allowed, comment

_LEAST, _USUAL = 1, 8  # a size in the example where none is given: what is nearest to it in the range


def _shape(spec: TensorSpec) -> str:
    return f"{spec.dtype}[{', '.join(map(str, spec.shape))}]"


def parameters(c: CInterface) -> list[str]:
    """Those of the function that runs the model."""
    found = [f"{c.name} *model", *(f"int64_t {name}" for name, _, _ in c.sizes), *(f"const {t.parameter}" for t in c.inputs)]
    for t in c.outputs:
        found += [t.parameter, *[f"int64_t {t.name}_shape[{len(t.spec.shape)}]"] * t.counted]
    return found


def _sizing(c: CInterface) -> list[str]:
    """Parameters of functions that only ask for sizes."""
    return [*(f"int64_t {name}" for name, _, _ in c.sizes), *(f"const {t.parameter}" for t in c.deciding)]


def _declared(result: str, name: str, arguments: Sequence[str]) -> str:
    line = f"{result}{name}({', '.join(arguments) or 'void'});"
    return line if len(line) <= 120 else f"{result}{name}(\n    " + ",\n    ".join(arguments) + ");"


def _tensors(c: CInterface) -> list[str]:
    lines = []
    for kind, tensors in (("input", c.inputs), ("output", c.outputs)):
        for t in tensors:
            late = "; upper bounds, the run sets its true extents" if t.counted else ""
            lines.append(f"{kind:6} {t.name}: {comment(_shape(t.spec))}, `{comment(t.spec.name)}` of the model{late}")
    return lines


def header(c: CInterface, arena: int | None) -> str:
    """The header; `arena` is the size in bytes of the workspace where no size is free."""
    upper, name = c.name.upper(), c.name
    sizes = [f"size   {size}: {allowed(d)}, `{comment(d.name)}` of the model" for size, _, d in c.sizes]
    codes = ",\n".join(f"  {upper}_{code} = {n} /* {text} */" for n, (code, text) in enumerate(CODES))
    codes = codes.replace(" /*", ", /*").replace("*/,\n", "*/\n").replace(f" {len(CODES) - 1}, /*", f" {len(CODES) - 1} /*")
    parts = [f"""\
/* {name}: a neural network, compiled by {comment(c.manifest.producer)} for {c.manifest.triple} ({comment(c.manifest.cpu)}).
 *
{_lines([*sizes, *_tensors(c)])}
 *
 * Arrays are dense and row-major, aligned to their elements; outputs are fastest at multiples of 64 bytes. float16 and
 * bfloat16 are passed as their bits in a uint16_t, complex numbers as two values, types narrower than a byte in a byte
 * each. No pointer to an array may be NULL.
 * Functions that return an int return a status: 0, or one that {name}_message explains.
 */
#ifndef {upper}_H
#define {upper}_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {{
#endif

/* The model, with the memory that it keeps between runs. All zero at first ({name} model = {{0}};), and then ready to run on one thread.
 * One run at a time may use it; several models run at the same time, and share code and weights. */
typedef struct {name} {{
  void *arena;         /* memory of yours for what is computed in between, at any address; NULL: the model allocates its own */
  int64_t arena_bytes; /* how large that is */
  int64_t index;       /* after a run that failed for an index out of range: the index, */
  int64_t extent;      /* and how many elements there were */
  int64_t reserved[{len(PRIVATE)}];
}} {name};

enum {{
{codes}
  /* Larger ones depend on the model. */
}};
"""]  # fmt: skip
    if arena is not None:
        parts.append(f"/* What a run needs of an arena. */\n#define {upper}_ARENA_BYTES {arena + SLACK}\n")
    note = ""
    if any(t.counted for t in c.outputs):
        note = " Extents that only the run tells are written to `_shape`, unless it is NULL."
    parts.append(
        f"/* Run the model.{note} Outputs mean nothing if the status is not 0. */\n{_declared('int ', f'{name}_run', parameters(c))}\n"
    )
    if c.free:
        shaped = [f"int64_t {t.name}_shape[{len(t.spec.shape)}]" for t in c.outputs if t.spec.shape]
        parts.append(
            f"/* The extents of outputs for these sizes, where they are wanted (not NULL). Returns a status as a run does. */\n"
            f"{_declared('int ', f'{name}_shapes', [*_sizing(c), *shaped])}\n\n"
            f"/* What a run with these sizes needs of an arena; minus a status if the sizes are wrong. */\n"
            f"{_declared('int64_t ', f'{name}_arena_bytes', _sizing(c))}\n"
        )
    if c.beside:
        parts.append(
            f"/* Map the weights, the file {name}.weights; to be called before the first run. Pages are shared between processes. */\n"
            f"int {name}_open({name} *model, const char *path);\n"
        )
    if c.threaded:
        parts.append(
            f"/* Run on this many threads from now on, the caller among them; results are the same bits for any number. */\n"
            f"int {name}_set_threads({name} *model, int32_t threads);\n\n"
            f"/* To be called in the child of a fork before the model is used there, which has none of its threads. */\n"
            f"void {name}_after_fork({name} *model);\n"
        )
    parts.append(f"""\
/* End the run that is under way in another thread, within milliseconds; it returns {upper}_STOPPED. */
void {name}_stop({name} *model);

/* What a status means, in English; never NULL. */
const char *{name}_message(int status);

/* Give back what the model allocated, and end its threads; it may be used again. NULL is allowed. */
void {name}_free({name} *model);

#ifdef __cplusplus
}}
#endif
#endif
""")  # fmt: skip
    return "\n".join(parts)


def _lines(texts: Sequence[str]) -> str:
    return "\n".join(f" * {text}" for text in texts)


def _chosen(c: CInterface) -> list[tuple[str, int]]:
    return [(name, max(d.min, min(_USUAL, _USUAL if d.max is None else d.max), _LEAST)) for name, _, d in c.sizes]


def _count(t: Tensor, c: CInterface) -> str:
    """C: how many values an input has."""
    names = {d.name: name for name, _, d in c.sizes}
    factors = ["2"] * t.spec.dtype.startswith("complex") + [str(d) if isinstance(d, int) else names[d] for d in t.spec.shape]
    return " * ".join(f"(size_t){f}" for f in factors) or "1"


def example(c: CInterface) -> str:
    """main.c: arrays from files (raw bytes) or of small numbers, one run, the first values of each output; outputs to files."""
    name, sizes = c.name, _chosen(c)
    count = len(sizes)
    body = [f"  {name} model = {{0}};"]
    body += [f'  int64_t {s} = argc > {n} ? extent("{s}", argv[{n}]) : {value};' for n, (s, value) in enumerate(sizes, 1)]
    body += [f"  size_t {t.name}_count = {_count(t, c)};" for t in c.inputs]
    for n, t in enumerate(c.inputs, count + 1):
        body.append(f"  {t.type} *{t.name} = load(argc > {n} ? argv[{n}] : NULL, {t.name}_count, sizeof *{t.name});")
        fill = f"for (size_t i_ = 0; i_ < {t.name}_count; i_++) {t.name}[i_] = {_value(t)};"
        body.append(f"  if (argc <= {n})\n    {fill}")
    if c.beside:
        body += [f'  check({name}_open(&model, getenv("{name.upper()}_WEIGHTS") ? getenv("{name.upper()}_WEIGHTS") : WEIGHTS));']
    arguments = ["&model", *(s for s, _ in sizes), *(t.name for t in c.inputs)]
    free = [t for t in c.outputs if t.spec.shape]
    if c.free:
        body += [f"  int64_t {t.name}_shape[{len(t.spec.shape)}];" for t in free]
        given = [*(s for s, _ in sizes), *(t.name for t in c.deciding), *(f"{t.name}_shape" for t in free)]
        body += [f"  check({name}_shapes({', '.join(given)}));"]
    double = {t.name: " * 2" * (t.spec.dtype.startswith("complex") and c.free) for t in c.outputs}
    for t in c.outputs:
        whole = f"product({t.name}_shape, {len(t.spec.shape)})" if c.free and t.spec.shape else f"(size_t){t.elements or 0}"
        body += [
            f"  size_t {t.name}_count = {whole}{double[t.name]};",
            f"  {t.type} *{t.name} = load(NULL, {t.name}_count, sizeof *{t.name});",
        ]
        arguments += [t.name, *[f"{t.name}_shape"] * t.counted]
    body += [f"  check({name}_run({', '.join(arguments)}));"]
    for t in c.outputs:
        if t.counted:
            body.append(f"  {t.name}_count = product({t.name}_shape, {len(t.spec.shape)}){double[t.name]};")
        body.append(f'  save("{t.name}.bin", {t.name}, {t.name}_count, sizeof *{t.name});')
        body.append(f'  printf("{t.name} (%zu values):", {t.name}_count);')
        body.append(f'  for (size_t i_ = 0; i_ < {t.name}_count && i_ < 8; i_++) printf(" %g", (double){t.name}[i_]);\n  printf("\\n");')
    body += [f"  free({t.name});" for t in (*c.inputs, *c.outputs)]
    usage = " ".join([*(f"[{s}]" for s, _ in sizes), *(f"[{t.name}.bin]" for t in c.inputs)])
    extent = f"""\

static int64_t extent(const char *name, const char *text) {{
  char *end;
  int64_t value = strtoll(text, &end, 10);
  if (end != text && !*end && value >= 0) return value;
  fprintf(stderr, "%s is not a size (%s); usage: main {usage}\\n", text, name);
  exit(2);
}}
""" * bool(sizes)
    product = """\

static size_t product(const int64_t *shape, int rank) {
  size_t count = 1;
  for (int i = 0; i < rank; i++) count *= (size_t)shape[i];
  return count;
}
""" * bool(c.free and free)
    return f"""\
/* An example: main {usage}
 * Inputs are files of raw values (numpy.ndarray.tofile), or made up; outputs are written likewise, here. */
#include <stdio.h>
#include <stdlib.h>
#include "{name}.h"
{
        f'''
#ifndef WEIGHTS
#define WEIGHTS "{name}.weights"
#endif
'''
        * c.beside
    }
static void check(int status) {{
  if (!status) return;
  fprintf(stderr, "{name}: %s\\n", {name}_message(status));
  exit(1);
}}
{extent}{product}
/* Memory for some values, zero or read from a file. */
static void *load(const char *path, size_t count, size_t size) {{
  FILE *file = path ? fopen(path, "rb") : NULL;
  void *values = calloc(count ? count : 1, size);
  if (!values || (path && !file)) {{
    perror(values ? path : "memory for an array");
    exit(2);
  }}
  if (file && (fread(values, size, count, file) != count || fgetc(file) != EOF)) {{
    fprintf(stderr, "%s: not a file of %zu values of %zu bytes, %zu bytes in all\\n", path, count, size, count * size);
    exit(2);
  }}
  if (file) fclose(file);
  return values;
}}

static void save(const char *path, const void *values, size_t count, size_t size) {{
  FILE *file = fopen(path, "wb");
  if (!file || fwrite(values, size, count, file) != count || fclose(file)) fprintf(stderr, "%s cannot be written\\n", path);
}}

int main(int argc, char **argv) {{
  (void)argc, (void)argv;
{chr(10).join(body)}
  {name}_free(&model);
  return 0;
}}
"""


def _value(t: Tensor) -> str:
    if t.type in ("float", "double"):
        return f"({t.type})(i_ % 17) / 17"
    return "i_ % 2" if t.type == "bool" else f"({t.type})(i_ % 2)"


def pkg_config(c: CInterface, version: str, libraries: str) -> str:
    """NAME.pc, which works wherever the folder is put."""
    return f"""\
prefix=${{pcfiledir}}/../..
Name: {c.name}
Description: a compiled neural network
Version: {version}
Cflags: -I${{prefix}}/include
Libs: -L${{prefix}}/lib -l{c.name}
Libs.private: {libraries}
"""


def cmake_config(c: CInterface) -> str:
    """NAMEConfig.cmake: the targets NAME::NAME, shared, and NAME::static."""
    return f"""\
get_filename_component(_{c.name}_root "${{CMAKE_CURRENT_LIST_DIR}}/../../.." ABSOLUTE)
if(NOT TARGET {c.name}::{c.name})
  find_package(Threads REQUIRED)
  add_library({c.name}::{c.name} SHARED IMPORTED)
  set_target_properties({c.name}::{c.name} PROPERTIES
    IMPORTED_LOCATION "${{_{c.name}_root}}/lib/lib{c.name}.so"
    IMPORTED_SONAME "lib{c.name}.so"
    INTERFACE_INCLUDE_DIRECTORIES "${{_{c.name}_root}}/include")
  add_library({c.name}::static STATIC IMPORTED)
  set_target_properties({c.name}::static PROPERTIES
    IMPORTED_LOCATION "${{_{c.name}_root}}/lib/lib{c.name}.a"
    INTERFACE_INCLUDE_DIRECTORIES "${{_{c.name}_root}}/include"
    INTERFACE_LINK_LIBRARIES Threads::Threads)
endif()
"""


def cmake_version(version: str) -> str:
    """NAMEConfigVersion.cmake."""
    return f"""\
set(PACKAGE_VERSION "{version}")
if(PACKAGE_FIND_VERSION VERSION_GREATER PACKAGE_VERSION)
  set(PACKAGE_VERSION_COMPATIBLE FALSE)
else()
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
  if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
    set(PACKAGE_VERSION_EXACT TRUE)
  endif()
endif()
"""


def cmake_example(c: CInterface) -> str:
    """CMakeLists.txt of the example."""
    weights = f'target_compile_definitions(main PRIVATE WEIGHTS="${{CMAKE_CURRENT_SOURCE_DIR}}/../lib/{c.name}.weights")\n' * c.beside
    return f"""\
cmake_minimum_required(VERSION 3.13)
project({c.name}_example C)
find_package({c.name} CONFIG REQUIRED PATHS "${{CMAKE_CURRENT_SOURCE_DIR}}/../lib/cmake/{c.name}")
add_executable(main main.c)
target_link_libraries(main PRIVATE {c.name}::{c.name})  # {c.name}::static links the model into the program
{weights}"""


def readme(c: CInterface, libraries: str, building: str = "") -> str:
    """README.md. `building` says how the example is built where there is nothing for CMake and pkg-config."""
    name, upper = c.name, c.name.upper()
    beside = f" Its weights are the file `lib/{name}.weights`, which `{name}_open` maps." * c.beside
    arena = f"`{name}_arena_bytes(...)`" if c.free else f"`{upper}_ARENA_BYTES`"
    ways = f"""\
cc -std=c99 -Iinclude example/main.c lib/lib{name}.a {libraries} -o main     # one program that holds the model
cc -std=c99 example/main.c $(PKG_CONFIG_PATH=lib/pkgconfig pkg-config --cflags --libs {name}) -Wl,-rpath,$PWD/lib -o main
cmake -S example -B build && cmake --build build && build/main"""
    threads = f"`{name}_set_threads(&model, 4)` runs it on four threads, with the same bits as on one." * c.threaded
    return f"""\
# {name}

A neural network as a library for C, compiled by {c.manifest.producer} for {c.manifest.triple} ({c.manifest.cpu}).
It needs the C library and nothing else.{beside} The processor must have: {", ".join(c.manifest.features) or "no extensions"}.

```
{chr(10).join(_tensors(c))}
```

`include/{name}.h` says all about its functions. The example, built{"" if building else " in three ways"}:

```
{building or ways}
```

In a program of your own:

```c
{name} model = {{0}};
int status = {_call(c)};
if (status) fprintf(stderr, "%s\\n", {name}_message(status));
{name}_free(&model);
```

Memory: a run computes in an arena, which the model allocates once, or which is yours: `model.arena` and `model.arena_bytes`,
of {arena} bytes. Nothing else is allocated. {threads}

A model is native code: use it only if you trust who made it.
"""


def _call(c: CInterface) -> str:
    arguments = ["&model", *(s for s, _, _ in c.sizes), *(t.name for t in c.inputs)]
    for t in c.outputs:
        arguments += [t.name, *["NULL"] * t.counted]
    return f"{c.name}_run({', '.join(arguments)})"
