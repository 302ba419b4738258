// Writes the text of a trace. Its keys are those of torch/csrc/distributed/c10d/FlightRecorder.hpp;
// readers ignore additional keys that they do not know.
#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>
#include <array>
#include <span>

#include "torch_overlap/base/emitter.h"
#include "torch_overlap/base/strings.h"
#include "torch_overlap/comm/recorder.h"

namespace torch_overlap {
namespace {

// Version of c10d's format that defines these keys.
constexpr const char* kVersion = "2.10";

// Offset of the sequence numbers of point-to-point calls. The analyzer treats neighbouring entries
// with equal numbers as one batch, and compares the numbers of collectives with those of
// point-to-point calls. The offset keeps the two from ever being equal.
constexpr uint64_t kAnalyzerP2pOffset = uint64_t{1} << 32;

// Returns the analyzer's name for a collective; empty if it has none. For lists whose parts differ
// in size, `all_to_all` is the only name for which it compares sums over the ranks instead of
// sizes.
std::string_view analyzer_word(OpName op) {
  switch (op) {
    case OpName::broadcast:
    case OpName::all_reduce:
    case OpName::reduce:
    case OpName::all_gather:
    case OpName::reduce_scatter:
    case OpName::scatter:
    case OpName::gather:
      return to_string(op);
    case OpName::all_reduce_rms_norm:
      return "all_reduce";
    case OpName::gather_single:
      return "gather";
    case OpName::all_gather_single:
      return "_all_gather_base";
    case OpName::reduce_scatter_single:
      return "_reduce_scatter_base";
    case OpName::all_gather_v:
    case OpName::reduce_scatter_v:
    case OpName::all_to_all:
    case OpName::all_to_all_single:
    case OpName::all_to_all_v_single:
      return "all_to_all";
    case OpName::barrier:
      return "all_reduce_barrier";
    default:
      return {};
  }
}

// Prepends the number of ranks to `sizes`: a rank's one tensor goes to, or comes from, every rank.
std::optional<CallRecord::Sizes> times_ranks(const std::optional<CallRecord::Sizes>& sizes,
                                             size_t ranks) {
  if (!sizes) return sizes;
  CallRecord::Sizes out = *sizes;
  out.insert(out.begin(), static_cast<int64_t>(ranks));
  return out;
}

class TraceWriter {
 public:
  TraceWriter(Emitter& out, const FlightRecorder& recorder, const TraceOptions& options)
      : out_(out), recorder_(recorder), options_(options) {
    for (auto& record : recorder.records()) {
      if (belongs(*record->comm) && (options.include_completed || record->is_pending())) {
        records_.push_back(std::move(record));
      }
    }
    // Collected after the records, which keep their communicators alive.
    for (const auto& comm : comm_records()) {
      if (belongs(*comm) && (!options.only_recorded || is_recorded(*comm))) comms_.push_back(comm);
    }
    if (options.include_stacks) symbolize();
  }

  void write() {
    out_.dict([&] {
      out_.field("version", kVersion);
      if (!options_.reason.empty()) out_.field("reason", options_.reason);
      out_.field("time_dumped_ns", now_ns());
      write_comms();
      write_status();
      out_.key("entries");
      out_.list(records_, [&](const CallRecordPtr& record) { write_call(*record); });
    });
  }

 private:
  bool is_for_analyzer() const { return options_.format == TraceFormat::kAnalyzer; }

  bool belongs(const CommRecord& comm) const {
    return options_.all_ranks || comm.thread_rank == options_.thread_rank ||
           (options_.with_process && !comm.thread_rank);
  }

  bool is_recorded(const CommRecord& comm) const {
    return std::any_of(records_.begin(), records_.end(),
                       [&](const CallRecordPtr& record) { return record->comm.get() == &comm; });
  }

  void symbolize() {
    std::vector<torch::CapturedTraceback*> stacks;
    for (const CallRecordPtr& record : records_) {
      if (record->stack) stacks.push_back(record->stack.get());
    }
    if (!stacks.empty()) stacks_ = torch::symbolize(stacks);
  }

  // Returns a name that is unique in the trace: names may be reused after their communicator is
  // destroyed. The newest keeps its name and earlier ones are counted back from it, so that ranks
  // agree on it even if only some of them still hold an earlier one.
  std::string uid(const CommRecord& comm) const {
    int same = 1;
    for (auto other = comms_.rbegin(); other != comms_.rend() && other->get() != &comm; ++other) {
      if ((*other)->name == comm.name && (*other)->thread_rank == comm.thread_rank) ++same;
    }
    return same == 1 ? comm.name : concat(comm.name, "#", same);
  }

