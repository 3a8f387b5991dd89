// NCCL's contract for tensors of the simulated device. A collective is launched on a stream of the group, after the current
// stream; `wait` orders the current stream after it, and the host goes on. Without `async_op` it runs on the current stream.
#pragma once
#include "exchange.h"

namespace sim {

using UnderWay = c10::intrusive_ptr<c10d::Work>;
inline std::map<std::string, int64_t>& launched = *new std::map<std::string, int64_t>;  // collectives, by name

struct StreamChange {  // launches go to that stream meanwhile
  Stream& stream;
  int before;
  explicit StreamChange(Stream& to) : stream(to), before(std::exchange(current_streams[to.device], to.id)) {}
  ~StreamChange() { current_streams[stream.device] = before; }
};

struct Work final : c10d::Work {
  c10::Device where;
  Event end;
  Tensors kept, results;  // kept until somebody has waited: their memory belongs to another stream
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool blocks_host = false;

  Work(int rank, c10d::OpType kind, c10::Device where) : c10d::Work(rank, kind), where(where) {}
  ~Work() override {
    Locked lock(state);
    if (!kept.empty()) shelf.push_back({end, std::move(kept)});
  }
  bool isCompleted() override { return has_happened(end); }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    {
      Locked lock(state);
      streams.wait(current_stream(where), end);
    }
    if (blocks_host) host_waits(current_stream(where), "barrier");
    kept.clear();
  }
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  Tensors result() override { return results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  void complete(Stream& stream) {  // its future is done when it is enqueued: who waits for that is ordered by events
    future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{where});
    StreamChange change(stream);
    future->markCompleted(c10::IValue(results));
  }
};

inline std::string size_of(const at::Tensor& tensor) {
  return std::to_string(tensor.numel()) + " x " + c10::toString(tensor.scalar_type());
}
inline std::string sizes_of(const Tensors& tensors) {
  std::string all;
  for (auto& one : tensors) all += (all.empty() ? "" : ", ") + size_of(one);
  return all;
}
inline std::string name_of(const c10d::ReduceOp& op) {
  switch (op) {
    case c10d::ReduceOp::SUM: return "sum";
    case c10d::ReduceOp::AVG: return "average";
    case c10d::ReduceOp::PRODUCT: return "product";
    case c10d::ReduceOp::MIN: return "min";
    case c10d::ReduceOp::MAX: return "max";
    default: TORCH_CHECK(false, "simccl, as NCCL, has no such reduction. (PREMUL_SUM, which NCCL has, is not simulated.)");
  }
}
inline Tensors slices(const at::Tensor& whole, int64_t count) {
  TORCH_CHECK(whole.numel() % count == 0, "simccl expects ", count, " equal parts but got ", size_of(whole));
  return whole.view(-1).chunk(count);
}

