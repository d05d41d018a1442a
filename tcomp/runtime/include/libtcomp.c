/* libtcomp: see libtcomp.h. tcomp/runtime/artifact.py and manifest.py describe the file, tcomp.h the interface of its code. */
#define _GNU_SOURCE 1
#include "libtcomp.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tcomp.h"

#define LAYOUT 3
#define FORMAT 4
#define HEADER 192
#define HEAD 80 /* bytes of the header that describe the file; their checksum follows */
#define PAGE 4096
#define ALIGN 64
#define HUGE_PAGE ((size_t)2 << 20) /* bytes */
#define BLOCK (1 << 20) /* bytes of a weight that have a checksum of their own */
#define TEXT_LIMIT ((uint64_t)64 << 20) /* bytes of manifest and notes */
#define CODE_LIMIT ((uint64_t)1 << 31)
#define LIMIT ((int64_t)1 << 62) /* of sizes and offsets in a manifest */
#define MEMORY_LIMIT ((int64_t)1 << 46) /* bytes: more than any machine has */
#define MAX_AXES 64
#define MOST 4096 /* dims, inputs, outputs: more than any model has */
#define MAX_DEPTH 64 /* of values in values of a manifest, which has five */

typedef struct { char *message; size_t capacity; } errors;
static int fail(errors e, int code, const char *format, ...) {
  if (e.message && e.capacity) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(e.message, e.capacity, format, arguments);
    va_end(arguments);
  }
  return code;
}

static int no_memory(errors e) { return fail(e, TCOMP_NO_MEMORY, "there is no memory"); }

/* ---- SHA-256 (FIPS 180-4) and CRC-32 (ISO 3309, as zlib computes it) ---- */

static const uint32_t ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

typedef struct { uint32_t state[8]; uint64_t length; uint8_t block[64]; } sha256;
static uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void sha256_block(uint32_t s[8], const uint8_t *p) {
  uint32_t w[64], a = s[0], b = s[1], c = s[2], d = s[3], e = s[4], f = s[5], g = s[6], h = s[7];
  for (int i = 0; i < 16; i++) w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 | (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
  for (int i = 16; i < 64; i++) {
    uint32_t x = w[i - 15], y = w[i - 2];
    w[i] = w[i - 16] + w[i - 7] + (rotate(x, 7) ^ rotate(x, 18) ^ x >> 3) + (rotate(y, 17) ^ rotate(y, 19) ^ y >> 10);
  }
  for (int i = 0; i < 64; i++) {
    uint32_t x = (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & f) ^ (~e & g)) + h + ROUND[i] + w[i];
    uint32_t y = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + x, d = c, c = b, b = a, a = x + y;
  }
  s[0] += a, s[1] += b, s[2] += c, s[3] += d, s[4] += e, s[5] += f, s[6] += g, s[7] += h;
}

static void sha256_add(sha256 *h, const uint8_t *p, uint64_t size) {
  while (size) {
    uint64_t used = h->length % 64, taken = 64 - used < size ? 64 - used : size;
    if (taken < 64) memcpy(h->block + used, p, taken);
    if (used + taken == 64) sha256_block(h->state, taken < 64 ? h->block : p);
    h->length += taken, p += taken, size -= taken;
  }
}

/* The digest of two pieces, one after the other. */
static void digest_of(const uint8_t *p, uint64_t size, const uint8_t *q, uint64_t more, uint8_t digest[32]) {
  static const uint8_t padding[64] = {0x80};
  sha256 h = {{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}, 0, {0}};
  uint8_t length[8];
  sha256_add(&h, p, size);
  sha256_add(&h, q, more);
  for (int i = 0; i < 8; i++) length[i] = (uint8_t)((size + more) * 8 >> (56 - 8 * i));
  sha256_add(&h, padding, 1 + (119 - h.length % 64) % 64);
  sha256_add(&h, length, 8);
  for (int i = 0; i < 32; i++) digest[i] = (uint8_t)(h.state[i / 4] >> (24 - 8 * (i % 4)));
}

static uint32_t crc32(const uint8_t *p, uint64_t size) {
  uint32_t table[256], crc = ~(uint32_t)0;
  for (uint32_t i = 0; i < 256; i++) {
    table[i] = i;
    for (int bit = 0; bit < 8; bit++) table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xedb88320 : 0);
  }
  for (uint64_t i = 0; i < size; i++) crc = crc >> 8 ^ table[(crc ^ p[i]) & 255];
  return ~crc;
}

/* ---- Canonical JSON (no blanks): a value is a piece of text, checked once as a whole and then read where it is needed ---- */

typedef struct { const char *at, *end; } json; /* at == NULL: there is none */

