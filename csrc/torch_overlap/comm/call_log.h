#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/comm/call_log_format.h"
#include "torch_overlap/comm/call_record.h"

namespace torch_overlap {

class TorchComm;

// A structured log of communicators' calls: one JSON object per line, or torchcomms' text.
//
//   {"event": "Q", ...}   queued: issued, with everything that describes the call
//   {"event": "S", ...}   started: a thread runs it, or its stream was observed to have reached it
//   {"event": "E", ...}   ended, with its state, error and duration
//
// "comm", "rank" and "id" identify the lines of one call. Calls captured in a CUDA graph have only
// a Q.
//
// A separate thread writes the lines in the order in which they were added, so that file I/O delays
// no operation. The destructor writes the remaining lines. Text is for readers that expect the line
// of a call in the file when the call returns, so issuing a call waits for its line.
//
// A fork of the process logs nothing.
//
// Threads: any.
class TORCH_OVERLAP_API CallLog final : public std::enable_shared_from_this<CallLog> {
 public:
  // Appends to `path`. `events` may contain Q, S, E, ALL, LIFECYCLE (the same) and NONE. `verbose`
  // may contain "buffers", which adds the addresses of the tensors to Q. Throws kValue on any other
  // value, and kRuntime if the file cannot be opened.
  static std::shared_ptr<CallLog> open(const std::string& path,
                                       const std::vector<std::string>& events,
                                       const std::vector<std::string>& verbose = {},
                                       LogFormat format = LogFormat::kJson);
  ~CallLog();

  // Logs the calls of a communicator from now on. Returns the id of the hook in hooks().record.
  // `parent`: the communicator of which it is a split.
  uint64_t attach(TorchComm& comm, const TorchComm* parent = nullptr);
  // Blocks until all lines added so far are in the file.
  void flush();

  // Called by the thread that notices the change, which may hold a lock of the communicator: they
  // neither block nor call into a communicator.
  void on_started(const CallRecord& record) noexcept;
  void on_ended(const CallRecord& record) noexcept;

 private:
  struct Events {
    bool queued = false;
    bool started = false;
    bool ended = false;
  };

  // State of the writer, shared with its thread.
  struct Lines {
    Lines(std::string path, int file) : path(std::move(path)), file(file) {}

    const std::string path;
    const int file;
    std::mutex mutex;  // guards all members below
    std::condition_variable changed;
    std::vector<std::string> waiting;
    uint64_t added = 0;
    uint64_t written = 0;
    bool is_closing = false;
  };

  CallLog(std::string path, int file, Events events, bool has_buffers, LogFormat format);
  void on_queued(const Call& call);
  void add(std::string line) noexcept;
  static void write(Lines& lines);

  const Events events_;
  const bool has_buffers_;
  const std::unique_ptr<LogFormatter> formatter_;
  const bool is_immediate_;
  const ProcessStamp process_;
  const std::shared_ptr<Lines> lines_;
  std::thread writer_;
};

}  // namespace torch_overlap