struct ProcessGroup final : c10d::Backend {
  explicit ProcessGroup(c10::intrusive_ptr<c10d::Backend> gloo) : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(gloo) {}
  ~ProcessGroup() override { shutdown(); }
  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return communicators_.count(-1) ? communicators_[-1]->count : 0; }
  void shutdown() override {
    for (auto& [_, communicator] : communicators_) communicator->close();
  }
  void abort() override { shutdown(); }

  // --- launching ------------------------------------------------------------------------------------------------------

  // Of all ranks (-1), or of this one and a peer.
  Communicator& communicator(int peer) {
    auto& found = communicators_[peer];
    if (!found) found = Communicator::open({gloo_}, getGroupUid());
    return *found;
  }
  Stream& stream(c10::Device where, int peer) {
    auto [at, is_new] = streams_.try_emplace({where.index(), peer}, -1);
    if (is_new) at->second = streams.add(where.index(), "simccl " + getGroupUid() + (peer < 0 ? "" : " with " + std::to_string(peer))).id;
    return streams.all[at->second];
  }

  static std::string pair(int from, int to) { return " " + std::to_string(from) + "->" + std::to_string(to); }

  static std::string name_of_all(const std::vector<Part>& parts) {
    if (parts.size() == 1) return parts[0].kind;
    auto same = [&](const Part& part) { return part.kind == parts[0].kind; };
    return std::all_of(parts.begin(), parts.end(), same) ? parts[0].kind + "_coalesced" : "coalesced";
  }

  static c10::Device checked(const std::vector<Part>& parts) {
    std::optional<c10::Device> where;
    auto check = [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      TORCH_CHECK(tensor.device().type() == TYPE, "simccl expects tensors of the simulated device but got ", tensor.device());
      TORCH_CHECK(tensor.is_contiguous(), "simccl expects contiguous tensors");
      TORCH_CHECK(tensor.scalar_type() != at::kShort, "simccl, as NCCL, has no int16");
      TORCH_CHECK(where.value_or(tensor.device()) == tensor.device(), "simccl expects tensors of one device");
      where = tensor.device();
    };
    for (auto& part : parts) {
      for (auto& one : part.reads) check(one);
      for (auto& one : part.writes) check(one);
    }
    return where.value_or(device(-1));
  }

  UnderWay issue(std::vector<Part> parts, Tensors results, bool async, c10d::OpType kind = c10d::OpType::UNKNOWN) {
    auto where = checked(parts);
    if (collecting_) {
      std::move(parts.begin(), parts.end(), std::back_inserter(collected_));
      collected_async_ = collected_async_ || async;
      auto work = c10::make_intrusive<Work>(getRank(), kind, where);
      work->results = results;
      work->complete(current_stream(where));
      return work;
    }
    return launch(std::move(parts), std::move(results), async, kind, where);
  }

  UnderWay launch(std::vector<Part> parts, Tensors results, bool async, c10d::OpType kind, c10::Device where) {
    bool alone = parts.size() == 1 && parts[0].peer.rank >= 0;
    int peer = alone ? parts[0].peer.rank : -1;
    auto& through = communicator(peer);
    auto name = name_of_all(parts);
    auto& now = current_stream(where);
    auto& on = async || alone ? stream(where, peer) : now;
    {
      Locked lock(state);
      if (on.id != now.id) streams.wait(on, streams.record(now));
      ++launched[name];
    }
    Launch launch(on, "simccl::" + name);
    auto work = c10::make_intrusive<Work>(getRank(), kind, where);
    auto job = std::make_shared<Job>();
    job->line = lines[launch.line].outside;
    for (auto& part : parts) {
      job->call += (job->call.empty() ? "" : "; ") + part.kind + "(" + part.about + ")";
      job->read.emplace_back();
      for (auto& one : part.reads) launch.touch(one, false), job->read.back().push_back(twin(one).clone()), work->kept.push_back(one);
    }
    for (size_t at = 0; at < parts.size(); ++at)
      for (size_t output = 0; output < parts[at].writes.size(); ++output) {
        auto& one = parts[at].writes[output];
        if (!one.defined() || !one.numel()) continue;
        launch.touch(one, true);
        memory.expect(*block_of(one), {std::make_shared<FromJob>(job, at, output), launch.point, ranges_of(one)[0]});
        work->kept.push_back(one);
      }
    // Sends that are launched together travel apart from the others, as on two communicators of NCCL.
    for (auto& part : parts) part.peer.tag = 2 * part.peer.tag + (alone ? 0 : 1);
    auto key = getGroupUid();
    if (alone) key += parts[0].peer.sends ? pair(getRank(), peer) : pair(peer, getRank());
    job->agreed = std::any_of(parts.begin(), parts.end(), [](const Part& part) { return part.peer.rank < 0; });
    job->number = alone ? numbers_[key]++ : job->agreed ? through.count++ : -1;
    launch.bytes = 0;
    for (auto& part : parts) launch.bytes += part.bytes();
    launch.note("collective", key, job->number);
    for (auto& part : parts) part.reads.clear(), part.writes.clear();
    job->parts = std::move(parts);
    through.push(job);
    {
      Locked lock(state);
      work->end = streams.record(on);
    }
    if (!async && !alone) work->kept.clear();
    work->results = std::move(results);
    work->complete(on);
    return work;
  }

  void startCoalescing() override { collecting_ = true, collected_async_ = false; }
  UnderWay endCoalescing() override {
    collecting_ = false;
    auto parts = std::exchange(collected_, {});
    auto where = checked(parts);
    if (parts.empty()) return c10::make_intrusive<Work>(getRank(), c10d::OpType::COALESCED, where);
    return launch(std::move(parts), {}, collected_async_, c10d::OpType::COALESCED, where);
  }

  // --- collectives ------------------------------------------------------------------------------------------------------

  Part broadcast_of(const at::Tensor& tensor, int64_t root) {
    bool mine = root == getRank();
    auto run = [root, mine, like = twin(tensor)](Wire& wire, const Tensors& read) -> Tensors {
      Tensors to(wire.size(), mine ? read[0] : wire.nothing()), from(wire.size(), wire.nothing());
      from[root] = like;
      auto got = wire.swap(to, from);
      return mine ? Tensors{} : Tensors{got[root]};
    };
    return {"broadcast", size_of(tensor) + " from " + std::to_string(root), mine ? Tensors{tensor} : Tensors{},
            mine ? Tensors{} : Tensors{tensor}, run};
  }
  Part all_reduce_of(const at::Tensor& tensor, const c10d::ReduceOp& op) {
    auto run = [op](Wire& wire, const Tensors& read) { return Tensors{reduced(wire.from_everyone(read[0]), op)}; };
    return {"all_reduce", size_of(tensor) + ", " + name_of(op), {tensor}, {tensor}, run};
  }
  Part reduce_of(const at::Tensor& tensor, const c10d::ReduceOp& op, int64_t root) {
    bool mine = root == getRank();
    auto run = [op, root, mine](Wire& wire, const Tensors& read) {
      Tensors to(wire.size(), wire.nothing());
      to[root] = read[0];
      auto got = wire.swap(to, Tensors(wire.size(), mine ? read[0] : wire.nothing()));
      return mine ? Tensors{reduced(got, op)} : Tensors{};
    };
    auto about = size_of(tensor) + ", " + name_of(op) + " to " + std::to_string(root);
    return {"reduce", about, {tensor}, mine ? Tensors{tensor} : Tensors{}, run};
  }
  // Its own part is left alone if that is where it comes from.
  Part all_gather_of(const std::string& kind, Tensors outputs, const at::Tensor& input) {
    TORCH_CHECK(int(outputs.size()) == getSize(), "simccl expects ", getSize(), " outputs but got ", outputs.size());
    TORCH_CHECK(outputs[getRank()].numel() == input.numel(), "simccl expects ", size_of(outputs[getRank()]), " but got ", size_of(input));
    auto about = sizes_of(outputs);
    Tensors like;
    for (auto& one : outputs) like.push_back(twin(one));
    auto run = [like](Wire& wire, const Tensors& read) { return wire.swap(Tensors(wire.size(), read[0]), like); };
    if (outputs[getRank()].data_ptr() == input.data_ptr()) outputs[getRank()] = at::Tensor();
    return {kind, about, {input}, std::move(outputs), run};
  }
  Part reduce_scatter_of(const std::string& kind, const at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op) {
    TORCH_CHECK(int(inputs.size()) == getSize(), "simccl expects ", getSize(), " inputs but got ", inputs.size());
    TORCH_CHECK(inputs[getRank()].numel() == output.numel(), "simccl expects ", size_of(inputs[getRank()]), " but got ", size_of(output));
    auto run = [op](Wire& wire, const Tensors& read) {
      return Tensors{reduced(wire.swap(read, Tensors(wire.size(), read[wire.rank()])), op)};
    };
    return {kind, sizes_of(inputs) + ", " + name_of(op), inputs, {output}, run};
  }
  Part all_to_all_of(const std::string& kind, const Tensors& outputs, const Tensors& inputs) {
    Tensors like;
    for (auto& one : outputs) like.push_back(twin(one));
    auto run = [like](Wire& wire, const Tensors& read) { return wire.swap(read, like); };
    return {kind, "", inputs, outputs, run};
  }

  UnderWay broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return issue({broadcast_of(tensors[0], options.rootRank)}, tensors, options.asyncOp, c10d::OpType::BROADCAST);
  }
  UnderWay allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return issue({all_reduce_of(tensors[0], options.reduceOp)}, tensors, options.asyncOp, c10d::OpType::ALLREDUCE);
  }
  UnderWay allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<Part> parts;
    for (auto& one : tensors) parts.push_back(all_reduce_of(one, options.reduceOp));
    return issue(std::move(parts), tensors, options.asyncOp, c10d::OpType::COALESCED);
  }
  UnderWay reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return issue({reduce_of(tensors[0], options.reduceOp, options.rootRank)}, tensors, options.asyncOp, c10d::OpType::REDUCE);
  }
  UnderWay allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return issue({all_gather_of("all_gather", outputs[0], inputs[0])}, outputs[0], options.asyncOp, c10d::OpType::ALLGATHER);
  }
  UnderWay _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return issue({all_gather_of("all_gather_into_tensor", slices(output, getSize()), input)}, {output}, options.asyncOp,
                 c10d::OpType::_ALLGATHER_BASE);
  }
  UnderWay allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Part> parts;
    for (size_t at = 0; at < inputs.size(); ++at)
      parts.push_back(all_gather_of("all_gather_into_tensor", slices(outputs[at], getSize()), inputs[at]));
    return issue(std::move(parts), outputs, options.asyncOp, c10d::OpType::COALESCED);
  }
  UnderWay reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return issue({reduce_scatter_of("reduce_scatter", outputs[0], inputs[0], options.reduceOp)}, outputs, options.asyncOp,
                 c10d::OpType::REDUCE_SCATTER);
  }
  UnderWay _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return issue({reduce_scatter_of("reduce_scatter_tensor", output, slices(input, getSize()), options.reduceOp)}, {output},
                 options.asyncOp, c10d::OpType::_REDUCE_SCATTER_BASE);
  }
  UnderWay reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    std::vector<Part> parts;
    for (size_t at = 0; at < inputs.size(); ++at)
      parts.push_back(reduce_scatter_of("reduce_scatter_tensor", outputs[at], slices(inputs[at], getSize()), options.reduceOp));
    return issue(std::move(parts), outputs, options.asyncOp, c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED);
  }
  UnderWay alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& outputs, std::vector<int64_t>& inputs,
                         const c10d::AllToAllOptions& options) override {
    auto cut = [&](const at::Tensor& whole, std::vector<int64_t>& sizes) {
      if (sizes.empty()) return slices(whole, getSize());
      auto rows = whole.split_with_sizes(sizes);
      return Tensors(rows.begin(), rows.end());
    };
    return issue({all_to_all_of("all_to_all_single", cut(output, outputs), cut(input, inputs))}, {output}, options.asyncOp,
                 c10d::OpType::ALLTOALL_BASE);
  }
  UnderWay alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return issue({all_to_all_of("all_to_all", outputs, inputs)}, outputs, options.asyncOp, c10d::OpType::ALLTOALL);
  }
  UnderWay gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto root = options.rootRank;
    Tensors received = root == getRank() ? outputs[0] : Tensors{}, like;
    for (auto& one : received) like.push_back(twin(one));
    auto run = [root, like](Wire& wire, const Tensors& read) {
      Tensors to(wire.size(), wire.nothing());
      to[root] = read[0];
      auto got = wire.swap(to, like.empty() ? Tensors(wire.size(), wire.nothing()) : like);
      return like.empty() ? Tensors{} : got;
    };
    return issue({{"gather", "to " + std::to_string(root), inputs, received, run}}, received, options.asyncOp, c10d::OpType::GATHER);
  }
  UnderWay scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto root = options.rootRank;
    Tensors sent = root == getRank() ? inputs[0] : Tensors{};
    auto run = [root, like = twin(outputs[0])](Wire& wire, const Tensors& read) {
      Tensors from(wire.size(), wire.nothing());
      from[root] = like;
      return Tensors{wire.swap(read.empty() ? Tensors(wire.size(), wire.nothing()) : read, from)[root]};
    };
    return issue({{"scatter", "from " + std::to_string(root), sent, outputs, run}}, outputs, options.asyncOp, c10d::OpType::SCATTER);
  }
  UnderWay send(Tensors& tensors, int to, int tag) override {
    return issue({{"send", "", tensors, {}, {}, {to, tag, true}}}, tensors, true, c10d::OpType::SEND);
  }
  UnderWay recv(Tensors& tensors, int from, int tag) override {
    return issue({{"recv", "", {}, tensors, {}, {from, tag, false, twin(tensors[0])}}}, tensors, true, c10d::OpType::RECV);
  }
  UnderWay barrier(const c10d::BarrierOptions& options) override {
    c10::DeviceIndex index = options.device_ids.empty() ? -1 : c10::DeviceIndex(options.device_ids[0]);
    auto flag = at::zeros({1}, at::TensorOptions().device(device(index)).dtype(at::kByte));
    Part part = all_reduce_of(flag, c10d::ReduceOp::SUM);
    part.kind = "barrier", part.about = "";
    auto work = issue({part}, {}, options.asyncOp, c10d::OpType::BARRIER);
    auto* ours = static_cast<Work*>(work.get());
    ours->blocks_host = true, ours->kept.push_back(flag);
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<int, std::shared_ptr<Communicator>> communicators_;  // by peer; -1: of all
  std::map<std::pair<int, int>, int> streams_;                  // by device and peer
  std::map<std::string, int64_t> numbers_;                      // of sends, by sender and receiver
  bool collecting_ = false, collected_async_ = false;
  std::vector<Part> collected_;
};

}  // namespace sim
