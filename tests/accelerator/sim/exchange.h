// How the bytes of collectives travel: one thread per communicator, which takes them in order and exchanges with gloo. What it
// delivers is seen only by who is ordered after it (memory.h), so the thread's timing decides nothing.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <condition_variable>
#include <functional>
#include <thread>

#include "launch.h"

namespace sim {

using Tensors = std::vector<at::Tensor>;
at::Tensor twin(const at::Tensor& ours);  // a CPU tensor over the same memory

inline at::Tensor bytes_of(const at::Tensor& dense) {
  return at::from_blob(dense.data_ptr(), {int64_t(dense.nbytes())}, at::kByte);
}

// Gloo, for one thread at a time. Every exchange is an all-to-all, and sums are made here, in the order of the ranks.
struct Wire {
  c10::intrusive_ptr<c10d::Backend> gloo;
  int rank() const { return gloo->getRank(); }
  int size() const { return gloo->getSize(); }

  // `to`: one tensor for each rank. From each rank: one like `from`.
  Tensors swap(const Tensors& to, const Tensors& like) {
    Tensors got;
    for (auto& one : like) got.push_back(at::empty({one.numel()}, one.options().device(at::kCPU)));
    if (size() == 1) {
      got[0].copy_(to[0].view(-1));
      return got;
    }
    Tensors parts;
    std::vector<int64_t> sent, received;
    for (auto& one : to) parts.push_back(bytes_of(one)), sent.push_back(one.nbytes());
    for (auto& one : got) received.push_back(one.nbytes());
    auto outgoing = at::cat(parts), incoming = at::empty({std::accumulate(received.begin(), received.end(), int64_t(0))}, at::kByte);
    if (!outgoing.numel()) outgoing = at::empty({0}, at::kByte);
    gloo->alltoall_base(incoming, outgoing, received, sent)->wait();
    int64_t at = 0;
    for (auto& one : got) bytes_of(one).copy_(incoming.narrow(0, at, one.nbytes())), at += one.nbytes();
    return got;
  }
  Tensors from_everyone(const at::Tensor& mine) { return swap(Tensors(size(), mine), Tensors(size(), mine)); }
  at::Tensor receive(const at::Tensor& like, int from, int tag) {
    Tensors got{at::empty({like.numel()}, like.options())};
    gloo->recv(got, from, tag)->wait();
    return got[0];
  }
  at::Tensor nothing() const { return at::empty({0}, at::kByte); }
};

// As NCCL does it: an average multiplies first, so it does not overflow where its result does not.
inline at::Tensor reduced(const Tensors& parts, const c10d::ReduceOp& op) {
  bool average = op == c10d::ReduceOp::AVG;
  auto scaled = [&](const at::Tensor& part) { return average ? part.mul(1.0 / parts.size()) : part; };
  auto sum = scaled(parts[0]).clone();
  for (size_t at = 1; at < parts.size(); ++at) {
    if (op == c10d::ReduceOp::SUM || average) sum.scalar_type() == at::kBool ? sum.logical_or_(parts[at]) : sum.add_(scaled(parts[at]));
    else if (op == c10d::ReduceOp::MAX) sum = at::maximum(sum, parts[at]);
    else if (op == c10d::ReduceOp::MIN) sum = at::minimum(sum, parts[at]);
    else sum.mul_(parts[at]);
  }
  return sum;
}

struct Peer {  // of a send or receive
  int rank = -1, tag = 0;
  bool sends = false;
  at::Tensor like{};  // what is received
};

// One collective, or one of several that are launched together.
struct Part {
  std::string kind, about;  // the same on all ranks
  Tensors reads, writes;    // undefined: left as it is
  std::function<Tensors(Wire&, const Tensors&)> run;  // what was read -> what is written, on the CPU
  Peer peer{};

  int64_t bytes() const {  // the larger side: a whole that is gathered or scattered
    int64_t in = 0, out = 0;
    for (auto& one : reads) in += one.nbytes();
    for (auto& one : writes) out += one.defined() ? one.nbytes() : in;
    return std::max(in, out);
  }
};

struct Failure {
  std::string text;
  std::atomic<bool> was_told{false};
  explicit Failure(std::string text) : text(std::move(text)) {}
};

struct Job {
  std::vector<Part> parts;
  std::vector<Tensors> read, written;  // by part
  std::string call, line;
  int64_t number = 0;
  bool agreed = true;  // all ranks take part, and say which call it is
  std::shared_ptr<Failure> failure{};
  bool done = false;
  std::mutex mutex{};
  std::condition_variable changed{};