static int hex(const char *p, const char *end, int digits) {
  int value = 0;
  for (int i = 0; i < digits; i++) {
    char c = p + i < end ? p[i] : 0;
    int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}

/* The end of the string, number or word at p; NULL if it is none. What is in it is checked where it is read. */
static const char *scalar(const char *p, const char *end) {
  const char *start = p;
  if (p < end && *p == '"') {
    for (p++; p < end && *p != '"'; p++)
      if ((unsigned char)*p < 32 || (*p == '\\' && ++p >= end)) return NULL;
    return p < end ? p + 1 : NULL;
  }
  while (p < end && *p && strchr("+-.0123456789abcdefghijklmnopqrstuvwxyzE", *p)) p++;
  return p > start ? p : NULL;
}

/* The end of the value at p, which must be valid; NULL if it is not. */
static const char *skip(const char *p, const char *end, int depth) {
  if (p >= end || (*p != '{' && *p != '[')) return scalar(p, end);
  char object = *p == '{', close = object ? '}' : ']';
  if (depth > MAX_DEPTH) return NULL;
  if (++p < end && *p == close) return p + 1;
  for (;; p++) {
    if (object && (p >= end || *p != '"' || !(p = scalar(p, end)) || p >= end || *p++ != ':')) return NULL;
    if (!(p = skip(p, end, depth + 1)) || p >= end) return NULL;
    if (*p == close) return p + 1;
    if (*p != ',') return NULL;
  }
}

/* The next element of an array, or member of an object (whose key is `*key`), from `*place` on, which begins as NULL. */
static json next(json list, const char **place, json *key) {
  json found = {NULL, NULL};
  if (!list.at || (*list.at != '[' && *list.at != '{')) return found;
  const char *p = *place ? *place : list.at + 1;
  p += *place && *p == ',';
  if (*p == ']' || *p == '}') return found;
  if (*list.at == '{') key->at = p, key->end = scalar(p, list.end), p = key->end + 1;
  found.at = p;
  found.end = *place = skip(p, list.end, 0);
  return found;
}

/* The members of an object with these names; the last one of each, if several have its name. */
static void members(json object, const char *const *names, int count, json *found) {
  json key, value;
  const char *place = NULL;
  for (int i = 0; i < count; i++) found[i].at = found[i].end = NULL;
  while (object.at && *object.at == '{' && (value = next(object, &place, &key)).at)
    for (int i = 0; i < count; i++)
      if ((size_t)(key.end - key.at) == strlen(names[i]) + 2 && !memcmp(key.at + 1, names[i], strlen(names[i]))) found[i] = value;
}

static json member(json object, const char *name) {
  json found;
  members(object, &name, 1, &found);
  return found;
}

/* How many elements an array has; -1 for what is none. */
static int64_t length(json array) {
  if (!array.at || *array.at != '[') return -1;
  const char *place = NULL;
  int64_t count = 0;
  json key;
  while (next(array, &place, &key).at) count++;
  return count;
}

static int is(json value, const char *word) {
  return value.at && (size_t)(value.end - value.at) == strlen(word) && !memcmp(value.at, word, strlen(word));
}

/* An integer from 0 to `most`; 0 for what is none. */
static int integer(json value, int64_t most, int64_t *found) {
  uint64_t n = 0;
  if (!value.at || value.end - value.at > 19) return 0;
  for (const char *p = value.at; p < value.end; p++) {
    if (*p < '0' || *p > '9') return 0;
    n = n * 10 + (uint64_t)(*p - '0');
  }
  *found = (int64_t)n;
  return n <= (uint64_t)most;
}

/* A string as new memory; NULL if it is none, or there is no memory. Canonical JSON writes no other characters as numbers than controls. */
static char *string(json value) {
  static const char from[] = "\"\\bfnrt/", to[] = "\"\\\b\f\n\r\t/";
  if (!value.at || *value.at != '"') return NULL;
  char *text = malloc((size_t)(value.end - value.at)), *out = text;
  for (const char *p = value.at + 1, *end = value.end - 1; text && p < end; p++) {
    int code = (unsigned char)*p;
    if (code == '\\') {
      const char *plain = strchr(from, *++p);
      code = *p == 'u' ? hex(p + 1, end, 4) : *p && plain ? to[plain - from] : -1;
      p += *p == 'u' ? 4 : 0;
      if (code <= 0 || code > 127) return free(text), NULL;
    }
    *out++ = (char)code;
  }
  if (text) *out = 0;
  return text;
}

/* ---- The model ---- */

enum { VERSION, TRIPLE, FEATURES, INPUTS, OUTPUTS, DIMS, THREADS, ERRORS, CHECKS, WEIGHTS, CODE_SUM, NOTES_SUM, HOST, STATE, FIELDS };
static const char *const FIELD_NAMES[FIELDS] = {"format", "triple", "features", "inputs",  "outputs",     "dims",
                                                "threads", "errors", "checks", "weights", "code_sha256", "notes_sha256", "host", "state"};

typedef struct { char *name, *type, *texts[MAX_AXES]; size_t element; int rank, dims[MAX_AXES]; int64_t extents[MAX_AXES]; } tensor;
typedef struct { char *name, *what; int64_t min, max; int late, known; } dim; /* max: INT64_MAX: none; late: known from a run alone */
typedef struct { uint64_t at, size; } section;

struct tcomp_model {
  uint8_t *image;
  uint64_t size;
  section code, weights, manifest, notes;
  tensor *tensors[2];
  int counts[2], dim_count, error_count, check_count, extent_count, late, binds; /* extent_count: of all outputs */
  dim *dims;
  char **messages, **checks; /* of errors; of contradictions among sizes */
  void *library;
  tcomp_run_fn *run;
  tcomp_plan_fn *plan;
  tcomp_bind_fn *bind;
  tcomp_pool_destroy_fn *pool_destroy;
  tcomp_pool_forget_fn *pool_forget;
  tcomp_pool *pool;
};

static int damaged(errors e, const char *why) { return fail(e, TCOMP_DAMAGED, "the artifact is truncated or damaged: %s", why); }
static int malformed(errors e, const char *where) {
  return fail(e, TCOMP_DAMAGED, "the artifact is malformed: its manifest has no valid `%s` (or there is no memory)", where);
}

static uint64_t up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }
static uint64_t word(const uint8_t *p, int bytes) {
  uint64_t value = 0;
  while (bytes--) value = value << 8 | p[bytes];
  return value;
}

static int zeros(const uint8_t *from, const uint8_t *to) {
  while (from < to)
    if (*from++) return 0;
  return 1;
}

