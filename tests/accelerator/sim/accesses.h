// Who has touched which bytes, on which stream. Two accesses to the same bytes, one of them a write, must be ordered.
#pragma once
#include <ATen/Tensor.h>

#include "streams.h"

namespace sim {

struct Names {  // of operations, each once
  std::map<std::string, int> known;
  std::vector<std::string> all;
  int operator()(const std::string& name) {
    auto [at, is_new] = known.try_emplace(name, int(all.size()));
    if (is_new) all.push_back(name);
    return at->second;
  }
};
inline Names& names = *new Names;

struct Access {
  Point by;
  int name = 0, line = 0;
  bool writes = false;
};

inline std::string shown(const Access& access, const char* did = nullptr) {
  auto& stream = streams.all[access.by.stream];
  return names.all[access.name] + " " + (did ? did : access.writes ? "writes" : "reads") + " on stream \"" + stream.name +
         "\" of sim:" + std::to_string(int(stream.device)) + "\n    at " + lines[access.line].outside;
}

using Range = std::pair<size_t, size_t>;  // bytes, from and up to

// Where a tensor lies in its storage: row by row if there are few, else from its first to its last byte.
inline std::vector<Range> ranges_of(const at::Tensor& tensor) {
  if (!tensor.numel()) return {};
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t at = 0; at < tensor.dim(); ++at)
    if (tensor.size(at) > 1 && tensor.stride(at)) dims.emplace_back(tensor.stride(at), tensor.size(at));
  std::sort(dims.begin(), dims.end());
  int64_t row = 1;
  while (!dims.empty() && dims.front().first <= row) {
    row = std::max(row, (dims.front().second - 1) * dims.front().first + row);
    dims.erase(dims.begin());
  }
  int64_t rows = 1, last = row;
  for (auto [stride, size] : dims) rows *= size, last += stride * (size - 1);
  size_t item = tensor.itemsize(), first = tensor.storage_offset() * item;
  if (rows > 256) return {{first, first + last * item}};
  std::vector<Range> ranges{{first, first + row * item}};
  for (auto [stride, size] : dims)
    for (size_t at = 0, before = ranges.size(); at < before; ++at)
      for (int64_t step = 1; step < size; ++step) {
        auto [from, to] = ranges[at];
        ranges.emplace_back(from + step * stride * item, to + step * stride * item);
      }
  return ranges;
}

struct RaceDetector {
  bool on = true;
} inline detector;

// The last accesses to each byte of one allocation.
struct Accesses {
  struct Segment {
    size_t end;
    Access write;
    std::vector<Access> reads;  // since then, the last one of each stream
  };
  std::map<size_t, Segment> segments;  // by their first byte; together, all of it

  void reset(size_t size, Access by) {
    segments.clear();
    segments[0] = {size, by, {}};
  }

  void cut(size_t at) {
    auto after = segments.upper_bound(at);
    if (after == segments.begin()) return;
    auto segment = std::prev(after);
    if (segment->first == at || segment->second.end <= at) return;
    auto second = segment->second;
    segment->second.end = at;
    segments[at] = std::move(second);
  }

  // The earlier one of a pair that nobody has ordered.
  static const Access* conflict(const Segment& segment, const Access& access, const Clock& clock) {
    if (!clock.covers(segment.write.by)) return &segment.write;
    if (access.writes)
      for (auto& read : segment.reads)
        if (!clock.covers(read.by)) return &read;
    return nullptr;
  }

  const Access* unordered(const Access& access, const Clock& clock) const {  // anywhere in it
    for (auto& [_, segment] : segments)
      if (auto* other = conflict(segment, access, clock)) return other;
    return nullptr;
  }

  void add(Range range, const Access& access, const Clock& clock) {
    cut(range.first), cut(range.second);
    auto from = segments.lower_bound(range.first), to = segments.lower_bound(range.second);
    for (auto at = from; at != to; ++at)
      if (auto* other = detector.on ? conflict(at->second, access, clock) : nullptr)
        TORCH_CHECK(false, "A race on the simulated device, over ", at->second.end - at->first, " bytes:\n  ", shown(access),
                    "\n  ", shown(*other), "\nNeither is ordered after the other. Let the one stream wait for the other's event, "
                    "or the work (wait_stream, wait_event, work.wait()).");
    if (access.writes) {
      segments.erase(from, to);
      segments[range.first] = {range.second, access, {}};
      return;
    }
    for (auto at = from; at != to; ++at) {
      auto& reads = at->second.reads;
      auto same = [&](const Access& read) { return read.by.stream == access.by.stream; };
      reads.erase(std::remove_if(reads.begin(), reads.end(), same), reads.end());
      reads.push_back(access);
    }
  }
};

}  // namespace sim
