/* libtcomp for Node, an addon for Node-API: load(path, threads) -> model, shape(model, input) -> numbers, run(model, [Float32Array...],
 * [[extents]...]) -> Float32Array, the first output. It blocks while the model runs: call it in a worker thread if that takes long. */
#define NAPI_VERSION 8
#include <node_api.h>
#include <stdlib.h>
#include <string.h>

#include "libtcomp.h"

static napi_value refuse(napi_env env, const char *why) {
  napi_throw_error(env, NULL, why);
  return NULL;
}

static void unload(napi_env env, void *model, void *hint) {
  (void)env, (void)hint;
  tcomp_model_free(model);
}

static napi_value load(napi_env env, napi_callback_info info) {
  size_t count = 2, size;
  napi_value arguments[2], result;
  char path[4096], why[TCOMP_MESSAGE];
  int32_t threads = 0;
  tcomp_model *model;
  if (napi_get_cb_info(env, info, &count, arguments, NULL, NULL) || count < 1 ||
      napi_get_value_string_utf8(env, arguments[0], path, sizeof path, &size) || size + 1 >= sizeof path)
    return refuse(env, "load takes a path");
  if (count > 1 && napi_get_value_int32(env, arguments[1], &threads)) return refuse(env, "threads are a number");
  if (tcomp_model_load(path, threads, 0, &model, why, sizeof why)) return refuse(env, why);
  return napi_create_external(env, model, unload, NULL, &result) ? NULL : result;
}

static napi_value shape(napi_env env, napi_callback_info info) {
  size_t count = 2;
  napi_value arguments[2], result, extent;
  void *model;
  int32_t input;
  if (napi_get_cb_info(env, info, &count, arguments, NULL, NULL) || count < 2 || napi_get_value_external(env, arguments[0], &model) ||
      napi_get_value_int32(env, arguments[1], &input) || napi_create_array(env, &result))
    return refuse(env, "shape takes a model and the number of an input");
  for (int axis = 0; axis < tcomp_model_rank(model, TCOMP_INPUT, input); axis++)
    if (napi_create_int64(env, tcomp_model_extent(model, TCOMP_INPUT, input, axis), &extent) ||
        napi_set_element(env, result, (uint32_t)axis, extent))
      return NULL;
  return result;
}

/* One input of a run; why it is refused, or NULL. */
static const char *set_input(napi_env env, tcomp_model *model, tcomp_session *session, uint32_t n, napi_value array, napi_value shape) {
  napi_typedarray_type type;
  size_t length;
  void *data;
  uint32_t rank;
  int64_t extents[64], product = 1;
  if (napi_get_typedarray_info(env, array, &type, &length, &data, NULL, NULL) || type != napi_float32_array) return "inputs are Float32Arrays";
  const char *element = tcomp_model_type(model, TCOMP_INPUT, (int)n);
  if (!element || strcmp(element, "float32")) return "the model has no such input of float32";
  if (napi_get_array_length(env, shape, &rank) || rank > 64) return "shapes are arrays of numbers";
  for (uint32_t axis = 0; axis < rank; axis++) {
    napi_value extent;
    if (napi_get_element(env, shape, axis, &extent) || napi_get_value_int64(env, extent, &extents[axis])) return "shapes are arrays of numbers";
    if (extents[axis] < 0 || extents[axis] > 1 << 30 || (product *= extents[axis]) > (int64_t)1 << 40) return "an extent is out of range";
  }
  if ((uint64_t)product != length) return "there are not as many values as the shape says";
  return tcomp_session_set_input(session, (int)n, data ? data : extents, extents, (int)rank) ? tcomp_session_message(session) : NULL;
}

static napi_value run(napi_env env, napi_callback_info info) {
  size_t count = 3;
  napi_value arguments[3], buffer, result = NULL;
  void *model, *room;
  uint32_t inputs, shapes;
  char why[TCOMP_MESSAGE];
  tcomp_session *session;
  if (napi_get_cb_info(env, info, &count, arguments, NULL, NULL) || count < 3 || napi_get_value_external(env, arguments[0], &model) ||
      napi_get_array_length(env, arguments[1], &inputs) || napi_get_array_length(env, arguments[2], &shapes) || inputs != shapes)
    return refuse(env, "run takes a model, arrays, and as many shapes");
  if (tcomp_session_new(model, &session, why, sizeof why)) return refuse(env, why);
  const char *problem = NULL;
  for (uint32_t n = 0; n < inputs && !problem; n++) {
    napi_value array, extents;
    napi_get_element(env, arguments[1], n, &array);
    napi_get_element(env, arguments[2], n, &extents);
    problem = set_input(env, model, session, n, array, extents);
  }
  if (!problem && tcomp_session_run(session)) problem = tcomp_session_message(session);
  const char *element = tcomp_model_type(model, TCOMP_OUTPUT, 0);
  if (!problem && (!element || strcmp(element, "float32"))) problem = "the first output is not of float32";
  if (problem) {
    refuse(env, problem);
  } else {
    size_t bytes = tcomp_session_output_bytes(session, 0);
    if (!napi_create_arraybuffer(env, bytes, &room, &buffer)) {
      if (bytes) memcpy(room, tcomp_session_output(session, 0), bytes);
      if (napi_create_typedarray(env, napi_float32_array, bytes / sizeof(float), buffer, 0, &result)) result = NULL;
    }
  }
  tcomp_session_free(session);
  return result;
}

NAPI_MODULE_INIT() {
  const struct { const char *name; napi_callback function; } functions[] = {{"load", load}, {"shape", shape}, {"run", run}};
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    napi_value function;
    if (napi_create_function(env, functions[i].name, NAPI_AUTO_LENGTH, functions[i].function, NULL, &function) ||
        napi_set_named_property(env, exports, functions[i].name, function))
      return NULL;
  }
  return exports;
}