static int read_file(tcomp_model *m, const char *path, errors e) {
  int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not block */
  struct stat status;
  if (file < 0) return fail(e, TCOMP_CANNOT_READ, "cannot read %.200s: %s", path, strerror(errno));
  int regular = !fstat(file, &status) && S_ISREG(status.st_mode) && status.st_size > 0;
  void *at = regular ? mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
  int problem = errno;
  close(file);
  if (!regular) return fail(e, TCOMP_CANNOT_READ, "cannot read %.200s: it is empty, or no regular file", path);
  if (at == MAP_FAILED) return fail(e, TCOMP_CANNOT_READ, "cannot map %.200s: %s", path, strerror(problem));
  m->image = at, m->size = (size_t)status.st_size, (void)madvise(at, m->size, MADV_HUGEPAGE); /* huge pages where the system has any */
  return TCOMP_OK;
}

/* Header and layout: all is where it must be. */
static int read_header(tcomp_model *m, errors e) {
  const uint8_t *p = m->image;
  section *s[4] = {&m->code, &m->weights, &m->manifest, &m->notes};
  uint8_t digest[32];
  if (m->size < 8 || memcmp(p, "\x89TCOMP\r\n", 8)) return fail(e, TCOMP_DAMAGED, "not a tcomp artifact: it has no magic bytes");
  if (m->size < HEADER) return damaged(e, "it is shorter than its header");
  if (word(p + 8, 4) != LAYOUT)
    return fail(e, TCOMP_OTHER_FORMAT, "the artifact has layout version %d, this library reads version %d", (int)word(p + 8, 4), LAYOUT);
  for (int i = 0; i < 4; i++) s[i]->at = word(p + 16 + 16 * i, 8), s[i]->size = word(p + 24 + 16 * i, 8);
  if (m->manifest.size > TEXT_LIMIT || m->notes.size > TEXT_LIMIT || m->code.size > CODE_LIMIT || m->weights.size > (uint64_t)LIMIT)
    return damaged(e, "a section is larger than allowed");
  uint64_t code = up(HEADER + m->manifest.size, ALIGN), weights = up(code + m->code.size, PAGE);
  uint64_t notes = up(weights + m->weights.size, ALIGN), end = notes + m->notes.size;
  if (m->manifest.at != HEADER || m->code.at != code || m->weights.at != weights || m->notes.at != notes || end != m->size)
    return damaged(e, "its size is not what its header tells");
  digest_of(p, HEAD, p + HEADER, m->manifest.size, digest);
  if (memcmp(digest, p + HEAD, 32)) return damaged(e, "header and manifest do not match their checksum");
  if (word(p + 12, 4) || !zeros(p + HEAD + 32 + 64, p + HEADER) || !zeros(p + HEADER + m->manifest.size, p + code) ||
      !zeros(p + code + m->code.size, p + weights) || !zeros(p + weights + m->weights.size, p + notes))
    return damaged(e, "there is something between its sections");
  return TCOMP_OK;
}

/* The value of a word in a list of ` word=value `; "" if it is not there. */
static const char *lookup(const char *list, const char *word, char value[64]) {
  snprintf(value, 64, " %.60s=", word);
  const char *at = strstr(list, value), *from = at ? at + strlen(value) : "";
  snprintf(value, 64, "%.*s", (int)strcspn(from, " "), from);
  return value;
}

static const char TYPES[] = " bool=1 int8=1 uint8=1 int4=1 uint4=1 int2=1 uint2=1 float8_e4m3fn=1 float8_e4m3fnuz=1 float8_e5m2=1 "
    "float8_e5m2fnuz=1 float8_e8m0fnu=1 float6_e2m3fn=1 float6_e3m2fn=1 float4_e2m1fn=1 int16=2 uint16=2 float16=2 bfloat16=2 "
    "int32=4 uint32=4 float32=4 int64=8 uint64=8 float64=8 complex64=8 complex128=16 ";

static void free_strings(char **texts) {
  for (char **text = texts; text && *text; text++) free(*text);
  free(texts);
}

/* The strings of an array, as new memory that ends with NULL. */
static char **strings(json array, int *count) {
  int64_t n = length(array);
  char **found = n < 0 ? NULL : calloc((size_t)n + 1, sizeof *found);
  const char *place = NULL;
  json key;
  for (*count = 0; found && *count < n; ++*count)
    if (!(found[*count] = string(next(array, &place, &key)))) return free_strings(found), NULL;
  return found;
}

static int read_dims(tcomp_model *m, json list, errors e) {
  int64_t n = length(list);
  const char *place = NULL;
  json key;
  if (n < 0 || n > MOST || !(m->dims = calloc((size_t)n + 1, sizeof *m->dims))) return malformed(e, "dims");
  while (m->dim_count < n) {
    json entry = next(list, &place, &key), max = member(entry, "max"), what = member(entry, "what"), late = member(entry, "data_dependent");
    dim *d = &m->dims[m->dim_count++];
    d->max = INT64_MAX;
    d->late = is(late, "true");
    if (!(d->name = string(member(entry, "name"))) || (late.at && !d->late && !is(late, "false"))) return malformed(e, "dims");
    if (!integer(member(entry, "min"), LIMIT, &d->min) || (!is(max, "null") && !integer(max, LIMIT, &d->max)) || d->max < d->min)
      return malformed(e, "dims");
    if (what.at && !is(what, "\"\"") && !(d->what = string(what))) return malformed(e, "dims");
    m->late |= d->late;
    m->binds |= d->what != NULL;
  }
  return TCOMP_OK;
}

