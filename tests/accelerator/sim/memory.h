// Memory by CUDA's rules. Blocks come from a pool per device and stream, and go back to it in the order of that stream;
// `record_stream` holds them back. All bytes are poison (0xff: NaN) until something writes them.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>

#include <memory>
#include <set>

#include "accesses.h"

namespace sim {

constexpr int POISON = 0xff;

// Bytes that come later. To wait for them takes real time only: on the virtual clock nobody waits.
struct Delivery {
  virtual ~Delivery() = default;
  virtual void await() = 0;  // throws what went wrong
  virtual bool was_told_lost() { return false; }  // somebody has heard already that they never come
  virtual const char* bytes() const = 0;
};

struct Arrival {
  std::shared_ptr<Delivery> from;
  Point point;  // who is ordered after it finds the bytes
  Range range;
};

struct Block {
  char* data;
  size_t size;  // as it was made; what was asked for may be less
  c10::DeviceIndex device;
  int stream;  // that was current when it was given out
  size_t asked = 0;
  int line = 0, freed_at = 0;
  bool was_used = false;  // before: then giving it out again costs nothing
  Accesses accesses{};
  std::vector<std::shared_ptr<Arrival>> arrivals{};
  std::set<int> recorded{};         // streams
  std::vector<Event> held_until{};  // where they were when it was freed
};

struct Freed {  // its memory may be given out again: whoever used it must be done when its stream goes on
  Accesses accesses;
  int freed_at;
};

struct EarlyFree {
  std::string stream;  // whose memory it is
  int made_at;
  std::string use;  // on another stream
  int freed_at;
};
inline std::vector<EarlyFree>& early_frees = *new std::vector<EarlyFree>;

struct Usage {
  int64_t current = 0, peak = 0, reserved = 0, held = 0, count = 0, reused = 0;
};

struct Memory final : c10::DeviceAllocator {
  struct Pool {
    std::vector<Block*> returned, available;
    std::vector<Freed> freed;
  };
  std::map<int, Pool> pools;  // by stream, which has a device
  std::set<Block*> expecting;
  std::vector<std::shared_ptr<Arrival>> dropped;  // whose memory was freed first
  Usage usage[COUNT];