  void write_comms() {
    out_.key("pg_config");
    out_.begin_dict();
    for (const auto& comm : comms_) {
      // Ranks that are threads share names, so a trace of all ranks appends the rank.
      out_.key(comm->thread_rank && options_.all_ranks ? concat(uid(*comm), "@", *comm->thread_rank)
                                                       : uid(*comm));
      out_.begin_dict();
      out_.field("name", comm->name);
      out_.field("desc", comm->backend);
      out_.field("ranks", list_string(comm->ranks_in_world));
      out_.field("rank", comm->rank);
      out_.field("collectives", comm->collectives.load(std::memory_order_relaxed));
      out_.field("p2p", comm->p2p.load(std::memory_order_relaxed));
      if (const auto why = comm->failure()) out_.field("failure", *why);
      out_.end_dict();
    }
    out_.end_dict();
  }

  // The last collective of each communicator, by its number in the entries ("pg_id").
  void write_status() {
    out_.key("pg_status");
    out_.begin_dict();
    for (size_t i = 0; i < comms_.size(); ++i) {
      uint64_t started = 0;
      uint64_t completed = 0;
      for (const CallRecordPtr& record : records_) {
        if (record->comm != comms_[i] || !record->is_collective()) continue;
        const bool has_ended = !record->is_pending();
        if (has_ended) completed = std::max(completed, record->collective_seq);
        // Not every backend notices the start.
        if (has_ended || record->started_ns()) started = std::max(started, record->collective_seq);
      }
      out_.key(std::to_string(i));
      out_.begin_dict();
      out_.field("last_enqueued_collective",
                 comms_[i]->collectives.load(std::memory_order_relaxed));
      out_.field("last_started_collective", started);
      out_.field("last_completed_collective", completed);
      out_.end_dict();
    }
    out_.end_dict();
  }

  void write_call(const CallRecord& record) {
    const size_t stack = record.stack ? next_stack_++ : kNoStack;
    if (record.is_p2p()) return write_p2p(record, stack);
    const std::string_view word = analyzer_word(record.op);
    if (word.empty() && is_for_analyzer()) return;
    auto input = record.input;
    auto output = record.output;
    if (is_for_analyzer()) {
      const size_t ranks = record.comm->ranks_in_world.size();
      if (record.op == OpName::all_gather_v) input = times_ranks(input, ranks);
      if (record.op == OpName::reduce_scatter_v) output = times_ranks(output, ranks);
    }
    begin_entry(record, word.empty() ? to_string(record.op) : word);
    write_sizes("input", {&input, 1}, record.dtype);
    write_sizes("output", {&output, 1}, record.dtype);
    end_entry(record, stack);
  }

  // The analyzer represents a batch as its messages, followed by one entry "coalesced". A single
  // message is written as a batch too: otherwise the analyzer expects all ranks to participate in
  // it.
  void write_p2p(const CallRecord& record, size_t stack) {
    if (is_for_analyzer()) {
      for (const auto& message : record.messages) {
        begin_entry(record, message_name(record, message));
        write_messages(record, {&message, 1});
        end_entry(record, stack);
      }
      begin_entry(record, "coalesced");
    } else {
      const bool is_one = record.messages.size() == 1;
      begin_entry(record, is_one ? message_name(record, record.messages.front()) : "coalesced");
      out_.key("messages");
      out_.list(record.messages, [&](const CallRecord::Message& message) {
        out_.dict([&] {
          out_.field("type", message.is_send ? "send" : "recv");
          out_.field("peer", message.peer);
        });
      });
    }
    write_messages(record, record.messages);
    end_entry(record, stack);
  }

  // Returns "send 0->1". The analyzer numbers the members of a group in the order of their world
  // ranks.
  std::string message_name(const CallRecord& record, const CallRecord::Message& message) const {
    const auto& ranks = record.comm->ranks_in_world;
    const auto place = [&ranks, this](int rank) {
      if (!is_for_analyzer()) return static_cast<long>(rank);
      return std::count_if(ranks.begin(), ranks.end(),
                           [&](int other) { return other < ranks.at(rank); });
    };
    const auto me = place(record.comm->rank);
    if (message.peer == kAnySource) return concat("recv ", me, "<-any");
    const auto peer = place(message.peer);
    return message.is_send ? concat("send ", me, "->", peer) : concat("recv ", me, "<-", peer);
  }