static int read_tensors(tcomp_model *m, int kind, json list, errors e) {
  const char *field = kind == TCOMP_INPUT ? "inputs" : "outputs", *place = NULL;
  int64_t n = length(list);
  json key;
  if (n < 0 || n > MOST || !(m->tensors[kind] = calloc((size_t)n + 1, sizeof(tensor)))) return malformed(e, field);
  while (m->counts[kind] < n) {
    json entry = next(list, &place, &key), shape = member(entry, "shape"), extent;
    tensor *t = &m->tensors[kind][m->counts[kind]++];
    const char *axis = NULL;
    char bytes[64];
    if (!(t->name = string(member(entry, "name"))) || !(t->type = string(member(entry, "dtype")))) return malformed(e, field);
    t->element = (size_t)atoi(lookup(TYPES, t->type, bytes));
    if (!t->element || length(shape) < 0 || length(shape) > MAX_AXES) return malformed(e, field);
    while ((extent = next(shape, &axis, &key)).at) {
      int at = t->rank++;
      t->extents[at] = t->dims[at] = -1;
      if (*extent.at != '"') {
        if (!integer(extent, LIMIT, &t->extents[at])) return malformed(e, field);
        continue;
      }
      if (!(t->texts[at] = string(extent))) return malformed(e, field);
      for (int d = 0; kind == TCOMP_INPUT && d < m->dim_count; d++)
        if (!strcmp(t->texts[at], m->dims[d].name) && !m->dims[d].late && !m->dims[d].what) t->dims[at] = d, m->dims[d].known = 1;
      if (kind == TCOMP_INPUT && t->dims[at] < 0) return malformed(e, field);
    }
    m->extent_count += kind == TCOMP_OUTPUT ? t->rank : 0;
  }
  return TCOMP_OK;
}

static int check_digest(const uint8_t *p, uint64_t size, json wanted, const char *what, errors e) {
  uint8_t digest[32];
  digest_of(p, size, p, 0, digest);
  for (int i = 0; i < 32; i++)
    if (!wanted.at || wanted.end - wanted.at != 66 || hex(wanted.at + 1 + 2 * i, wanted.end, 2) != digest[i])
      return fail(e, TCOMP_DAMAGED, "the artifact is truncated or damaged: its %s not match the checksum", what);
  return TCOMP_OK;
}

/* Weights fill their section in order; with `verify`, their contents are as they were written. */
static int check_weights(const tcomp_model *m, json list, int verify, errors e) {
  const char *place = NULL;
  uint64_t end = 0;
  json key, entry;
  if (length(list) < 0) return malformed(e, "weights");
  while ((entry = next(list, &place, &key)).at) {
    json sums = member(entry, "crc32");
    int64_t at, size;
    if (!integer(member(entry, "offset"), LIMIT, &at) || !integer(member(entry, "size"), LIMIT, &size)) return malformed(e, "weights");
    if ((uint64_t)at != up(end, ALIGN) || (uint64_t)at + (uint64_t)size > m->weights.size)
      return damaged(e, "the weights do not fill their section in order");
    const uint8_t *p = m->image + m->weights.at + at;
    if (verify && !zeros(m->image + m->weights.at + end, p)) return damaged(e, "there is something between its weights");
    uint64_t blocks = up((uint64_t)size, BLOCK) / BLOCK;
    if (verify && (!sums.at || *sums.at != '"' || (uint64_t)(sums.end - sums.at) != 2 + 8 * blocks)) return malformed(e, "weights.crc32");
    for (uint64_t b = 0; verify && b < blocks; b++) {
      uint64_t part = (uint64_t)size - b * BLOCK < BLOCK ? (uint64_t)size - b * BLOCK : BLOCK;
      uint32_t crc = crc32(p + b * BLOCK, part);
      if (hex(sums.at + 1 + 8 * b, sums.end, 4) != (int)(crc >> 16) || hex(sums.at + 5 + 8 * b, sums.end, 4) != (int)(crc & 0xffff))
        return damaged(e, "a weight does not match its checksum");
    }
    end = (uint64_t)at + (uint64_t)size;
  }
  return end == m->weights.size ? TCOMP_OK : damaged(e, "the weights do not fill their section in order");
}

/* ---- This machine ---- */

/* LLVM's names of features, without punctuation, and the kernel's, where they differ by more than that (as in tcomp/runtime/host.py). */
static const char KERNEL_NAMES[] =
#if defined(__x86_64__)
    " x87=fpu bmi=bmi1 sse3=pni lzcnt=abm sahf=lahflm prfchw=3dnowprefetch pclmul=pclmulqdq sha=shani rdrnd=rdrand crc32=sse42 64bit=lm ";
#else
    " fparmv8=fp neon=asimd fullfp16=asimdhp fp16fml=asimdfhm dotprod=asimddp lse=atomics crc=crc32 rdm=asimdrdm rcpc=lrcpc jsconv=jscvt "
    "complxnum=fcma ";
#endif

static void plain(const char *text, size_t size, char out[64]) {
  size_t used = 0;
  for (size_t i = 0; i < size && used < 63; i++)
    if (!strchr("-+_.", text[i])) out[used++] = (char)(text[i] >= 'A' && text[i] <= 'Z' ? text[i] + 32 : text[i]);
  out[used] = 0;
}

static int has_feature(const char *flags, const char *feature) {
  char own[64], other[64], known[64];
  plain(feature, strlen(feature), own);
  const char *wanted = *lookup(KERNEL_NAMES, own, other) ? other : own;
  for (size_t size; *flags; flags += size + (flags[size] == ' ')) {
    plain(flags, size = strcspn(flags, " "), known);
    if (!strcmp(known, wanted)) return strncmp(own, "amx", 3) || !syscall(158 /* arch_prctl */, 0x1023 /* may use */, 18 /* tiles */);
  }
  return 0;
}

