// Copies, also to and from the host. As on CUDA, one that is not `non_blocking` makes the host wait; so does one to memory that is
// not pinned.
#pragma once
#include "tensors.h"

namespace sim {

struct FromPinned final : Delivery {  // read as late as may be: the host must leave it alone until then
  at::Tensor source;
  explicit FromPinned(at::Tensor from) : source(std::move(from)) {}
  void await() override {}
  const char* bytes() const override { return static_cast<const char*>(source.data_ptr()); }
};

inline bool are_alike(const at::Tensor& one, const at::Tensor& other) {
  return one.is_contiguous() && other.is_contiguous() && one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes();
}

inline void copy_from_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
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

inline void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
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

inline void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
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

inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
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

inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

}  // namespace sim
