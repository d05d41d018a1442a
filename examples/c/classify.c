/* classify MODEL.tcomp INPUT.bin: runs a model on the values in a file, and prints where its first output is largest. */
#include <stdio.h>
#include <stdlib.h>

#include "libtcomp.h"

static void fail(const char *why) {
  fprintf(stderr, "error: %s\n", why);
  exit(2);
}

int main(int argc, char **argv) {
  char why[TCOMP_MESSAGE];
  tcomp_model *model;
  tcomp_session *session;
  int64_t shape[64];
  if (argc != 3) fail("usage: classify MODEL.tcomp INPUT.bin");
  if (tcomp_model_load(argv[1], 0, 0, &model, why, sizeof why)) fail(why);
  if (tcomp_session_new(model, &session, why, sizeof why)) fail(why);

  size_t count = 1;
  int rank = tcomp_model_rank(model, TCOMP_INPUT, 0);
  for (int axis = 0; axis < rank; axis++) {
    shape[axis] = tcomp_model_extent(model, TCOMP_INPUT, 0, axis);
    if (shape[axis] < 0) shape[axis] = 1;
    count *= (size_t)shape[axis];
  }
  float *values = calloc(count + 1, sizeof *values);
  FILE *file = fopen(argv[2], "rb");
  if (!values || !file || fread(values, sizeof *values, count + 1, file) != count) fail("the input is not as many values as the model takes");
  fclose(file);

  if (tcomp_session_set_input(session, 0, values, shape, rank) || tcomp_session_run(session)) fail(tcomp_session_message(session));
  const float *scores = tcomp_session_output(session, 0);
  size_t best = 0, classes = tcomp_session_output_bytes(session, 0) / sizeof *scores;
  for (size_t i = 1; i < classes; i++)
    if (scores[i] > scores[best]) best = i;
  printf("class %zu\n", best);

  tcomp_session_free(session);
  tcomp_model_free(model);
  free(values);
  return 0;
}