static int check_machine(json said, json wanted, errors e) {
#if defined(__x86_64__)
  const char *const arch = "x86_64-", *const key = "\nflags";
#elif defined(__aarch64__)
  const char *const arch = "aarch64-", *const key = "\nFeatures";
#else
#error libtcomp is for x86-64 and AArch64
#endif
  char *triple = string(said), text[16385] = "\n", *flags = "";
  if (!triple) return malformed(e, "triple");
  int fits = !strncmp(triple, arch, strlen(arch)) && strstr(triple, "linux");
  if (!fits) fail(e, 0, "the artifact was compiled for %.100s, this machine is %s linux", triple, arch);
  free(triple);
  if (!fits) return TCOMP_OTHER_MACHINE;
  FILE *file = fopen("/proc/cpuinfo", "rb");
  if (file) {
    text[1 + fread(text + 1, 1, sizeof text - 2, file)] = 0;
    fclose(file);
    char *line = strstr(text, key), *colon = line ? strchr(line, ':') : NULL;
    if (colon) colon[strcspn(colon, "\n")] = 0, flags = colon + 1 + (colon[1] == ' ');
  }
  int count, code = TCOMP_OK;
  char **features = strings(wanted, &count);
  if (!features) return malformed(e, "features");
  for (int i = 0; i < count && !code; i++)
    if (!has_feature(flags, features[i]))
      code = fail(e, TCOMP_OTHER_MACHINE, *flags ? "this processor lacks %.40s" : "/proc/cpuinfo does not tell of %.40s", features[i]);
  free_strings(features);
  return code;
}

/* ---- Code ---- */

/* A shared object in a file in memory. The C library takes two files of one name for one library, and the name of such a file is a number
 * that is used again: so every library gets a spelling of its own, by random bits written with `/` and `./`, which mean nothing. */
static void *open_code(const uint8_t *code, size_t size, char *why, size_t capacity) {
  char path[256] = "/proc/self/fd/";
  uint64_t bits = (uint64_t)(uintptr_t)code;
  void *library = NULL;
  int file = (int)syscall(SYS_memfd_create, "tcomp-model", 1 /* closed by exec */);
  size_t left = file < 0 ? 1 : size;
  for (ssize_t done = 0; file >= 0 && left && (done >= 0 || errno == EINTR); left -= done > 0 ? (size_t)done : 0)
    done = write(file, code + (size - left), left);
  snprintf(why, capacity, "%s", strerror(errno));
  (void)!syscall(SYS_getrandom, &bits, sizeof bits, 1 /* does not wait */);
  for (int i = 0; i < 64; i++) strcat(path, bits >> i & 1 ? "./" : "/");
  snprintf(path + strlen(path), sizeof path - strlen(path), "%d", file);
  if (!left && !(library = dlopen(path, RTLD_NOW | RTLD_LOCAL))) snprintf(why, capacity, "%s", dlerror());
  if (file >= 0) close(file);
  return library;
}

/* The address of a function as a pointer to functions, for which ISO C has no cast. */
static void find(void *library, const char *name, void *pointer) {
  void *address = dlsym(library, name);
  memcpy(pointer, &address, sizeof address);
}

static int load_code(tcomp_model *m, json said, int threads, errors e) {
  tcomp_pool_create_fn *create;
  tcomp_pool_version_fn *version;
  cpu_set_t cpus;
  int64_t wanted = 0;
  char why[200];
  if (!is(said, "null") && (!integer(said, 4096, &wanted) || wanted < 1)) return malformed(e, "threads");
  if (!(m->library = open_code(m->image + m->code.at, m->code.size, why, sizeof why)))
    return fail(e, TCOMP_CANNOT_LOAD, "the artifact's code cannot be loaded: %s", why);
  find(m->library, "tcomp_run", &m->run);
  find(m->library, "tcomp_plan", &m->plan);
  find(m->library, "tcomp_bind", &m->bind);
  find(m->library, "tcomp_pool_create", &create);
  find(m->library, "tcomp_pool_destroy", &m->pool_destroy);
  find(m->library, "tcomp_pool_forget", &m->pool_forget);
  find(m->library, "tcomp_pool_version", &version);
  if (!m->run || !m->plan || (m->binds && !m->bind)) return damaged(e, "its code lacks a function");
  if (!create && threads > 1) return fail(e, TCOMP_BAD_ARGUMENT, "the model was compiled for one thread, not for %d", threads);
  if (!create) return TCOMP_OK;
  if (!version || version() != TCOMP_POOL_VERSION || !m->pool_destroy || !m->pool_forget)
    return fail(e, TCOMP_OTHER_FORMAT, "the artifact's code expects other thread pools than this library has");
  if (!threads) threads = (int)wanted;
  if (!threads) threads = sched_getaffinity(0, sizeof cpus, &cpus) ? 1 : CPU_COUNT(&cpus);
  if (threads > 1 && !(m->pool = create(threads, NULL))) return no_memory(e);
  return TCOMP_OK;
}

