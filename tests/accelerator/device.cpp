// A simulated device on torch's PrivateUse1 key: memory of its own type, kernels of the CPU on it. For tests only.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
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
constexpr c10::DeviceIndex COUNT = 2;
thread_local c10::DeviceIndex current = 0;

c10::Device device(c10::DeviceIndex index) { return {TYPE, index < 0 ? current : index}; }

// --- memory, the current device, random numbers ---------------------------------------------------------------------

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    TORCH_CHECK(data || !bytes, "the simulated device is out of memory");
    return {data, data, &std::free, device(-1)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} memory;
REGISTER_ALLOCATOR(TYPE, &memory)

// One stream, on which everything has happened when a call returns: events have nothing to order.
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
  void uncheckedSetDevice(c10::Device to) const noexcept override { current = to.index() < 0 ? current : to.index(); }
  c10::Stream getStream(c10::Device of) const override { return c10::Stream(c10::Stream::DEFAULT, device(of.index())); }
  c10::Stream getDefaultStream(c10::Device of) const override { return getStream(of); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Random final : at::CPUGeneratorImpl {  // its numbers are the CPU's, its device is not
  explicit Random(c10::DeviceIndex index) {
    device_ = sim::device(index);
    key_set_ = c10::DispatchKeySet(KEY);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
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
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);  // whose allocator is ours
  }
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

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  twin(to).copy_(twin(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage storage) {
  auto numel = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {numel}, {});
}

// As for CUDA: `model.to(device)` then changes the parameters instead of making new ones.
bool has_compatible_type(const at::Tensor& one, const at::Tensor& other) {
  auto is_dense = [](const at::Tensor& tensor) { return tensor.layout() == c10::kStrided; };
  return is_dense(one) && is_dense(other);
}

// --- everything else: the CPU's kernel, on the same memory ----------------------------------------------------------

struct Call {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // ours, and its twin
  c10::Device where = device(-1);
  std::optional<c10::Device> seen;

  at::Tensor lend(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.dim() || tensor.device().type() == TYPE) {  // as on CUDA, numbers may be the CPU's
      TORCH_CHECK(seen.value_or(tensor.device()) == tensor.device(),
                  "Expected all tensors to be on the same device but got ", *seen, " and ", tensor.device());
      seen = tensor.device();
    }
    if (tensor.device().type() != TYPE) return tensor;
    where = tensor.device();
    pairs.emplace_back(tensor, twin(tensor));
    return pairs.back().second;
  }

  at::Tensor take_back(const at::Tensor& made) {
    if (!made.defined()) return made;
    for (auto& [ours, lent] : pairs)
      if (made.is_same(lent)) return ours;
    for (auto& [ours, lent] : pairs)
      if (made.has_storage() && made.is_alias_of(lent)) return over(ours.storage(), KEY, made);
    auto ours = empty_strided(made.sizes(), made.strides(), made.scalar_type(), {}, where, {});
    twin(ours).copy_(made);
    return ours;
  }

  c10::IValue each(const c10::IValue& value, at::Tensor (Call::*change)(const at::Tensor&)) {
    if (value.isTensor()) return (this->*change)(value.toTensor());
    if (value.isDevice() && value.toDevice().type() == TYPE) {
      where = value.toDevice();
      return c10::Device(c10::kCPU);
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back((this->*change)(one));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
        list.push_back(one && one->device().type() == TYPE ? std::optional<at::Tensor>((this->*change)(*one)) : one);
      return list;
    }
    return value;
  }

  void resize_outputs() {  // the CPU's kernel has given a twin other memory
    for (auto& [ours, lent] : pairs)
      if (lent.sizes() != ours.sizes() || lent.storage().data() != ours.storage().data()) {
        ours.resize_(lent.sizes());
        twin(ours).copy_(lent);
      }
  }
};

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call;
  const auto inputs = op.schema().arguments().size(), outputs = op.schema().returns().size();
  for (size_t at = stack->size() - inputs; at < stack->size(); ++at) (*stack)[at] = call.each((*stack)[at], &Call::lend);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.resize_outputs();
  for (size_t at = stack->size() - outputs; at < stack->size(); ++at)
    (*stack)[at] = call.each((*stack)[at], &Call::take_back);
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
  m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
}

// (Also before tensors that are Python objects are asked.)
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("_has_compatible_shallow_copy_type", has_compatible_type); }

}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new sim::Hooks);
  m.attr("device_count") = int(sim::COUNT);
  m.def("current_device", [] { return int(sim::current); });
  m.def("set_device", [](int index) { sim::Guard().setDevice(sim::device(index)); });
  m.def("default_generator", [](int index) { return sim::Hooks().getDefaultGenerator(index); });
  m.def("process_group", [](const c10::intrusive_ptr<c10d::Backend>& gloo) {
    return c10::static_intrusive_pointer_cast<c10d::Backend>(c10::make_intrusive<sim::ProcessGroup>(gloo));
  });
}
