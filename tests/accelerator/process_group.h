// A process group for tensors of the simulated device. Their bytes lie in host memory, and gloo carries them.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

namespace sim {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
at::Tensor twin(const at::Tensor& ours);  // a CPU tensor over the same memory

using Tensors = std::vector<at::Tensor>;
using UnderWay = c10::intrusive_ptr<c10d::Work>;

inline at::Tensor lent(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == TYPE, "simccl expects tensors of the simulated device but got ", tensor.device());
  TORCH_CHECK(tensor.is_contiguous(), "simccl expects contiguous tensors");
  return twin(tensor);
}

inline Tensors& lend(std::vector<Tensors>& kept, const Tensors& tensors) {
  kept.emplace_back();
  for (auto& tensor : tensors) kept.back().push_back(lent(tensor));
  return kept.back();
}

// Done when gloo is. Holds the tensors until then, and its future has those of the caller.
struct Carried final : c10d::Work {
  Carried(UnderWay inner, std::vector<Tensors> kept, Tensors results)
      : inner_(std::move(inner)), kept_(std::move(kept)), results_(std::move(results)) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  bool wait(std::chrono::milliseconds timeout) override { return inner_->wait(timeout); }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto type = c10::ListType::create(c10::TensorType::get());
    return inner_->getFuture()->then([results = results_](c10::ivalue::Future&) { return c10::IValue(results); }, type);
  }
  UnderWay inner_;
  std::vector<Tensors> kept_;
  Tensors results_;
};

struct ProcessGroup final : c10d::Backend {
  explicit ProcessGroup(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "simccl"; }

  template <typename Start>
  UnderWay carry(const Tensors& results, std::vector<Tensors> tensors, Start start) {
    std::vector<Tensors> kept;
    kept.reserve(tensors.size());
    for (auto& list : tensors) lend(kept, list);
    auto work = start(kept);
    tensors.insert(tensors.end(), kept.begin(), kept.end());
    return c10::make_intrusive<Carried>(work, std::move(tensors), results);
  }

  UnderWay broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return carry(tensors, {tensors}, [&](auto& lent) { return gloo_->broadcast(lent[0], options); });
  }
  UnderWay allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return carry(tensors, {tensors}, [&](auto& lent) { return gloo_->allreduce(lent[0], options); });
  }
  UnderWay reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return carry(tensors, {tensors}, [&](auto& lent) { return gloo_->reduce(lent[0], options); });
  }
  UnderWay allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return carry(outputs[0], {outputs[0], inputs}, [&](auto& lent) {
      std::vector<Tensors> rows{lent[0]};
      return gloo_->allgather(rows, lent[1], options);
    });
  }
  UnderWay _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return carry({output}, {{output}, {input}},
                 [&](auto& lent) { return gloo_->_allgather_base(lent[0][0], lent[1][0], options); });
  }
  UnderWay _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override {
    return carry({output}, {{output}, {input}},
                 [&](auto& lent) { return gloo_->_reduce_scatter_base(lent[0][0], lent[1][0], options); });
  }
  UnderWay alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& outputs,
                     std::vector<int64_t>& inputs, const c10d::AllToAllOptions& options) override {
    return carry({output}, {{output}, {input}}, [&](auto& lent) {
      return gloo_->alltoall_base(lent[0][0], lent[1][0], outputs, inputs, options);
    });
  }
  UnderWay send(Tensors& tensors, int to, int tag) override {
    return carry(tensors, {tensors}, [&](auto& lent) { return gloo_->send(lent[0], to, tag); });
  }
  UnderWay recv(Tensors& tensors, int from, int tag) override {
    return carry(tensors, {tensors}, [&](auto& lent) { return gloo_->recv(lent[0], from, tag); });
  }
  UnderWay barrier(const c10d::BarrierOptions& options) override { return gloo_->barrier(options); }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace sim