static int load(tcomp_model *m, const char *path, int threads, int flags, errors e) {
  int code, verify = flags & TCOMP_VERIFY;
  int64_t format;
  if ((code = read_file(m, path, e)) || (code = read_header(m, e))) return code;
  const char *text = (const char *)m->image + m->manifest.at, *end = text + m->manifest.size;
  json root = {text, skip(text, end, 0)}, f[FIELDS];
  if (root.end != end || *text != '{') return damaged(e, "its manifest is not a JSON object");
  members(root, FIELD_NAMES, FIELDS, f);
  if (!integer(f[VERSION], LIMIT, &format)) return malformed(e, "format");
  if (format != FORMAT) return fail(e, TCOMP_OTHER_FORMAT, "the manifest has format %d, this library reads %d", (int)format, FORMAT);
  if ((f[HOST].at && !is(f[HOST], "null")) || length(f[STATE]) > 0) return fail(e, TCOMP_OTHER_FORMAT, "the model has host steps or state");
  if ((code = check_digest(m->image + m->code.at, m->code.size, f[CODE_SUM], "code does", e))) return code;
  if (verify && (code = check_digest(m->image + m->notes.at, m->notes.size, f[NOTES_SUM], "notes do", e))) return code;
  if ((code = check_weights(m, f[WEIGHTS], verify, e)) || (code = read_dims(m, f[DIMS], e))) return code;
  if ((code = read_tensors(m, TCOMP_INPUT, f[INPUTS], e)) || (code = read_tensors(m, TCOMP_OUTPUT, f[OUTPUTS], e))) return code;
  if (!(m->messages = strings(f[ERRORS], &m->error_count))) return malformed(e, "errors");
  if (f[CHECKS].at && !(m->checks = strings(f[CHECKS], &m->check_count))) return malformed(e, "checks");
  for (int d = 0; d < m->dim_count; d++)
    if (!m->dims[d].late && !m->dims[d].what && !m->dims[d].known) return malformed(e, "dims");
  if ((code = check_machine(f[TRIPLE], f[FEATURES], e))) return code;
  return load_code(m, f[THREADS], threads, e);
}

int tcomp_model_load(const char *path, int threads, int flags, tcomp_model **model, char *message, size_t capacity) {
  errors e = {message, capacity};
  if (!path || !model || threads < 0 || threads > 4096)
    return fail(e, TCOMP_BAD_ARGUMENT, "path or model is NULL, or threads are not 0 to 4096");
  tcomp_model *m = *model = calloc(1, sizeof *m);
  if (!m) return no_memory(e);
  int code = load(m, path, threads, flags, e);
  if (code) tcomp_model_free(m), *model = NULL;
  return code;
}

void tcomp_model_free(tcomp_model *m) {
  if (!m) return;
  if (m->pool) m->pool_destroy(m->pool);
  if (m->library) dlclose(m->library);
  if (m->image) munmap(m->image, m->size);
  for (int kind = 0; kind < 2; kind++) {
    for (int n = 0; n < m->counts[kind]; n++) {
      tensor *t = &m->tensors[kind][n];
      for (int axis = 0; axis < t->rank; axis++) free(t->texts[axis]);
      free(t->name), free(t->type);
    }
    free(m->tensors[kind]);
  }
  for (int d = 0; d < m->dim_count; d++) free(m->dims[d].name), free(m->dims[d].what);
  free_strings(m->messages), free_strings(m->checks), free(m->dims), free(m);
}

void tcomp_model_after_fork(tcomp_model *m) {
  if (m && m->pool) m->pool_forget(m->pool);
}

static const tensor *tensor_of(const tcomp_model *m, int kind, int n) {
  return m && (kind == TCOMP_INPUT || kind == TCOMP_OUTPUT) && n >= 0 && n < m->counts[kind] ? &m->tensors[kind][n] : NULL;
}

int tcomp_model_count(const tcomp_model *m, int kind) { return m && (kind == TCOMP_INPUT || kind == TCOMP_OUTPUT) ? m->counts[kind] : 0; }
const char *tcomp_model_name(const tcomp_model *m, int kind, int n) { return tensor_of(m, kind, n) ? m->tensors[kind][n].name : NULL; }
const char *tcomp_model_type(const tcomp_model *m, int kind, int n) { return tensor_of(m, kind, n) ? m->tensors[kind][n].type : NULL; }
int tcomp_model_rank(const tcomp_model *m, int kind, int n) { return tensor_of(m, kind, n) ? m->tensors[kind][n].rank : -1; }
size_t tcomp_model_element_bytes(const tcomp_model *m, int kind, int n) {
  return tensor_of(m, kind, n) ? m->tensors[kind][n].element : 0;
}

int64_t tcomp_model_extent(const tcomp_model *m, int kind, int n, int axis) {
  const tensor *t = tensor_of(m, kind, n);
  return t && axis >= 0 && axis < t->rank ? t->extents[axis] : -1;
}

const char *tcomp_model_extent_name(const tcomp_model *m, int kind, int n, int axis) {
  const tensor *t = tensor_of(m, kind, n);
  return t && axis >= 0 && axis < t->rank ? t->texts[axis] : NULL;
}

/* ---- Sessions ---- */

/* `data` is memory of the caller, of `room` bytes, `own` that of the session, of `capacity` bytes. */
typedef struct { void *data, *own; size_t room, capacity, bytes; int64_t shape[MAX_AXES]; } array;

struct tcomp_session {
  tcomp_model *model;
  array *arrays[2];
  const void **inputs;
  void **outputs, *workspace;
  int64_t *dims, *sizes;
  size_t capacity; /* of the workspace */
  tcomp_call call;
  int ran;
  char message[TCOMP_MESSAGE];
  errors why; /* that is where messages go */
};

