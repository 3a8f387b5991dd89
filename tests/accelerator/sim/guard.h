// What torch asks about the current device and stream, events, random numbers and pinned memory.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "launch.h"

namespace sim {

constexpr auto KEY = c10::DispatchKey::PrivateUse1;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device to) const override {
    auto before = getDevice();
    setDevice(to);
    return before;
  }
  c10::Device getDevice() const override { return device(-1); }
  void setDevice(c10::Device to) const override {
    TORCH_CHECK(to.index() < COUNT, "the simulated device has ", int(COUNT), " devices but got ", to);
    uncheckedSetDevice(to);
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.index() >= 0) current_device = to.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }

  c10::Stream getStream(c10::Device of) const override { return streams.to_torch(current_stream(of)); }
  c10::Stream getDefaultStream(c10::Device of) const override { return c10::Stream(c10::Stream::DEFAULT, device(of.index())); }
  c10::Stream getNewStream(c10::Device of, int) const override {
    return streams.to_torch(streams.add(device(of.index()).index(), ""));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {  // 32, one after the other, as on CUDA
    static std::vector<c10::Stream> pools[COUNT];
    static size_t next[COUNT] = {};
    Locked lock(state);
    auto index = device(of.index()).index();
    if (pools[index].size() < 32) pools[index].push_back(streams.to_torch(streams.add(index, "pool " + std::to_string(pools[index].size()))));
    return pools[index][next[index]++ % 32];
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = getStream(to.device());
    current_streams[to.device_index()] = streams.of(to).id;
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto& ours = streams.of(stream);
    {
      Locked lock(state);
      if (streams.host.covers(ours.last())) return true;
      if (ours.polls++ < streams.polls) return false;
      ours.polls = 0;
    }
    host_waits(ours, "query", false);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { host_waits(streams.of(stream), "synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    Event all;
    {
      Locked lock(state);
      for (auto& stream : streams.all)
        if (stream.device == index) all.clock.merge(streams.record(stream).clock), all.points.push_back(stream.last());
    }
    host_waits(all, "synchronize");
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Locked lock(state);
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = streams.record(streams.of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    Locked lock(state);
    if (event) streams.wait(streams.of(stream), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override { return !event || has_happened(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits(*static_cast<Event*>(event), "synchronize");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    memory.recordStream(data, stream);
  }
};
struct Random final : at::CPUGeneratorImpl {  // its numbers are the CPU's, its device is not
  explicit Random(c10::DeviceIndex index) {
    device_ = sim::device(index);
    key_set_ = c10::DispatchKeySet(KEY);
  }
};

struct Pinned final : c10::Allocator {
  std::map<const char*, size_t> blocks;
  c10::DataPtr allocate(size_t bytes) override {
    Locked lock(state);
    auto* data = static_cast<char*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64));
    blocks[data] = bytes;
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  bool has(const void* data) const {
    Locked lock(state);
    auto after = blocks.upper_bound(static_cast<const char*>(data));
    return after != blocks.begin() && data <= std::prev(after)->first + std::prev(after)->second;
  }
  static void release(void* data);
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
inline Pinned& pinned = *new Pinned;
inline void Pinned::release(void* data) {
  Locked lock(state);
  pinned.blocks.erase(static_cast<const char*>(data));
  std::free(data);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice(device(index)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override {
    return Guard().exchangeDevice(device(to)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override { return exchangeDevice(to); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static at::Generator generators[COUNT] = {at::make_generator<Random>(0), at::make_generator<Random>(1)};
    return generators[device(index).index()];
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return at::make_generator<Random>(index); }
  bool isPinnedPtr(const void* data) const override { return pinned.has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  at::Device getDeviceFromPtr(void*) const override { return device(-1); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override;
};

}  // namespace sim
