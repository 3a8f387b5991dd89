// What was launched, in the order of the host. When each of it would have run is computed from this, in Python (timeline.py).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace sim {

struct Point {  // an operation: of which stream, and which one there
  int stream = 0;
  uint64_t number = 0;
};

struct Entry {
  std::string kind;  // "kernel", "copy", "collective", "wait", "host waits", "mark", "allocate", "free"
  Point point;       // what was launched; for "wait" and "host waits": what is waited for
  std::string name;
  int64_t bytes = 0;
  int line = 0;
  std::string group;    // of a collective
  int64_t number = -1;  // of a collective in its group; of a wait: the stream that waits
};

struct Trace {
  bool on = false;
  std::vector<Entry> entries;
  void add(Entry entry) {
    if (on) entries.push_back(std::move(entry));
  }
  void wait(int stream, Point point) {
    if (on) entries.push_back({"wait", point, "", 0, 0, "", stream});
  }
};
inline Trace& trace = *new Trace;

}  // namespace sim
