/* runner MODEL THREADS REPEATS FLAGS [FILE EXTENT...]... : runs a model on raw files, each with its extents after it; writes outputs to NAME.bin, with
 * their extents on stdout. An argument that begins with `=` is a file. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "libtcomp.h"

static void fail(int code, const char *why) {
  printf("%d %s\n", code, why);
  exit(1);
}

int main(int argc, char **argv) {
  char why[TCOMP_MESSAGE];
  tcomp_model *model;
  tcomp_session *session;
  void *arrays[16] = {NULL};
  int64_t shapes[16][64];
  int ranks[16], inputs = 0, code;
  if (argc < 5) return 3;
  if ((code = tcomp_model_load(argv[1], atoi(argv[2]), atoi(argv[4]), &model, why, sizeof why))) fail(code, why);
  for (int i = 5; i < argc; inputs++) {
    FILE *file = fopen(argv[i] + 1, "rb");
    if (argv[i][0] != '=' || !file || inputs >= 16) return 3;
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    arrays[inputs] = malloc((size_t)size + 1);
    if (fread(arrays[inputs], 1, (size_t)size, file) != (size_t)size) return 3;
    fclose(file);
    ranks[inputs] = 0;
    for (i++; i < argc && argv[i][0] != '='; i++) shapes[inputs][ranks[inputs]++] = strtoll(argv[i], NULL, 10);
  }
  if ((code = tcomp_session_new(model, &session, why, sizeof why))) fail(code, why);
  for (int n = 0; n < inputs; n++)
    if ((code = tcomp_session_set_input(session, n, arrays[n], shapes[n], ranks[n]))) fail(code, tcomp_session_message(session));
  for (int i = 0; i < atoi(argv[3]); i++)
    if ((code = tcomp_session_run(session))) fail(code, tcomp_session_message(session));
  for (int n = 0; n < tcomp_model_count(model, TCOMP_OUTPUT); n++) {
    char name[32];
    snprintf(name, sizeof name, "out%d.bin", n);
    FILE *file = fopen(name, "wb");
    if (!file || fwrite(tcomp_session_output(session, n), 1, tcomp_session_output_bytes(session, n), file) != tcomp_session_output_bytes(session, n)) return 3;
    fclose(file);
    printf("%s %s", tcomp_model_name(model, TCOMP_OUTPUT, n), tcomp_model_type(model, TCOMP_OUTPUT, n));
    for (int axis = 0; axis < tcomp_model_rank(model, TCOMP_OUTPUT, n); axis++) printf(" %lld", (long long)tcomp_session_shape(session, n)[axis]);
    printf("\n");
  }
  tcomp_session_free(session);
  tcomp_model_free(model);
  for (int n = 0; n < inputs; n++) free(arrays[n]);
  return 0;
}