int tcomp_session_new(tcomp_model *model, tcomp_session **session, char *message, size_t capacity) {
  errors e = {message, capacity};
  if (!model || !session) return fail(e, TCOMP_BAD_ARGUMENT, "model or session is NULL");
  tcomp_session *s = *session = calloc(1, sizeof *s);
  if (!s) return no_memory(e);
  s->model = model, s->why.message = s->message, s->why.capacity = sizeof s->message;
  for (int kind = 0; kind < 2; kind++) s->arrays[kind] = calloc((size_t)model->counts[kind] + 1, sizeof(array));
  s->inputs = calloc((size_t)model->counts[TCOMP_INPUT] + 1, sizeof *s->inputs);
  s->outputs = calloc((size_t)model->counts[TCOMP_OUTPUT] + 1, sizeof *s->outputs);
  s->dims = calloc((size_t)model->dim_count + 1, sizeof *s->dims);
  s->sizes = calloc((size_t)model->extent_count + 1, sizeof *s->sizes);
  if (s->arrays[0] && s->arrays[1] && s->inputs && s->outputs && s->dims && s->sizes) return TCOMP_OK;
  tcomp_session_free(s);
  return *session = NULL, no_memory(e);
}

void tcomp_session_free(tcomp_session *s) {
  if (!s) return;
  for (int n = 0; s->arrays[TCOMP_OUTPUT] && n < s->model->counts[TCOMP_OUTPUT]; n++) free(s->arrays[TCOMP_OUTPUT][n].own);
  free(s->arrays[0]), free(s->arrays[1]), free(s->inputs), free(s->outputs), free(s->dims), free(s->sizes), free(s->workspace), free(s);
}

int tcomp_session_set_input(tcomp_session *s, int n, const void *data, const int64_t *shape, int rank) {
  if (!s) return TCOMP_BAD_ARGUMENT;
  const tensor *t = tensor_of(s->model, TCOMP_INPUT, n);
  if (!t || !data || (!shape && rank)) return fail(s->why, TCOMP_BAD_ARGUMENT, "there is no input %d, or something is NULL", n);
  if (rank != t->rank) return fail(s->why, TCOMP_BAD_SHAPE, "input %.100s has %d axes, not %d", t->name, t->rank, rank);
  for (int axis = 0; axis < rank; axis++)
    if (shape[axis] < 0 || shape[axis] > LIMIT || (t->extents[axis] >= 0 && shape[axis] != t->extents[axis]))
      return fail(s->why, TCOMP_BAD_SHAPE, "extent %d of input %.100s cannot be %lld", axis, t->name, (long long)shape[axis]);
  if ((uintptr_t)data % (t->element > 8 ? 8 : t->element))
    return fail(s->why, TCOMP_BAD_ARGUMENT, "input %.100s is not aligned to its elements", t->name);
  if (rank) memcpy(s->arrays[TCOMP_INPUT][n].shape, shape, (size_t)rank * sizeof *shape);
  s->inputs[n] = data;
  return TCOMP_OK;
}

int tcomp_session_set_output(tcomp_session *s, int n, void *data, size_t bytes) {
  if (!s) return TCOMP_BAD_ARGUMENT;
  const tensor *t = tensor_of(s->model, TCOMP_OUTPUT, n);
  if (!t || (uintptr_t)data % (t->element > 8 ? 8 : t->element))
    return fail(s->why, TCOMP_BAD_ARGUMENT, "there is no output %d, or its memory is not aligned to its elements", n);
  s->arrays[TCOMP_OUTPUT][n].data = data, s->arrays[TCOMP_OUTPUT][n].room = bytes;
  return TCOMP_OK;
}

static int misfit(tcomp_session *s, const dim *d, int64_t value) {
  char limit[24] = "no limit";
  const char *what = d->what ? d->what : d->name;
  if (d->max != INT64_MAX) snprintf(limit, sizeof limit, "%lld", (long long)d->max);
  return fail(s->why, TCOMP_BAD_SHAPE, "%.200s is %lld, not from %lld to %s", what, (long long)value, (long long)d->min, limit);
}

/* The dims that are known before a run. `*zero`: some size is 0 where the code needs 1, which is fine if there is nothing to compute. */
static int bind_dims(tcomp_session *s, int *zero) {
  const tcomp_model *m = s->model;
  *zero = -1;
  for (int d = 0; d < m->dim_count; d++) s->dims[d] = -1;
  for (int n = 0; n < m->counts[TCOMP_INPUT]; n++) {
    const tensor *t = &m->tensors[TCOMP_INPUT][n];
    if (!s->inputs[n]) return fail(s->why, TCOMP_BAD_ARGUMENT, "input %.100s is missing", t->name);
    for (int axis = 0; axis < t->rank; axis++) {
      int d = t->dims[axis];
      int64_t extent = s->arrays[TCOMP_INPUT][n].shape[axis];
      if (d < 0) continue;
      if (s->dims[d] >= 0 && s->dims[d] != extent)
        return fail(s->why, TCOMP_BAD_SHAPE, "%.100s is %lld in input %.100s, another number in one before", m->dims[d].name,
                    (long long)extent, t->name);
      s->dims[d] = extent;
      if (!extent && m->dims[d].min == 1 && !m->binds) *zero = d;
      else if (extent < m->dims[d].min || extent > m->dims[d].max) return misfit(s, &m->dims[d], extent);
    }
  }
  int refused = m->binds ? m->bind(s->inputs, s->dims) : 0;
  if (refused < 0 || refused > m->dim_count) return fail(s->why, TCOMP_DAMAGED, "the code names a size that there is not");
  return refused ? misfit(s, &m->dims[refused - 1], s->dims[refused - 1]) : TCOMP_OK;
}

