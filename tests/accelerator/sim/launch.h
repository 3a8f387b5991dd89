// One operation on a stream: a number there, the bytes it touches, and its entry in the trace. And the host that waits.
#pragma once
#include "memory.h"

namespace sim {

struct Launch {
  Stream& stream;
  Point point;
  int name, line;
  int64_t bytes = 0;
  Clock clock;

  Launch(Stream& on, const std::string& what) : stream(on), line(lines.here()) {
    Locked lock(state);
    name = names(what);
    point = streams.launch(stream);
    clock = stream.clock;
    memory.check_freed(stream);
    capture.launch(stream, what, lines[line].outside);
  }
  void touch(const at::Tensor& tensor, bool writes) {
    if (!tensor.defined() || tensor.device().type() != TYPE || !tensor.has_storage()) return;
    auto* block = block_of(tensor);
    if (!block) return;
    bytes += tensor.nbytes();
    memory.touch(*block, ranges_of(tensor), {point, name, line, writes}, clock);
  }
  void note(const std::string& kind, const std::string& group = "", int64_t number = -1) {
    Locked lock(state);
    trace.add({kind, point, names.all[name], bytes, line, group, number});
  }
};

// --- the host waits -----------------------------------------------------------------------------------------------------

struct HostRead {
  std::string kind;
  int line;
};
inline std::vector<HostRead>& host_reads = *new std::vector<HostRead>;

struct ToHost {  // a copy to pinned memory: not there until the host has waited for it
  Event event;
  at::Tensor from, to;
};
inline std::vector<ToHost>& to_host = *new std::vector<ToHost>;

struct Shelved {  // tensors of a collective for which nobody has waited: as NCCL, hold them until the host sees that it is done
  Event end;
  std::vector<at::Tensor> kept;
};
inline std::vector<Shelved>& shelf = *new std::vector<Shelved>;

// The host goes on when the event has happened.
inline void host_waits(const Event& event, const std::string& kind, bool counts = true) {
  int line = lines.here();
  Clock clock;
  std::vector<ToHost> there;
  std::vector<Shelved> over;
  {
    Locked lock(state);
    if (counts) host_reads.push_back({kind, line});
    capture.forbid("the host waits (" + kind + ") at " + lines[line].outside);
    streams.host.merge(event.clock);
    clock = streams.host;
    for (auto point : event.points) trace.add({"host waits", point, kind, 0, line});
    auto is_there = [&](const ToHost& copy) { return Streams::is_after(clock, copy.event); };
    auto rest = std::stable_partition(to_host.begin(), to_host.end(), [&](auto& copy) { return !is_there(copy); });
    there.assign(std::make_move_iterator(rest), std::make_move_iterator(to_host.end()));
    to_host.erase(rest, to_host.end());
    auto is_under_way = [&](const Shelved& one) { return !Streams::is_after(clock, one.end); };
    auto done = std::stable_partition(shelf.begin(), shelf.end(), is_under_way);
    over.assign(std::make_move_iterator(done), std::make_move_iterator(shelf.end()));
    shelf.erase(done, shelf.end());
  }
  for (auto& copy : there) copy.to.copy_(copy.from);
  memory.bring_in_all(clock);
}

inline void host_waits(Stream& stream, const std::string& kind, bool counts = true) {
  Event event;
  {
    Locked lock(state);
    event = streams.record(stream);
  }
  host_waits(event, kind, counts);
}

// Whether the event has happened: a few times not yet, then yes, which orders the host after it. No thread decides.
inline bool has_happened(Event& event) {
  {
    Locked lock(state);
    if (Streams::is_after(streams.host, event)) return true;
    if (event.polls++ < streams.polls) return false;
  }
  host_waits(event, "query", false);
  return true;
}

}  // namespace sim