  void begin_entry(const CallRecord& record, std::string_view word) {
    const CommRecord& comm = *record.comm;
    const auto which = std::find_if(comms_.begin(), comms_.end(),
                                    [&](const auto& one) { return one.get() == &comm; });
    out_.begin_dict();
    out_.field("record_id", recorder_.record_id(record));
    out_.field("pg_id", which - comms_.begin());
    out_.key("process_group");
    out_.list(std::array{uid(comm), comm.backend},
              [&](const std::string& text) { out_.text(text); });
    out_.field("rank", comm.world_rank());
    out_.field("collective_seq_id", record.collective_seq);
    out_.field("p2p_seq_id", record.p2p_seq + (is_for_analyzer() ? kAnalyzerP2pOffset : 0));
    out_.field("is_p2p", record.is_p2p());
    out_.field("op_id", record.call_id);
    out_.field("op", to_string(record.op));
    out_.field("profiling_name", concat("nccl:", word));  // the analyzer supports no other library
  }

  void write_sizes(std::string_view what, std::span<const std::optional<CallRecord::Sizes>> all,
                   std::optional<c10::ScalarType> dtype) {
    out_.key(concat(what, "_sizes"));
    out_.list(all, [&](const std::optional<CallRecord::Sizes>& sizes) {
      out_.list(sizes.value_or(CallRecord::Sizes{}), [&](int64_t size) { out_.integer(size); });
    });
    out_.key(concat(what, "_dtypes"));
    out_.list(all, [&](const std::optional<CallRecord::Sizes>& sizes) {
      if (sizes && dtype) out_.text(c10::toString(*dtype));
    });
  }

  void write_messages(const CallRecord& record, std::span<const CallRecord::Message> messages) {
    for (const bool is_send : {true, false}) {
      std::vector<std::optional<CallRecord::Sizes>> all;
      for (const auto& message : messages) {
        if (message.is_send == is_send) all.emplace_back(message.sizes);
      }
      write_sizes(is_send ? "input" : "output", all, messages.front().dtype);
    }
  }

  void end_entry(const CallRecord& record, size_t stack) {
    const CallState state = record.state();
    out_.field("state", to_string(state));
    if (state == CallState::kCaptured) out_.field("captured", true);
    if (const auto error = record.error()) out_.field("error", *error);
    out_.field("async_op", record.async_op);
    if (const char* name = record.algorithm()) out_.field("algorithm", std::string_view(name));
    if (record.root >= 0) out_.field("root", record.root);
    if (record.has_reduction()) out_.field("reduce_op", to_string(record.reduce_op));
    out_.field("timeout_ms", record.timeout.count());
    out_.field("time_created_ns", record.created_ns);
    const auto started = record.started_ns();
    const auto ended = record.ended_ns();
    write_time("time_discovered_started_ns", started);
    write_time("time_discovered_completed_ns", ended);
    if (started && ended) out_.field("duration_ms", static_cast<double>(*ended - *started) * 1e-6);
    out_.field("retired", !record.is_pending());
    out_.key("frames");
    out_.begin_list();
    if (stack < stacks_.tracebacks.size()) {
      for (const uint64_t frame : stacks_.tracebacks[stack]) write_frame(stacks_.all_frames[frame]);
    }
    out_.end_list();
    out_.end_dict();
  }

  void write_time(std::string_view name, const std::optional<int64_t>& time) {
    out_.key(name);
    time ? out_.integer(*time) : out_.null();
  }

  void write_frame(const torch::unwind::Frame& frame) {
    out_.dict([&] {
      out_.field("name", frame.funcname);
      out_.field("filename", frame.filename);
      out_.field("line", std::to_string(frame.lineno));
    });
  }

  static constexpr size_t kNoStack = static_cast<size_t>(-1);

  Emitter& out_;
  const FlightRecorder& recorder_;
  const TraceOptions& options_;
  std::vector<std::shared_ptr<const CommRecord>> comms_;
  std::vector<CallRecordPtr> records_;
  torch::SymbolizedTracebacks stacks_;
  size_t next_stack_ = 0;
};

}  // namespace

std::string trace(const FlightRecorder& recorder, const TraceOptions& options) {
  const auto out =
      options.format == TraceFormat::kJson ? make_json_emitter() : make_pickle_emitter();
  TraceWriter(*out, recorder, options).write();
  return out->take();
}

}  // namespace torch_overlap
