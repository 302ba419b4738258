#include "torch_overlap/comm/health.h"

#include <torch/csrc/distributed/c10d/control_plane/Handlers.hpp>

#include <algorithm>
#include <exception>
#include <map>
#include <string>
#include <utility>

#include "torch_overlap/base/emitter.h"
#include "torch_overlap/base/strings.h"
#include "torch_overlap/comm/recorder.h"
#include "torch_overlap/comm/recorder_dump.h"

namespace torch_overlap {
namespace {

std::string state_of(const CommHealth& health) {
  if (health.comm->failure()) return "failed";
  if (health.comm->state.load() == CommRecord::State::kAborted) return "aborted";
  const bool is_late = health.oldest && health.oldest_age_seconds * 1e3 >
                                            static_cast<double>(health.oldest->timeout.count());
  return is_late ? "late" : "active";
}

void write(Emitter& out, const CommHealth& health) {
  const CommRecord& comm = *health.comm;
  out.dict([&] {
    out.field("name", comm.name);
    out.field("backend", comm.backend);
    out.field("rank", comm.rank);
    out.field("size", comm.ranks_in_world.size());
    out.field("state", health.state);
    if (const auto why = comm.failure()) out.field("failure", *why);
    out.field("pending", health.pending);
    out.key("oldest_pending");
    if (!health.oldest) return out.null();
    out.dict([&] {
      out.field("op", to_string(health.oldest->op));
      out.field("id", health.oldest->call_id);
      out.field("state", to_string(health.oldest->state()));
      out.field("age_seconds", health.oldest_age_seconds);
      out.field("timeout_seconds", static_cast<double>(health.oldest->timeout.count()) * 1e-3);
    });
  });
}

using Request = c10d::control_plane::Request;
using Response = c10d::control_plane::Response;

void answer(Response& response, int status, std::string text, const char* type = "text/plain") {
  response.setContent(std::move(text), type);
  response.setStatus(status);
}

void answer_json(Response& response, std::string text) {
  answer(response, 200, std::move(text), "application/json");
}

// Registers a query that torch's control plane (torch.distributed.elastic.control_plane) can send
// to a worker.
void handle(const std::string& name, const c10d::control_plane::HandlerFunc& handler) {
  try {
    c10d::control_plane::registerHandler(name, handler);
  } catch (const std::exception&) {  // loaded twice, or torchcomms has it: the first handler stays
  }
}

bool is_healthy() {
  const auto all = health();
  return std::all_of(all.begin(), all.end(),
                     [](const CommHealth& one) { return one.is_healthy(); });
}

std::string process_trace(bool include_completed) {
  return trace(
      FlightRecorder::of_process(),
      {.include_completed = include_completed, .include_stacks = false, .all_ranks = true});
}

// Parameters: includecollectives (default true) and onlyactive (default false).
void answer_trace(const Request& request, Response& response) {
  bool has_collectives = true;
  bool is_only_active = false;
  for (const auto& [name, value] : request.params()) {
    bool* const flag = name == "includecollectives" ? &has_collectives
                       : name == "onlyactive"       ? &is_only_active
                                                    : nullptr;
    if (flag == nullptr || (value != "true" && value != "false")) {
      return answer(response, 400,
                    concat("torchcomms_fr_trace_json: expected includecollectives or onlyactive ",
                           "with true or false, got ", name, "=", value));
    }
    *flag = value == "true";
  }
  if (has_collectives) return answer_json(response, process_trace(!is_only_active));
  answer_json(response, trace(FlightRecorder(0), {.all_ranks = true}));
}

// Writes a dump on another thread.
void answer_dump(const Request& /*request*/, Response& response) {
  if (comm_records().empty()) {
    return answer(response, 503,
                  "torchcomms_fr_dump_file: expected a communicator, got none; make one first");
  }
  dump_trace_async("torchcomms_fr_dump_file");
  answer(response, 200, "Flight recorder dump requested");
}

// The last three have torchcomms' names and answers.
const bool is_registered = [] {
  handle("torch_overlap_health",
         [](const Request&, Response& response) { answer_json(response, health_json()); });
  handle("torch_overlap_flight_recorder", [](const Request&, Response& response) {
    answer_json(response, process_trace(/*include_completed=*/true));
  });
  handle("torchcomms_health_check", [](const Request&, Response& response) {
    answer_json(response, is_healthy() ? R"({"healthy": true})" : R"({"healthy": false})");
  });
  handle("torchcomms_fr_trace_json", &answer_trace);
  handle("torchcomms_fr_dump_file", &answer_dump);
  return true;
}();

}  // namespace

std::vector<CommHealth> health() {
  std::map<const CommRecord*, CommHealth> by_comm;
  const int64_t now = now_ns();
  for (auto& record : FlightRecorder::of_process().records()) {
    if (!record->is_pending()) continue;
    CommHealth& health = by_comm[record->comm.get()];
    ++health.pending;
    const double age = static_cast<double>(now - record->created_ns) * 1e-9;
    if (health.oldest && health.oldest_age_seconds >= age) continue;
    health.oldest_age_seconds = std::max(age, 0.0);
    health.oldest = std::move(record);
  }
  std::vector<CommHealth> all;
  for (auto& comm : comm_records()) {
    if (comm->state.load() == CommRecord::State::kClosed) continue;
    CommHealth& health = by_comm[comm.get()];
    health.comm = comm;
    health.state = state_of(health);
    all.push_back(std::move(health));
  }
  return all;
}

std::string health_json() {
  const auto all = health();
  const auto out = make_json_emitter();
  out->dict([&] {
    out->field("healthy", std::all_of(all.begin(), all.end(),
                                      [](const CommHealth& one) { return one.is_healthy(); }));
    out->key("communicators");
    out->list(all, [&](const CommHealth& one) { write(*out, one); });
  });
  return out->take();
}

}  // namespace torch_overlap