/* Sizes for these dims, as the code tells them, checked: memory depends on them. `first`: before the run, else after it. */
static int plan(tcomp_session *s, int first) {
  const tcomp_model *m = s->model;
  errors e = s->why;
  m->plan(s->dims, s->sizes);
  int64_t bytes = s->sizes[0], *extent = s->sizes + 1;
  if (bytes == -1) return fail(e, TCOMP_BAD_SHAPE, "the inputs are too small for the model");
  if (bytes == -2 || bytes > MEMORY_LIMIT) return fail(e, TCOMP_BAD_SHAPE, "the inputs are too large for the model");
  if (bytes <= -3 && -3 - bytes < m->check_count)
    return fail(e, TCOMP_BAD_SHAPE, "the sizes of the inputs contradict each other: %.300s", m->checks[-3 - bytes]);
  if (bytes < 0) return fail(e, TCOMP_DAMAGED, "the code of the artifact asks for %lld bytes of workspace", (long long)bytes);
  for (int n = 0; n < m->counts[TCOMP_OUTPUT]; n++) {
    const tensor *t = &m->tensors[TCOMP_OUTPUT][n];
    array *a = &s->arrays[TCOMP_OUTPUT][n];
    int64_t total = (int64_t)t->element;
    int empty = 0;
    for (int axis = 0; axis < t->rank; axis++, extent++) {
      if (*extent < 0 || (t->extents[axis] >= 0 && *extent != t->extents[axis]))
        return fail(e, TCOMP_DAMAGED, "the code of the artifact makes output %.100s of another shape than its manifest says", t->name);
      a->shape[axis] = *extent;
      empty |= !*extent;
    }
    for (int axis = 0; axis < t->rank && !empty; axis++) {
      if (a->shape[axis] > MEMORY_LIMIT / total) return fail(e, TCOMP_BAD_SHAPE, "output %.100s would be larger than any memory", t->name);
      total *= a->shape[axis];
    }
    total = empty ? 0 : total;
    if (!first && (size_t)total > a->bytes) return fail(e, TCOMP_DAMAGED, "output %.100s grew beyond its bound", t->name);
    a->bytes = (size_t)total;
  }
  return TCOMP_OK;
}

/* Memory of at least so many bytes, aligned to a cache line or, if it is large, in huge pages, in place of what was there. */
static int reserve(void **memory, size_t *capacity, size_t bytes) {
  if (*memory && *capacity >= bytes) return 1;
  size_t align = bytes >= 2 * HUGE_PAGE ? HUGE_PAGE : ALIGN;
  free(*memory);
  if (posix_memalign(memory, align, bytes ? bytes : 1)) *memory = NULL;
  if (*memory && align == HUGE_PAGE) (void)madvise(*memory, bytes, MADV_HUGEPAGE); /* a kernel without them: only slower */
  *capacity = *memory ? bytes : 0;
  return *memory != NULL;
}

int tcomp_session_run(tcomp_session *s) {
  if (!s) return TCOMP_BAD_ARGUMENT;
  const tcomp_model *m = s->model;
  errors e = s->why;
  int code, zero, some = 0;
  s->ran = 0;
  if ((code = bind_dims(s, &zero)) || (code = plan(s, 1))) return code;
  for (int n = 0; n < m->counts[TCOMP_OUTPUT]; n++) {
    array *a = &s->arrays[TCOMP_OUTPUT][n];
    if (a->data && a->room < a->bytes)
      return fail(e, TCOMP_BAD_ARGUMENT, "output %.100s needs %zu bytes, and has %zu", m->tensors[TCOMP_OUTPUT][n].name, a->bytes, a->room);
    if (!a->data && !reserve(&a->own, &a->capacity, a->bytes)) return no_memory(e);
    s->outputs[n] = a->data ? a->data : a->own;
    some |= a->bytes > 0;
  }
  if (zero >= 0) { /* code made for sizes from 1 on must not run for none, and need not: all that it would compute is nothing */
    if (m->late || some) return misfit(s, &m->dims[zero], 0);
    s->ran = 1;
    return TCOMP_OK;
  }
  if (!reserve(&s->workspace, &s->capacity, (size_t)s->sizes[0])) return no_memory(e);
  tcomp_call call = {s->inputs, s->outputs, m->image + m->weights.at, s->workspace, s->dims, m->pool, 0, 0, 0};
  memcpy(&s->call, &call, offsetof(tcomp_call, status));
  s->call.index = s->call.extent = 0;
  __atomic_store_n(&s->call.status, 0, __ATOMIC_RELAXED);
  int32_t status = m->run(&s->call);
  if (status == -1) return fail(e, TCOMP_STOPPED, "the run was stopped");
  if (status) {
    const char *what = status > 0 && status <= m->error_count ? m->messages[status - 1] : "unknown error";
    if (s->call.index >= 0 && s->call.index < s->call.extent)
      return fail(e, TCOMP_OUT_OF_RANGE, "the model stopped: %.300s: an integer is divided by zero", what);
    return fail(e, TCOMP_OUT_OF_RANGE, "the model stopped: %.300s: the index is %lld, and there are %lld elements", what,
                (long long)s->call.index, (long long)s->call.extent);
  }
  if (m->late && (code = plan(s, 0))) return code;
  s->ran = 1;
  return TCOMP_OK;
}

static const array *result(const tcomp_session *s, int n) {
  return s && s->ran && tensor_of(s->model, TCOMP_OUTPUT, n) ? &s->arrays[TCOMP_OUTPUT][n] : NULL;
}

const void *tcomp_session_output(const tcomp_session *s, int n) { return result(s, n) ? s->outputs[n] : NULL; }
const int64_t *tcomp_session_shape(const tcomp_session *s, int n) { return result(s, n) ? result(s, n)->shape : NULL; }
size_t tcomp_session_output_bytes(const tcomp_session *s, int n) { return result(s, n) ? result(s, n)->bytes : 0; }
const char *tcomp_session_message(const tcomp_session *s) { return s ? s->message : "the session is NULL"; }

void tcomp_session_stop(tcomp_session *s) {
  if (s) __atomic_store_n(&s->call.status, -1, __ATOMIC_RELAXED);
}
