/* The interface between a compiled model and whoever runs it.
 *
 * A model is a shared object. Artifact.extract(folder) writes
 *     model.so        the code; needs nothing but libc
 *     weights.bin     the constants; map it or read it to an address that is a multiple of 64 bytes
 *     manifest.json   names, element types, shapes, symbolic dims, error messages
 *
 * To run a model whose shapes are all static:
 *
 *     void *model = dlopen("./model.so", RTLD_NOW | RTLD_LOCAL);
 *     tcomp_run_fn *run = (tcomp_run_fn *)dlsym(model, "tcomp_run");
 *     tcomp_plan_fn *plan = (tcomp_plan_fn *)dlsym(model, "tcomp_plan");
 *     int64_t sizes[1 + NUMBER_OF_OUTPUT_EXTENTS];
 *     plan(NULL, sizes);
 *     tcomp_call call = {inputs, outputs, weights, aligned_alloc(64, round_up_to_64(sizes[0])), NULL, NULL, 0, 0, 0};
 *     int32_t error = run(&call);
 *
 * Different calls may run at the same time if they share neither outputs, workspace nor dims; they may share a pool, also one that the code
 * of another model made. The code must come from a source you trust: loading a model is loading native code.
 */
#ifndef TCOMP_H
#define TCOMP_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* `parallel_for` calls body(closure, begin, end) on contiguous, disjoint chunks that cover [0, extent), the first of them on the calling
 * thread, and returns when all are done. Chunks are balanced to within one; empty ones are not called. Any number of threads may call it,
 * bodies as well: where the workers are busy with another region, it does not wait, but runs body(closure, 0, extent). Another implementation
 * may be substituted: models use the first field alone, and results do not depend on the partition.
 *
 * A copy of the structure is another view of the same workers, and may have another number of threads (1 to 4096). Workers are started by the
 * first region that wants them. */
typedef struct tcomp_pool tcomp_pool;
struct tcomp_pool {
  void (*parallel_for)(tcomp_pool *self, void (*body)(void *closure, int64_t begin, int64_t end), void *closure, int64_t extent);
  int32_t threads; /* the most that a region uses, its caller included */
  void *workers;
};

typedef struct tcomp_call {
  const void *const *inputs; /* one per manifest input: dense, row-major, aligned to the element size */
  void *const *outputs;      /* one per manifest output: as large as tcomp_plan says, aligned to the element size, overlapping nothing; fastest at 64 bytes */
  const void *weights;       /* the weights section, aligned to 64 bytes; read only */
  void *workspace;           /* as large as tcomp_plan says, aligned to 64 bytes; contents mean nothing before and after */
  int64_t *dims;             /* one per manifest dim, in its order; NULL if there is none */
  tcomp_pool *pool;          /* NULL: run on the calling thread alone */
  int64_t status;            /* 0 before the run. Another thread may set it to -1 meanwhile: the run then ends within milliseconds */
  int64_t index, extent;     /* of an access out of range, if the run ends for one: the index, and how many elements there are */
} tcomp_call;

/* Runs the model. Returns the status: 0, -1 if it was stopped, or 1 + the index of a message in the manifest's `errors`; outputs are
 * unspecified then, and the status has to be set to 0 before the next run.
 * Writes the data-dependent entries of `dims`. An output whose extents depend on them is dense, row-major, in the true extents: it
 * takes the first elements of its planned place. */
typedef int32_t tcomp_run_fn(tcomp_call *call);

/* Only in models some of whose dims are given by values of inputs (`values` of a dim in the manifest, such as the elements of Reshape's shape).
 * Writes these entries of `dims`, from the elements of the inputs and the entries that come from shapes; to be called before tcomp_plan, and
 * again whenever these values change. Returns 0; or 1 + the number of a dim that would be out of its range, with its value in `dims`: the
 * model must not run on such inputs. */
typedef int32_t tcomp_bind_fn(const void *const *inputs, int64_t *dims);

/* sizes[0] = bytes of workspace; then the extents of all outputs, flattened in order. The model must not be run where sizes[0] is below 0:
 * -1 if these dims are too small for the model, -2 if they are so large that a size does not fit an int64_t, -3 - n if they contradict
 * message n of the manifest's `checks`.
 * Data-dependent entries of `dims` are -1 before the run: extents are then upper bounds. Called again with the entries that the run
 * wrote, it gives the true extents. */
typedef void tcomp_plan_fn(const int64_t *dims, int64_t *sizes);

/* Only in models built for more than one thread. `threads` includes the caller. `cpus`, if not NULL, holds `threads` CPU numbers (below
 * 1024) to pin the workers to that this starts; the first entry is the caller's and is ignored. Returns NULL if there is no memory; regions run
 * on fewer threads while the system refuses to start more. The library must stay loaded as long as the pool is. */
typedef tcomp_pool *tcomp_pool_create_fn(int32_t threads, const int32_t *cpus);

/* Joins the workers. `pool` is what tcomp_pool_create returned, and must be idle; NULL is allowed. */
typedef void tcomp_pool_destroy_fn(tcomp_pool *pool);

/* To be called in a child of fork() before the pool is used there: the child has none of its workers. */
typedef void tcomp_pool_forget_fn(tcomp_pool *pool);

/* Of all this about pools; a program that was written for this header checks it, once. */
#define TCOMP_POOL_VERSION 2
typedef int32_t tcomp_pool_version_fn(void);

#ifdef __cplusplus
}
#endif
#endif
