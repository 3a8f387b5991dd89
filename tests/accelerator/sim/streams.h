// Streams and events: who is ordered after whom. Kernels run at once; the order that a device would keep is only computed,
// with vector clocks, so every run gives the same answer.
#pragma once
#include <c10/core/Stream.h>

#include <deque>
#include <mutex>

#include "python_lines.h"
#include "trace.h"

namespace sim {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex COUNT = 2;

// Per stream: up to which of its operations what follows is ordered after.
struct Clock {
  std::vector<uint64_t> known;
  uint64_t of(int stream) const { return size_t(stream) < known.size() ? known[stream] : 0; }
  bool covers(Point point) const { return of(point.stream) >= point.number; }
  void set(Point point) {
    if (known.size() <= size_t(point.stream)) known.resize(point.stream + 1);
    known[point.stream] = std::max(known[point.stream], point.number);
  }
  void merge(const Clock& other) {
    if (known.size() < other.known.size()) known.resize(other.known.size());
    for (size_t at = 0; at < other.known.size(); ++at) known[at] = std::max(known[at], other.known[at]);
  }
};

struct Stream {
  int id;
  c10::DeviceIndex device;
  std::string name;
  uint64_t number = 0;  // of its last operation
  Clock clock{};
  int polls = 0;  // questions whether it is done
  int capture = 0;  // the number of the capture that it is part of
  Point last() const { return {id, number}; }
};

struct Event {
  Clock clock;
  std::vector<Point> points;  // what must be done: the last operation of a stream, or of several
  int polls = 0;
  int capture = 0;  // that its stream was part of when it was recorded
};

// All of the simulation's state is under this mutex. Nobody waits, or asks for Python's lock, while holding it.
inline std::recursive_mutex& state = *new std::recursive_mutex;
using Locked = std::lock_guard<std::recursive_mutex>;

// The rules of CUDA's graph capture: a stream is part of it from where it waits for one that is, and must be waited for in the end.
// Nothing is captured or replayed; what the rules forbid is noted.
struct Capture {
  int number = 0;  // of the one that is on; 0: none
  int last = 0;
  std::vector<std::string> forbidden;

  void forbid(const std::string& what) {
    if (number) forbidden.push_back(what);
  }
  void wait(Stream& stream, const Event& event) {
    if (!number) return;
    if (event.capture == number) stream.capture = number;
    else if (stream.capture == number) forbid("stream \"" + stream.name + "\" waits for an event that was recorded outside of the capture");
  }
  void launch(const Stream& stream, const std::string& what, const std::string& line) {
    if (stream.capture != number) forbid(what + " on stream \"" + stream.name + "\", which is not captured, at " + line);
  }
};
inline Capture& capture = *new Capture;

struct Streams {
  std::deque<Stream> all;
  Clock host;  // one for all threads: how they order each other is not known, so it is taken for granted
  int polls = 1;  // how often an event says "not yet" before it is done: from the seed

  Streams() {
    for (c10::DeviceIndex at = 0; at < COUNT; ++at) add(at, "default");
  }
  Stream& add(c10::DeviceIndex device, const std::string& name) {
    Locked lock(state);
    int id = int(all.size());
    all.push_back({id, device, name.empty() ? "side " + std::to_string(id) : name});
    return all.back();
  }
  // As torch has them: 0 is the default stream of each device.
  Stream& of(const c10::Stream& stream) { return all[stream.id() ? stream.id() : stream.device_index()]; }
  c10::Stream to_torch(const Stream& stream) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, stream.device), stream.id < COUNT ? 0 : stream.id);
  }

  // What the host has seen done is before whatever it launches.
  Point launch(Stream& stream) {
    stream.clock.merge(host);
    ++stream.number;
    stream.clock.set(stream.last());
    return stream.last();
  }
  Event record(Stream& stream) {
    stream.clock.merge(host);
    return {stream.clock, {stream.last()}, 0, stream.capture};
  }
  void wait(Stream& stream, const Event& event) {
    // Also for what the other stream only waits for: it may have launched nothing since.
    for (size_t at = 0; at < event.clock.known.size(); ++at) {
      Point point{int(at), event.clock.known[at]};
      if (!stream.clock.covers(point)) trace.wait(stream.id, point);
    }
    stream.clock.merge(event.clock);
    capture.wait(stream, event);
  }
  void begin_capture(Stream& origin) {
    capture.number = origin.capture = ++capture.last;
    capture.forbidden.clear();
  }
  std::vector<std::string> end_capture(const Stream& origin) {
    for (auto& stream : all)
      if (stream.capture == capture.number && !origin.clock.covers(stream.last()))
        capture.forbid("stream \"" + stream.name + "\" is captured, and not waited for in the end");
    capture.number = 0;
    return capture.forbidden;
  }
  static bool is_after(const Clock& clock, const Event& event) {
    return std::all_of(event.points.begin(), event.points.end(), [&](Point point) { return clock.covers(point); });
  }
};
inline Streams& streams = *new Streams;

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local int current_streams[COUNT] = {0, 1};
inline c10::Device device(c10::DeviceIndex index) { return {TYPE, index < 0 ? current_device : index}; }
inline Stream& current_stream(c10::Device of) { return streams.all[current_streams[device(of.index()).index()]]; }

}  // namespace sim
