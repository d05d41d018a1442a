/* libtcomp: loads compiled models (.tcomp files) and runs them, without Python.
 *
 *     tcomp_model *model;
 *     tcomp_session *session;
 *     char why[TCOMP_MESSAGE];
 *     if (tcomp_model_load("resnet50.tcomp", 0, 0, &model, why, sizeof why)) puts(why), exit(1);
 *     if (tcomp_session_new(model, &session, why, sizeof why)) puts(why), exit(1);
 *     tcomp_session_set_input(session, 0, image, (const int64_t[]){1, 3, 224, 224}, 4);
 *     if (tcomp_session_run(session)) puts(tcomp_session_message(session));
 *     const float *scores = tcomp_session_output(session, 0);
 *
 * One C file (libtcomp.c, C99), this header and tcomp.h; Linux, x86-64 and AArch64: cc -std=c99 -O2 program.c libtcomp.c -ldl -lpthread
 *
 * A model is immutable, and may be used by any number of threads; each of them needs a session of its own. Functions return TCOMP_OK or
 * another code below. Arrays are dense and row-major. A file is checked before its code is loaded, but checksums show damage, not intent:
 * a model is native code, load only what you trust. While it is loaded, nobody may change its file in place; replacing it is fine. */
#ifndef LIBTCOMP_H
#define LIBTCOMP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  TCOMP_OK,
  TCOMP_STOPPED,       /* tcomp_session_stop was called */
  TCOMP_NO_MEMORY,
  TCOMP_CANNOT_READ,   /* there is no such file, or the system refuses it */
  TCOMP_DAMAGED,       /* not an artifact, or not as it was written */
  TCOMP_OTHER_FORMAT,  /* by another release of tcomp */
  TCOMP_OTHER_MACHINE, /* for a processor that this one is not */
  TCOMP_CANNOT_LOAD,   /* the system refuses its code */
  TCOMP_BAD_ARGUMENT,  /* NULL, a number out of range, an input that is missing */
  TCOMP_BAD_SHAPE,     /* sizes that the model cannot have */
  TCOMP_OUT_OF_RANGE   /* the model ended the run: an index out of range, or an integer divided by zero */
};

#define TCOMP_MESSAGE 512 /* bytes in which every message fits */
#define TCOMP_VERIFY 1    /* a flag of tcomp_model_load: also check weights and notes, which reads all of them */

typedef struct tcomp_model tcomp_model;
typedef struct tcomp_session tcomp_session;

/* Load the model in a file, to run on at most so many threads (1 to 4096; 0: as many as it was compiled for, or as there are processors).
 * A code other than TCOMP_OK comes with a message, cut to `capacity` bytes, unless `message` is NULL. */
int tcomp_model_load(const char *path, int threads, int flags, tcomp_model **model, char *message, size_t capacity);

/* Unload a model that no session uses any more. NULL is allowed. */
void tcomp_model_free(tcomp_model *model);

/* To be called in the child of a fork before the model is used there, which has none of its threads. */
void tcomp_model_after_fork(tcomp_model *model);

enum { TCOMP_INPUT, TCOMP_OUTPUT }; /* kinds of tensors, which have numbers from 0 on, in the order of the model */

/* How many tensors of a kind there are; and of one of them: its name and element type ("float32"), the bytes of an element, how many axes.
 * NULL, 0 or -1 for numbers that no tensor has. Types of less than a byte take one byte an element. */
int tcomp_model_count(const tcomp_model *model, int kind);
const char *tcomp_model_name(const tcomp_model *model, int kind, int number);
const char *tcomp_model_type(const tcomp_model *model, int kind, int number);
size_t tcomp_model_element_bytes(const tcomp_model *model, int kind, int number);
int tcomp_model_rank(const tcomp_model *model, int kind, int number);

/* The extent of an axis: a number, or -1 if it is free; and what it is called then ("n", or for outputs "2*n"), else NULL. */
int64_t tcomp_model_extent(const tcomp_model *model, int kind, int number, int axis);
const char *tcomp_model_extent_name(const tcomp_model *model, int kind, int number, int axis);

/* What runs a model: memory for one run at a time. It must be freed before its model is. */
int tcomp_session_new(tcomp_model *model, tcomp_session **session, char *message, size_t capacity);
void tcomp_session_free(tcomp_session *session);

/* The array of an input, which stays the caller's, and is read by every run from now on; `shape`, of `rank` extents, is copied. */
int tcomp_session_set_input(tcomp_session *session, int number, const void *data, const int64_t *shape, int rank);

/* Have an output written to memory of the caller, of so many bytes, aligned to its elements, which overlaps no input or other output; NULL:
 * to memory of the session, as at first. */
int tcomp_session_set_output(tcomp_session *session, int number, void *data, size_t bytes);

int tcomp_session_run(tcomp_session *session);

/* After a run: the array of an output, valid until the next run; its extents, as many as its rank, and how many bytes they take. */
const void *tcomp_session_output(const tcomp_session *session, int number);
const int64_t *tcomp_session_shape(const tcomp_session *session, int number);
size_t tcomp_session_output_bytes(const tcomp_session *session, int number);

/* End the run that is under way in another thread, within milliseconds. */
void tcomp_session_stop(tcomp_session *session);

/* Why the last call on a session returned another code than TCOMP_OK; never NULL. */
const char *tcomp_session_message(const tcomp_session *session);

#ifdef __cplusplus
}
#endif
#endif
