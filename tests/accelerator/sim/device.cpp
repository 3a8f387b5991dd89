// A simulated device on torch's PrivateUse1 key, for tests only: what torch asks of a device, and kernels, which are the CPU's.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include "process_group.h"

namespace sim {

constexpr auto KEY = c10::DispatchKey::PrivateUse1;
REGISTER_ALLOCATOR(TYPE, &memory)

// --- the current device and stream, events, random numbers, pinned memory -----------------------------------------------

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
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return getNewStream(of, 0); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = getStream(to.device());
    current_streams[to.device_index()] = streams.of(to).id;
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Locked lock(state);
    return streams.host.covers(streams.of(stream).last());
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
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

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
Pinned& pinned = *new Pinned;
void Pinned::release(void* data) {
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

// --- tensors --------------------------------------------------------------------------------------------------------

at::Tensor over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

at::Tensor twin(const at::Tensor& ours) {
  if (!ours.defined() || ours.device().type() != TYPE) return ours;
  c10::DataPtr data(ours.storage().mutable_data(), c10::Device(c10::kCPU));
  auto size = ours.storage().nbytes();
  return over(c10::Storage({}, size, std::move(data), at::getCPUAllocator(), true), c10::DispatchKey::CPU, ours);
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> where, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(where.value_or(device(-1)));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(KEY), at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> where, std::optional<bool>) {
  c10::DeviceGuard guard(where.value_or(device(-1)));
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(KEY),
                                           at::dtype_or_default(dtype));
}

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const {
  c10::DeviceGuard guard(storage.device());
  auto kept = std::min(bytes, storage.nbytes());
  auto before = over(storage, KEY, at::empty({int64_t(kept)}, at::kByte));
  auto data = memory.allocate(bytes);
  auto after = over(c10::Storage({}, bytes, std::move(data), &memory, true), KEY, before);
  if (kept) {
    Launch launch(current_stream(storage.device()), "resize");
    launch.touch(before, false), launch.touch(after, true);
    std::memcpy(after.mutable_data_ptr(), before.data_ptr(), kept);
    launch.note("copy");
  }
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(after.storage().unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, storage.device())));
  impl->set_nbytes(bytes);
}

void record_stream(at::Tensor& tensor, c10::Stream stream) { memory.recordStream(tensor.storage().data_ptr(), stream); }

at::Tensor& set_storage(at::Tensor& self, c10::Storage storage) {
  auto numel = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {numel}, {});
}

// As for CUDA: `model.to(device)` then changes the parameters instead of making new ones.
bool has_compatible_type(const at::Tensor& one, const at::Tensor& other) {
  auto is_dense = [](const at::Tensor& tensor) { return tensor.layout() == c10::kStrided; };
  return is_dense(one) && is_dense(other);
}

// --- copies -----------------------------------------------------------------------------------------------------------

struct FromPinned final : Delivery {  // read as late as may be: the host must leave it alone until then
  at::Tensor source;
  explicit FromPinned(at::Tensor from) : source(std::move(from)) {}
  void await() override {}
  const char* bytes() const override { return static_cast<const char*>(source.data_ptr()); }
};

bool are_alike(const at::Tensor& one, const at::Tensor& other) {
  return one.is_contiguous() && other.is_contiguous() && one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes();
}

void copy_from_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto& stream = current_stream(to.device());
  Launch launch(stream, "copy from the host");
  launch.touch(to, true);
  if (non_blocking && from.numel() && are_alike(from, to) && pinned.has(from.data_ptr()))
    memory.expect(*block_of(to), {std::make_shared<FromPinned>(from), launch.point, ranges_of(to)[0]});
  else
    twin(to).copy_(from);
  launch.note("copy");
  if (!non_blocking) host_waits(stream, "copy from the host");
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto& stream = current_stream(from.device());
  Launch launch(stream, "copy to the host");
  launch.touch(from, false);
  launch.note("copy");
  if (non_blocking && to.numel() && to.is_contiguous() && pinned.has(to.data_ptr())) {
    auto hidden = twin(from).clone();
    std::memset(to.data_ptr(), POISON, to.nbytes());
    Locked lock(state);
    to_host.push_back({streams.record(stream), hidden, to});
    return;
  }
  to.copy_(twin(from));
  host_waits(stream, "copy to the host");
}