  static size_t rounded(size_t bytes) { return (bytes + 511) / 512 * 512; }

  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &release, sim::device(-1)};
    int line = lines.here();
    std::vector<std::shared_ptr<Arrival>> over;  // ends after the lock: it may hold tensors, which may ask for Python's
    Locked lock(state);
    auto& stream = current_stream(sim::device(-1));
    auto* block = take(stream, rounded(bytes));
    over.swap(dropped);
    auto& used = usage[stream.device];
    block->asked = bytes, block->line = line;
    used.current += rounded(bytes), used.peak = std::max(used.peak, used.current), ++used.count;
    trace.add({"allocate", stream.last(), block->was_used ? "again" : "new", int64_t(rounded(bytes)), line});
    capture.launch(stream, "an allocation", lines[line].outside);
    block->was_used = true;
    std::memset(block->data, POISON, block->size);
    block->accesses.reset(block->size, {stream.last(), names("allocation"), line, true});
    return {block->data, block, &release, sim::device(-1)};
  }

  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    if (block) memory_of_all().give_back(*block);
  }

  void give_back(Block& block) {
    int line = lines.here();
    Locked lock(state);
    block.freed_at = line;
    for (int stream : block.recorded) block.held_until.push_back(streams.record(streams.all[stream]));
    note_if_early(block);
    usage[block.device].current -= rounded(block.asked);
    if (!block.recorded.empty()) usage[block.device].held += rounded(block.asked);
    trace.add({"free", streams.all[block.stream].last(), "", int64_t(rounded(block.asked)), line});
    pools[block.stream].returned.push_back(&block);
  }

  // Freed while a stream that was not recorded may use it, as far as its own stream knows by now. That is a race only if its own
  // stream goes on before it waits (check_freed).
  void note_if_early(Block& block) {
    auto known = streams.all[block.stream].clock;
    known.merge(streams.host);
    auto note = [&](const Access& access) {
      if (known.covers(access.by) || block.recorded.count(access.by.stream)) return;
      early_frees.push_back({streams.all[block.stream].name, block.line, shown(access), block.freed_at});
    };
    for (auto& [_, segment] : block.accesses.segments) {
      note(segment.write);
      for (auto& read : segment.reads) note(read);
    }
  }

  Block* take(Stream& stream, size_t size) {
    auto& pool = pools[stream.id];
    take_back(stream, pool);
    auto best = pool.available.end();
    for (auto at = pool.available.begin(); at != pool.available.end(); ++at)
      if ((*at)->size >= size && (*at)->size <= size + size / 4 && (best == pool.available.end() || (*at)->size <= (*best)->size))
        best = at;
    if (best == pool.available.end()) {
      auto* data = static_cast<char*>(std::aligned_alloc(512, size));
      TORCH_CHECK(data, "the simulated device is out of memory");
      usage[stream.device].reserved += size;
      return new Block{data, size, stream.device, stream.id};
    }
    auto* block = *best;
    pool.available.erase(best);
    ++usage[stream.device].reused;
    return block;
  }

  // What was freed may be given out from now on, unless a recorded stream is not done with it.
  void take_back(Stream& stream, Pool& pool) {
    auto in_use = [&](const Event& event) { return !Streams::is_after(stream.clock, event) && !Streams::is_after(streams.host, event); };
    std::vector<Block*> later;
    for (auto* block : pool.returned) {
      if (std::any_of(block->held_until.begin(), block->held_until.end(), in_use)) {
        later.push_back(block);
        continue;
      }
      if (!block->recorded.empty()) usage[block->device].held -= rounded(block->asked);
      pool.freed.push_back({std::move(block->accesses), block->freed_at});
      std::memset(block->data, POISON, block->size);
      block->recorded.clear(), block->held_until.clear(), expecting.erase(block);
      std::move(block->arrivals.begin(), block->arrivals.end(), std::back_inserter(dropped));
      block->arrivals.clear();
      pool.available.push_back(block);
    }
    pool.returned = std::move(later);
  }

  // The stream launches something: it may write to whatever was freed in its pool before.
  void check_freed(Stream& stream) {
    auto freed = std::move(pools[stream.id].freed);
    pools[stream.id].freed.clear();
    for (auto& block : freed)
      if (auto* other = detector.on ? block.accesses.unordered({stream.last(), 0, 0, true}, stream.clock) : nullptr)
        TORCH_CHECK(false, "A race on the simulated device: memory of stream \"", stream.name, "\" was freed\n    at ",
                    lines[block.freed_at].outside, "\n  and may have been given out again, while\n  ", shown(*other),
                    "\nHold it until its stream has waited for that, or call record_stream.");
  }

  void touch(Block& block, const std::vector<Range>& ranges, const Access& access, const Clock& clock) {
    for (auto range : ranges) {
      bring_in(block, range, clock);
      Locked lock(state);
      block.accesses.add(range, access, clock);
    }
  }

  void expect(Block& block, Arrival arrival) {
    Locked lock(state);
    std::memset(block.data + arrival.range.first, POISON, arrival.range.second - arrival.range.first);
    block.arrivals.push_back(std::make_shared<Arrival>(std::move(arrival)));
    expecting.insert(&block);
  }

  // What whoever has this clock is ordered after must be there now. `once`: errors that somebody has seen are not raised again.
  void bring_in(Block& block, Range range, const Clock& clock, bool once = false) {
    auto overlaps = [&](Range other) { return other.first < range.second && range.first < other.second; };
    for (;;) {
      std::shared_ptr<Arrival> next;
      {
        Locked lock(state);
        for (auto& arrival : block.arrivals)
          if (!next && overlaps(arrival->range) && clock.covers(arrival->point)) next = arrival;
      }
      if (!next) return;
      bool lost = once && next->from->was_told_lost();
      if (!lost) next->from->await();
      Locked lock(state);
      auto at = std::find(block.arrivals.begin(), block.arrivals.end(), next);
      if (at == block.arrivals.end()) continue;
      if (!lost) std::memcpy(block.data + next->range.first, next->from->bytes(), next->range.second - next->range.first);
      block.arrivals.erase(at);
      if (block.arrivals.empty()) expecting.erase(&block);
    }
  }

  void bring_in_all(const Clock& clock, bool once = false) {
    std::vector<Block*> blocks;
    {
      Locked lock(state);
      blocks.assign(expecting.begin(), expecting.end());
    }
    for (auto* block : blocks) bring_in(*block, {0, block->size}, clock, once);
  }

  static Memory& memory_of_all() {
    static auto& memory = *new Memory;
    return memory;
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Locked lock(state);
    auto* block = static_cast<Block*>(data.get_context());
    auto id = streams.of(stream).id;
    if (block && id != block->stream) block->recorded.insert(id);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& used = usage[sim::device(device).index()];
    stats.allocated_bytes[0].current = used.current, stats.allocated_bytes[0].peak = used.peak;
    stats.active_bytes[0].current = used.current + used.held;
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = used.reserved;
    stats.allocation[0].allocated = used.count;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { usage[sim::device(device).index()].count = 0; }
  void resetPeakStats(c10::DeviceIndex device) override {
    auto& used = usage[sim::device(device).index()];
    used.peak = used.current;
  }
};
inline Memory& memory = Memory::memory_of_all();

inline Block* block_of(const at::Tensor& tensor) {
  return static_cast<Block*>(tensor.storage().data_ptr().get_context());
}

}  // namespace sim
