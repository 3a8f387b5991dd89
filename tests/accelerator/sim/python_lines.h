// Which Python line is at work: for errors, host reads, allocations and the trace.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

// The innermost line outside of torch, and the innermost of all ("" if that is the same one).
struct Line {
  std::string outside = "backward, without a Python line", innermost;
};

// Every line and every name once: accesses keep numbers.
struct Lines {
  struct Code {
    bool in_torch, is_ours;  // ours: nobody's, as the wrappers of others' calls
    std::string file, name;
  };
  std::map<PyCodeObject*, Code> codes;  // which it keeps alive
  std::map<std::array<std::pair<PyCodeObject*, int>, 2>, int> known;
  std::deque<Line> all{Line()};
  std::mutex mutex;
  std::string torch_folder, own_file;

  const Code& code_of(PyCodeObject* code) {
    auto [at, is_new] = codes.try_emplace(code);
    if (is_new) {
      Py_INCREF(code);
      auto text = [](PyObject* from) { return std::string(PyUnicode_AsUTF8(from)); };
      auto file = text(code->co_filename);
      auto is_in = [&](const std::string& part) { return file.find(part) != std::string::npos; };
      bool ours = file == own_file || file.rfind("<", 0) == 0 || is_in("/contextlib.py") || is_in("/typing_extensions.py") ||
                  is_in("/torch/_tensor.py") || is_in("/torch/utils/_contextlib.py") || is_in("/torch/accelerator/");
      at->second = {file.rfind(torch_folder, 0) == 0, ours, file, text(code->co_name)};
    }
    return at->second;
  }

  std::string shown(std::pair<PyCodeObject*, int> where) {
    auto& code = codes.at(where.first);
    return code.file + ":" + std::to_string(where.second) + " in " + code.name;
  }

  int here() {  // takes the GIL: call it before any lock
    if (!Py_IsInitialized()) return 0;
    pybind11::gil_scoped_acquire gil;
    std::array<std::pair<PyCodeObject*, int>, 2> key{};
    auto* frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame) {
      auto* code = PyFrame_GetCode(frame);
      auto& about = code_of(code);
      Py_DECREF(code);
      bool outside = !about.in_torch && !about.is_ours;
      if (!about.is_ours && !key[1].first) key[1] = {code, PyFrame_GetLineNumber(frame)};
      if (outside) key[0] = {code, PyFrame_GetLineNumber(frame)};
      auto* back = outside ? nullptr : PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = back;
    }
    if (!key[0].first && !key[1].first) return 0;
    std::lock_guard<std::mutex> lock(mutex);
    auto [at, is_new] = known.try_emplace(key, int(all.size()));
    if (is_new) {
      Line line;
      if (key[0].first) line.outside = shown(key[0]);
      if (key[1].first && key[1] != key[0]) line.innermost = shown(key[1]);
      all.push_back(line);
    }
    return at->second;
  }
  const Line& operator[](int line) {
    std::lock_guard<std::mutex> lock(mutex);
    return all[line];  // which stays where it is
  }
};
inline Lines& lines = *new Lines;  // never destroyed: tensors may outlive the end of the program

}  // namespace sim
