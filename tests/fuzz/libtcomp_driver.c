/* Loads artifacts, each given on stdin as a flag byte, 8 bytes of length and its content; prints the code of each load. What is accepted is
 * asked for all that it says, and run if the flag says that its code fits its manifest. Manifests are also read from memory of exactly their
 * size, where sanitizers see what is read beyond them. */
#include "libtcomp.c"

static size_t asked;

static void use(tcomp_model *model, int runs) {
  char why[TCOMP_MESSAGE];
  tcomp_session *session;
  void *arrays[64] = {NULL};
  for (int kind = -1; kind < 3; kind++)
    for (int n = -1; n <= tcomp_model_count(model, kind); n++) {
      const char *name = tcomp_model_name(model, kind, n), *type = tcomp_model_type(model, kind, n);
      asked += (name ? strlen(name) : 0) + (type ? strlen(type) : 0) + tcomp_model_element_bytes(model, kind, n);
      for (int axis = -1; axis <= tcomp_model_rank(model, kind, n); axis++) {
        const char *free = tcomp_model_extent_name(model, kind, n, axis);
        asked += (size_t)tcomp_model_extent(model, kind, n, axis) + (free ? strlen(free) : 0);
      }
    }
  if (tcomp_session_new(model, &session, why, sizeof why)) exit(3);
  for (int n = 0; n < tcomp_model_count(model, TCOMP_INPUT) && n < 64; n++) {
    int64_t shape[64];
    size_t count = tcomp_model_element_bytes(model, TCOMP_INPUT, n);
    for (int axis = 0; axis < tcomp_model_rank(model, TCOMP_INPUT, n); axis++) {
      shape[axis] = tcomp_model_extent(model, TCOMP_INPUT, n, axis);
      if (shape[axis] < 0) shape[axis] = 3;
      count = shape[axis] > 1000 || count > 1000000 ? 8 : count * (size_t)shape[axis];
    }
    arrays[n] = calloc(1, count + 8);
    tcomp_session_set_input(session, n, arrays[n], shape, tcomp_model_rank(model, TCOMP_INPUT, n));
    tcomp_session_set_input(session, n, arrays[n], NULL, 70);
  }
  if (runs) printf("run %d ", tcomp_session_run(session));
  for (int n = -1; n <= tcomp_model_count(model, TCOMP_OUTPUT); n++) {
    const unsigned char *values = tcomp_session_output(session, n);
    for (size_t i = 0; values && i < tcomp_session_output_bytes(session, n); i++) asked += values[i];
  }
  asked += strlen(tcomp_session_message(session));
  tcomp_session_free(session);
  for (int n = 0; n < 64; n++) free(arrays[n]);
}

static void read_manifest(const char *content, size_t size) {
  errors none = {NULL, 0};
  int count;
  char *text = malloc(size);
  memcpy(text, content, size);
  tcomp_model *m = calloc(1, sizeof *m);
  json root = {text, skip(text, text + size, 0)}, f[FIELDS];
  if (root.end == text + size && size && *text == '{') {
    members(root, FIELD_NAMES, FIELDS, f);
    m->weights.size = 1 << 20;
    m->image = calloc(1, m->weights.size);
    int code = read_dims(m, f[DIMS], none) || read_tensors(m, TCOMP_INPUT, f[INPUTS], none) || read_tensors(m, TCOMP_OUTPUT, f[OUTPUTS], none);
    asked += (size_t)(code + check_weights(m, f[WEIGHTS], 1, none) + check_machine(f[TRIPLE], f[FEATURES], none));
    check_digest(m->image, 64, f[CODE_SUM], "code does", none);
    free_strings(strings(f[CHECKS], &count));
    free(m->image);
    m->image = NULL;
  }
  tcomp_model_free(m);
  free(text);
}

int main(void) {
  unsigned char head[9];
  while (fread(head, 1, 9, stdin) == 9) {
    char path[64], why[TCOMP_MESSAGE] = "";
    size_t size = 0;
    for (int i = 8; i; i--) size = size << 8 | head[i];
    char *content = malloc(size + 1);
    if (!content || fread(content, 1, size, stdin) != size) return 2;
    int file = (int)syscall(SYS_memfd_create, "artifact", 1);
    if (write(file, content, size) != (ssize_t)size) return 2;
    uint64_t text = size > HEADER ? word((const uint8_t *)content + 56, 8) : 0;
    if (text && text <= size - HEADER) read_manifest(content + HEADER, text);
    free(content);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    tcomp_model *model;
    int code = tcomp_model_load(path, 1, TCOMP_VERIFY, &model, why, sizeof why);
    if (!code) use(model, head[0]);
    tcomp_model_free(model);
    close(file);
    if (code && !*why) return 4;
    printf("%d %s\n", code, why);
    fflush(stdout);
  }
  return asked == 1 ? 5 : 0;
}