  void finish(std::shared_ptr<Failure> wrong) {
    std::lock_guard<std::mutex> lock(mutex);
    failure = std::move(wrong), done = true;
    changed.notify_all();
  }
  bool has_failed() {
    std::optional<pybind11::gil_scoped_release> released;
    if (PyGILState_Check()) released.emplace();
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return done; });
    return failure != nullptr;
  }
};

struct FromJob final : Delivery {
  std::shared_ptr<Job> job;
  size_t part, output;
  FromJob(std::shared_ptr<Job> of, size_t part, size_t output) : job(std::move(of)), part(part), output(output) {}
  void await() override {
    if (!job->has_failed()) return;
    job->failure->was_told = true;
    C10_THROW_ERROR(DistBackendError, job->failure->text);
  }
  bool was_told_lost() override { return job->has_failed() && job->failure->was_told; }
  const char* bytes() const override { return static_cast<const char*>(job->written[part][output].data_ptr()); }
};

struct Communicator {
  Wire wire;
  std::string name;
  std::mutex mutex{};
  std::condition_variable changed{};
  std::deque<std::shared_ptr<Job>> queue{};
  int64_t count = 0;
  bool closed = false;
  std::shared_ptr<Failure> lost{};  // what went wrong first: nothing goes on after it

  static std::shared_ptr<Communicator> open(Wire wire, const std::string& name) {
    auto made = std::shared_ptr<Communicator>(new Communicator{std::move(wire), name});
    std::thread([made] { made->work(); }).detach();
    return made;
  }
  void push(const std::shared_ptr<Job>& job) {
    std::lock_guard<std::mutex> lock(mutex);
    queue.push_back(job);
    changed.notify_all();
  }
  void close() {
    std::lock_guard<std::mutex> lock(mutex);
    closed = true;
    changed.notify_all();
  }

  void work() {
    c10::InferenceMode guard(false);
    at::NoGradGuard no_grad;
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return closed || !queue.empty(); });
        if (queue.empty()) return;
        job = queue.front();
        queue.pop_front();
      }
      if (!lost) try {
          if (job->agreed && wire.size() > 1) agree(*job);
          run(*job);
        } catch (const std::exception& error) {
          auto* ours = dynamic_cast<const c10::Error*>(&error);
          lost = std::make_shared<Failure>("simccl: " + job->call + "\n    at " + job->line + "\nfailed: " +
                                           (ours ? ours->what_without_backtrace() : error.what()));
        }
      job->finish(lost);
    }
  }

  void run(Job& job) {
    job.written.resize(job.parts.size());
    std::vector<c10::intrusive_ptr<c10d::Work>> sends;
    for (size_t at = 0; at < job.parts.size(); ++at)
      if (auto& peer = job.parts[at].peer; peer.sends) sends.push_back(wire.gloo->send(job.read[at], peer.rank, peer.tag));
    for (size_t at = 0; at < job.parts.size(); ++at)
      if (auto& part = job.parts[at]; part.run) job.written[at] = part.run(wire, job.read[at]);
      else if (part.peer.like.defined()) job.written[at] = {wire.receive(part.peer.like, part.peer.rank, part.peer.tag)};
    for (auto& send : sends) send->wait();
  }

  // With every collective its description travels: the ranks must have called the same one.
  void agree(const Job& job) {
    constexpr int64_t SIZE = 1024;
    auto mine = at::zeros({SIZE}, at::kByte);
    auto* to = static_cast<char*>(mine.data_ptr());
    uint64_t key = std::hash<std::string>()(job.call);
    std::memcpy(to, &key, 8);
    (job.call.substr(0, 500) + "\n      at " + job.line).substr(0, SIZE - 9).copy(to + 8, SIZE - 9);
    auto all = at::empty({wire.size() * SIZE}, at::kByte);
    gloo_allgather(all, mine);
    auto* from = static_cast<const char*>(all.data_ptr());
    std::string shown;
    bool same = true;
    for (int rank = 0; rank < wire.size(); ++rank) {
      same = same && !std::memcmp(from, from + rank * SIZE, 8);
      shown += "\n    rank " + std::to_string(rank) + ": " + (from + rank * SIZE + 8);
    }
    TORCH_CHECK(same, "all ranks must call the same collectives in the same order, but call ", job.number, " of group \"",
                name, "\" is", shown);
  }
  void gloo_allgather(at::Tensor& all, at::Tensor& mine) { wire.gloo->_allgather_base(all, mine)->wait(); }
};

}  // namespace sim
