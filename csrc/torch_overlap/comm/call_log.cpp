#include "torch_overlap/comm/call_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "torch_overlap/base/emitter.h"
#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/hooks.h"
#include "torch_overlap/comm/torch_comm.h"

namespace torch_overlap {
namespace {

std::unique_ptr<Emitter> begin_line(const char* event, const CallRecord& record, int64_t time) {
  auto out = make_json_emitter();
  out->begin_dict();
  out->field("event", event);
  out->field("time_ns", time);
  out->field("comm", record.comm->name);
  out->field("rank", record.comm->rank);
  out->field("id", record.call_id);
  out->field("op", to_string(record.op));
  return out;
}

std::string end_line(Emitter& out) {
  out.end_dict();
  return out.take() + '\n';
}

void add_sizes(Emitter& out, const char* name, const CallRecord::Sizes& sizes) {
  out.key(name);
  out.list(sizes, [&](int64_t size) { out.integer(size); });
}

void describe(Emitter& out, const CallRecord& record) {
  out.field("size", record.comm->ranks_in_world.size());
  out.field("collective_seq", record.collective_seq);
  out.field("p2p_seq", record.p2p_seq);
  out.field("async_op", record.async_op);
  out.field("timeout_ms", record.timeout.count());
  if (record.input) add_sizes(out, "input", *record.input);
  if (record.output) add_sizes(out, "output", *record.output);
  if (record.dtype) out.field("dtype", c10::toString(*record.dtype));
  if (record.root >= 0) out.field("root", record.root);
  if (record.has_reduction()) out.field("reduce_op", to_string(record.reduce_op));
  if (!record.is_p2p()) return;
  out.key("messages");
  out.list(record.messages, [&](const CallRecord::Message& message) {
    out.dict([&] {
      out.field("type", message.is_send ? "send" : "recv");
      out.field("peer", message.peer);
      add_sizes(out, "sizes", message.sizes);
      out.field("dtype", c10::toString(message.dtype));
    });
  });
}

class JsonFormatter final : public LogFormatter {
 public:
  std::string queued(const Call& call, bool has_buffers) override {
    const CallRecord& record = *call.record;
    const auto out = begin_line("Q", record, record.created_ns);
    describe(*out, record);
    if (has_buffers) {
      out->key("buffers");
      out->list(call.tensors(), [&](const at::Tensor& tensor) {
        out->integer(static_cast<int64_t>(reinterpret_cast<intptr_t>(tensor.data_ptr())));
      });
    }
    return end_line(*out);
  }
  std::string started(const CallRecord& record) override {
    return end_line(*begin_line("S", record, record.started_ns().value_or(0)));
  }
  std::string ended(const CallRecord& record) override {
    const int64_t ended = record.ended_ns().value_or(0);
    const auto out = begin_line("E", record, ended);
    out->field("state", to_string(record.state()));
    const int64_t began = record.started_ns().value_or(record.created_ns);
    out->field("duration_ms", static_cast<double>(ended - began) * 1e-6);
    if (const auto error = record.error()) out->field("error", *error);
    return end_line(*out);
  }
};

}  // namespace

std::unique_ptr<LogFormatter> make_json_formatter() { return std::make_unique<JsonFormatter>(); }

std::shared_ptr<CallLog> CallLog::open(const std::string& path,
                                       const std::vector<std::string>& events,
                                       const std::vector<std::string>& verbose, LogFormat format) {
  Events asked;
  for (const std::string& event : events) {
    const bool is_all = event == "ALL" || event == "LIFECYCLE";
    TORCH_OVERLAP_CHECK(
        event == "Q" || event == "S" || event == "E" || is_all || event == "NONE", kValue,
        "clog: expected events among Q, S, E, ALL, LIFECYCLE and NONE, got '", event, "'");
    asked.queued |= event == "Q" || is_all;
    asked.started |= event == "S" || is_all;
    asked.ended |= event == "E" || is_all;
  }
  for (const std::string& what : verbose) {
    TORCH_OVERLAP_CHECK(what == "buffers", kValue, "clog: expected verbose among 'buffers', got '",
                        what, "'");
  }
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  TORCH_OVERLAP_CHECK(file >= 0, kRuntime, "clog: expected a file that can be written, got '", path,
                      "': ", std::strerror(errno));
  return std::shared_ptr<CallLog>(new CallLog(path, file, asked, !verbose.empty(), format));
}

CallLog::CallLog(std::string path, int file, Events events, bool has_buffers, LogFormat format)
    : events_(events),
      has_buffers_(has_buffers),
      formatter_(format == LogFormat::kText ? make_text_formatter() : make_json_formatter()),
      is_immediate_(format == LogFormat::kText),
      lines_(new Lines(std::move(path), file)),
      writer_([lines = lines_] { write(*lines); }) {
  add(formatter_->opened());
  if (is_immediate_) flush();
}

CallLog::~CallLog() {
  if (!process_.is_current()) {
    (void)new std::thread(std::move(writer_));  // the parent's thread: neither join nor detach it
    return;
  }
  {
    std::lock_guard lock(lines_->mutex);
    lines_->is_closing = true;
  }
  lines_->changed.notify_all();
  writer_.join();
  ::close(lines_->file);
}

uint64_t CallLog::attach(TorchComm& comm, const TorchComm* parent) {
  const auto record = [](const TorchComm& of) { return of.membership()->context.record; };
  add(formatter_->attached(*record(comm), parent != nullptr ? record(*parent).get() : nullptr));
  if (is_immediate_) flush();
  return comm.hooks().record.add(
      [self = shared_from_this()](const Call& call) { self->on_queued(call); });
}

void CallLog::on_queued(const Call& call) {
  if (events_.started || events_.ended) call.record->logs.push_back(weak_from_this());
  if (events_.queued) add(formatter_->queued(call, has_buffers_));
  if (is_immediate_) flush();
}

void CallLog::on_started(const CallRecord& record) noexcept {
  if (events_.started) add(formatter_->started(record));
}

void CallLog::on_ended(const CallRecord& record) noexcept {
  if (events_.ended) add(formatter_->ended(record));
}

void CallLog::add(std::string line) noexcept {
  if (line.empty() || !process_.is_current()) return;
  {
    std::lock_guard lock(lines_->mutex);
    lines_->waiting.push_back(std::move(line));
    ++lines_->added;
  }
  lines_->changed.notify_all();
}

void CallLog::flush() {
  if (!process_.is_current()) return;  // the parent writes its own lines
  std::unique_lock lock(lines_->mutex);
  lines_->changed.wait(lock, [&, until = lines_->added] { return lines_->written >= until; });
}

void CallLog::write(Lines& lines) {
  bool has_warned = false;
  std::unique_lock lock(lines.mutex);
  while (true) {
    lines.changed.wait(lock, [&] { return !lines.waiting.empty() || lines.is_closing; });
    if (lines.waiting.empty()) return;
    const auto now = std::exchange(lines.waiting, {});
    lock.unlock();
    std::string text;
    for (const std::string& line : now) text += line;
    // A single write, so that the lines of several processes do not interleave.
    const ssize_t count = ::write(lines.file, text.data(), text.size());
    if (count != static_cast<ssize_t>(text.size()) && !std::exchange(has_warned, true)) {
      std::fprintf(stderr,
                   "[torch_overlap] warning: clog: lines are lost: cannot write to %s: %s\n",
                   lines.path.c_str(), count < 0 ? std::strerror(errno) : "short write");
    }
    lock.lock();
    lines.written += now.size();
    lines.changed.notify_all();
  }
}

}  // namespace torch_overlap