void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
  auto &source = current_stream(from.device()), &target = current_stream(to.device());
  {
    Locked lock(state);
    streams.wait(source, streams.record(target));
  }
  Launch launch(source, "copy to another device");
  launch.touch(from, false), launch.touch(to, true);
  twin(to).copy_(twin(from));
  launch.note("copy");
  Locked lock(state);
  streams.wait(target, streams.record(source));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.device().type() != TYPE) copy_from_host(from, to, non_blocking);
  else if (to.device().type() != TYPE) copy_to_host(from, to, non_blocking);
  else if (from.device() != to.device()) copy_between_devices(from, to);
  else {
    Launch launch(current_stream(to.device()), "aten::copy_");
    launch.touch(from, false), launch.touch(to, true);
    twin(to).copy_(twin(from));
    launch.note("kernel");
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// --- everything else: the CPU's kernel, on the same memory ----------------------------------------------------------

struct Schema {  // what the schema of an operation says about it
  std::string name;
  std::vector<bool> writes;
  bool is_view = false, reads_on_host = false;

  static const Schema& of(const c10::OperatorHandle& op) {
    static auto& known = *new std::map<std::string, Schema>;
    static auto& mutex = *new std::mutex;
    std::lock_guard<std::mutex> lock(mutex);
    auto name = c10::toString(op.operator_name());
    auto [at, is_new] = known.try_emplace(name);
    if (is_new) at->second = Schema(op);
    return at->second;
  }
  Schema() = default;
  explicit Schema(const c10::OperatorHandle& op) : name(op.schema().name()) {
    static const std::set<std::string> HOST{"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select",
                                            "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount"};
    reads_on_host = HOST.count(name);
    for (auto& one : op.schema().arguments()) writes.push_back(one.alias_info() && one.alias_info()->isWrite());
    for (auto& one : op.schema().returns()) is_view = is_view || (one.alias_info() && !one.alias_info()->isWrite());
  }
};

struct Call {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // ours, and its twin
  std::vector<bool> written;
  c10::Device where = device(-1);
  std::optional<c10::Device> seen;
  bool writes = false, has_mask = false;
  Launch* launch = nullptr;

  at::Tensor lend(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.dim() || tensor.device().type() == TYPE) {  // as on CUDA, numbers may be the CPU's
      TORCH_CHECK(seen.value_or(tensor.device()) == tensor.device(),
                  "Expected all tensors to be on the same device but got ", *seen, " and ", tensor.device());
      seen = tensor.device();
    }
    if (tensor.device().type() != TYPE) return tensor;
    where = tensor.device();
    pairs.emplace_back(tensor, twin(tensor)), written.push_back(writes);
    return pairs.back().second;
  }

  at::Tensor take_back(const at::Tensor& made) {
    if (!made.defined()) return made;
    for (auto& [ours, lent] : pairs)
      if (made.is_same(lent)) return ours;
    for (auto& [ours, lent] : pairs)
      if (made.has_storage() && made.is_alias_of(lent)) return over(ours.storage(), KEY, made);
    auto ours = empty_strided(made.sizes(), made.strides(), made.scalar_type(), {}, where, {});
    if (launch) launch->touch(ours, true);
    twin(ours).copy_(made);
    return ours;
  }

  c10::IValue each(const c10::IValue& value, at::Tensor (Call::*change)(const at::Tensor&)) {
    if (value.isTensor()) return (this->*change)(value.toTensor());
    if (value.isDevice() && value.toDevice().type() == TYPE) {
      where = device(value.toDevice().index());
      return c10::Device(c10::kCPU);
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back((this->*change)(one));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector()) {
        bool ours = one && one->device().type() == TYPE;
        has_mask = has_mask || (ours && (one->scalar_type() == at::kBool || one->scalar_type() == at::kByte));
        list.push_back(ours ? std::optional<at::Tensor>((this->*change)(*one)) : one);
      }
      return list;
    }
    return value;
  }

  void touch_all() {
    for (size_t at = 0; at < pairs.size(); ++at)
      if (!written[at]) launch->touch(pairs[at].first, false);
    for (size_t at = 0; at < pairs.size(); ++at)
      if (written[at]) launch->touch(pairs[at].first, true);
  }

  void resize_outputs() {  // the CPU's kernel has given a twin other memory
    for (auto& [ours, lent] : pairs)
      if (lent.sizes() != ours.sizes() || lent.storage().data() != ours.storage().data()) {
        ours.resize_(lent.sizes());
        if (launch) launch->touch(ours, true);
        twin(ours).copy_(lent);
      }
  }
};

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& schema = Schema::of(op);
  Call call;
  const auto inputs = op.schema().arguments().size(), outputs = op.schema().returns().size();
  for (size_t at = 0; at < inputs; ++at) {
    auto& value = (*stack)[stack->size() - inputs + at];
    call.writes = schema.writes[at];
    value = call.each(value, &Call::lend);
  }
  std::optional<Launch> launch;
  if (!schema.is_view) {
    launch.emplace(current_stream(call.where), schema.name);
    call.launch = &*launch;
    call.touch_all();
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.resize_outputs();
  for (size_t at = stack->size() - outputs; at < stack->size(); ++at)
    (*stack)[at] = call.each((*stack)[at], &Call::take_back);
  if (!launch) return;
  launch->note("kernel");
  if (schema.reads_on_host || call.has_mask) host_waits(launch->stream, schema.name);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  // One kernel each, as on CUDA, where others get a loop over the tensors.
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    bool one_kernel = name.name.rfind("aten::_foreach_", 0) == 0 || name.name == "aten::_chunk_cat" || name.name == "aten::split_with_sizes_copy";
    if (one_kernel) m.impl(c10::toString(name).c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
  }
}

// (Also before tensors that are Python objects are asked.)
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("_has_compatible_shallow_copy_type", has_compatible_type); }

}  // namespace sim

#include "bindings.h"
