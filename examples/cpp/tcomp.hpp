// libtcomp for C++17: classes that free what they hold, and throw tcomp::error.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "libtcomp.h"

namespace tcomp {

struct error : std::runtime_error {
  error(int code, const std::string &why) : std::runtime_error(why), code(code) {}
  int code;  // one of TCOMP_STOPPED ...
};

struct tensor {
  std::string name, type;
  std::vector<std::int64_t> shape;  // -1 where it is free
};

class model {
 public:
  explicit model(const std::string &path, int threads = 0, int flags = 0) {
    char why[TCOMP_MESSAGE];
    tcomp_model *loaded;
    if (int code = tcomp_model_load(path.c_str(), threads, flags, &loaded, why, sizeof why)) throw error(code, why);
    handle.reset(loaded, tcomp_model_free);
  }

  std::vector<tensor> inputs() const { return tensors(TCOMP_INPUT); }
  std::vector<tensor> outputs() const { return tensors(TCOMP_OUTPUT); }

 private:
  friend class session;

  std::vector<tensor> tensors(int kind) const {
    std::vector<tensor> found;
    for (int n = 0; n < tcomp_model_count(handle.get(), kind); n++) {
      tensor t{tcomp_model_name(handle.get(), kind, n), tcomp_model_type(handle.get(), kind, n), {}};
      for (int axis = 0; axis < tcomp_model_rank(handle.get(), kind, n); axis++)
        t.shape.push_back(tcomp_model_extent(handle.get(), kind, n, axis));
      found.push_back(t);
    }
    return found;
  }

  std::shared_ptr<tcomp_model> handle;
};

// For one run at a time; several sessions of a model may run at the same time.
class session {
 public:
  explicit session(const tcomp::model &m) : model(m.handle), handle(nullptr, tcomp_session_free) {
    char why[TCOMP_MESSAGE];
    tcomp_session *made;
    if (int code = tcomp_session_new(model.get(), &made, why, sizeof why)) throw error(code, why);
    handle.reset(made);
  }

  // The values stay the caller's, and have to live until the run.
  template <class T>
  void set_input(int number, const std::vector<T> &values, const std::vector<std::int64_t> &shape) {
    std::size_t bytes = sizeof(T);
    for (auto extent : shape) bytes *= static_cast<std::size_t>(extent);
    if (bytes != values.size() * sizeof(T)) throw error(TCOMP_BAD_SHAPE, "there are not as many values as the shape says");
    if (sizeof(T) != tcomp_model_element_bytes(model.get(), TCOMP_INPUT, number)) throw error(TCOMP_BAD_ARGUMENT, "the values are of another type");
    check(tcomp_session_set_input(handle.get(), number, values.data(), shape.data(), static_cast<int>(shape.size())));
  }

  void run() { check(tcomp_session_run(handle.get())); }

  template <class T>
  std::vector<T> output(int number) const {
    auto values = static_cast<const T *>(tcomp_session_output(handle.get(), number));
    return {values, values + tcomp_session_output_bytes(handle.get(), number) / sizeof(T)};
  }

 private:
  void check(int code) const {
    if (code) throw error(code, tcomp_session_message(handle.get()));
  }

  std::shared_ptr<tcomp_model> model;
  std::unique_ptr<tcomp_session, void (*)(tcomp_session *)> handle;
};

}  // namespace tcomp
