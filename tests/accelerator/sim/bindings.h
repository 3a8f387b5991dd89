// What Python sees of the simulation (simulated.py).
#pragma once
#include "process_group.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  namespace py = pybind11;
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.attr("device_count") = int(COUNT);
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](int index) { Guard().setDevice(device(index)); });
  m.def("default_generator", [](int index) { return Hooks().getDefaultGenerator(index); });
  m.def("process_group", [](const c10::intrusive_ptr<c10d::Backend>& gloo) {
    return c10::static_intrusive_pointer_cast<c10d::Backend>(c10::make_intrusive<ProcessGroup>(gloo));
  });
  m.def("set_folders", [](const std::string& torch, const std::string& own) { lines.torch_folder = torch, lines.own_file = own; });

  m.def("seed", [](int seed) { streams.polls = seed % 4; });
  m.def("detect_races", [](bool on) { return std::exchange(detector.on, on); });
  m.def("check", [] {  // everything that was launched, also on streams that nobody waited for
    Clock all;
    {
      Locked lock(state);
      for (auto& stream : streams.all) all.merge(stream.clock);
    }
    py::gil_scoped_release released;
    memory.bring_in_all(all, true);
  });
  m.def("host_reads", [](size_t since) {
    Locked lock(state);
    std::vector<std::tuple<std::string, std::string, std::string>> found;
    for (size_t at = since; at < host_reads.size(); ++at)
      found.emplace_back(host_reads[at].kind, lines[host_reads[at].line].outside, lines[host_reads[at].line].innermost);
    return found;
  });
  m.def("host_read_count", [] { return host_reads.size(); });
  m.def("early_frees", [](size_t since) {
    Locked lock(state);
    std::vector<std::tuple<std::string, std::string, std::string, std::string>> found;
    for (size_t at = since; at < early_frees.size(); ++at) {
      auto& one = early_frees[at];
      found.emplace_back(one.stream, lines[one.made_at].outside, one.use, lines[one.freed_at].outside);
    }
    return found;
  });
  m.def("early_free_count", [] { return early_frees.size(); });
  m.def("begin_capture", [] {
    Locked lock(state);
    streams.begin_capture(current_stream(device(-1)));
  });
  m.def("is_capturing", [] {
    Locked lock(state);
    return capture.number && current_stream(device(-1)).capture == capture.number;
  });
  m.def("end_capture", [] {
    Locked lock(state);
    return streams.end_capture(current_stream(device(-1)));
  });
  m.def("launched", [] { return launched; });
  m.def("usage", [](int index) {
    auto& used = memory.usage[device(index).index()];
    return std::map<std::string, int64_t>{{"current", used.current}, {"peak", used.peak}, {"reserved", used.reserved},
                                          {"held", used.held}, {"count", used.count}, {"reused", used.reused}};
  });
  m.def("reset_peak", [](int index) { memory.resetPeakStats(index); });
  m.def("trace", [](bool on) { return std::exchange(trace.on, on); });
  m.def("mark", [](const std::string& name) {
    Locked lock(state);
    trace.add({"mark", {}, name});
  });
  m.def("trace_size", [] { return trace.entries.size(); });
  m.def("clear_trace", [] { trace.entries.clear(); });
  m.def("trace_since", [](size_t since) {
    Locked lock(state);
    std::vector<std::tuple<std::string, int, uint64_t, std::string, int64_t, std::string, std::string, int64_t>> all;
    for (size_t at = since; at < trace.entries.size(); ++at) {
      auto& one = trace.entries[at];
      all.emplace_back(one.kind, one.point.stream, one.point.number, one.name, one.bytes, lines[one.line].outside, one.group, one.number);
    }
    return all;
  });
  m.def("stream_names", [] {
    std::vector<std::pair<int, std::string>> all;
    for (auto& stream : streams.all) all.emplace_back(int(stream.device), stream.name);
    return all;
  });
}
