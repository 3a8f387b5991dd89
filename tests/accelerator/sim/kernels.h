// All other operations: the CPU's kernel, on the same memory, launched on the current stream. What it reads and writes says its schema.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include "copies.h"

namespace sim {

struct Schema {  // what the schema of an operation says about it
  std::string name;
  std::vector<bool> writes;
  bool is_view = false, reads_on_host = false, indexes = false;

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
    indexes = name == "aten::_index_put_impl_";  // CUDA's looks for what a mask has
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

inline void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
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
  if (schema.reads_on_host || (schema.indexes && call.has_mask)) host_waits(launch->stream, schema.name);
}

}  // namespace sim
