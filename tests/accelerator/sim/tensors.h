// Tensors of the device, and their twins: the CPU's tensors over the same memory.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/set_native.h>

#include "guard.h"

namespace sim {

inline at::Tensor over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

inline at::Tensor twin(const at::Tensor& ours) {
  if (!ours.defined() || ours.device().type() != TYPE) return ours;
  c10::DataPtr data(ours.storage().mutable_data(), c10::Device(c10::kCPU));
  auto size = ours.storage().nbytes();
  return over(c10::Storage({}, size, std::move(data), at::getCPUAllocator(), true), c10::DispatchKey::CPU, ours);
}

inline at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> where, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(where.value_or(device(-1)));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(KEY), at::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
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

inline const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());  // torch's own asks the allocator, which looks at the current device
  return at::native::resize_(self, size, format);
}

inline void record_stream(at::Tensor& tensor, c10::Stream stream) { memory.recordStream(tensor.storage().data_ptr(), stream); }

inline at::Tensor& set_storage(at::Tensor& self, c10::Storage storage) {
  auto numel = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {numel}, {});
}

// As for CUDA: `model.to(device)` then changes the parameters instead of making new ones.
inline bool has_compatible_type(const at::Tensor& one, const at::Tensor& other) {
  auto is_dense = [](const at::Tensor& tensor) { return tensor.layout() == c10::kStrided; };
  return is_dense(one) && is_dense(other);
}

}  // namespace sim
