#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/comm/call_record.h"

namespace torch_overlap {

struct Hooks;

// A structured log of a communicator's calls: one JSON object per line.
//
//   {"event": "Q", ...}   queued: issued, with everything that describes the call
//   {"event": "S", ...}   started: a thread runs it, or its stream was observed to have reached it
//   {"event": "E", ...}   ended, with its state, error and duration
//
// "comm", "rank" and "id" identify the lines of one call. Calls captured in a CUDA graph have only
// a Q.
//
// A separate thread writes the lines in the order in which they were added, so that file I/O delays
// no operation. The destructor writes the remaining lines.
//
// A fork of the process logs nothing.
//
// Threads: any.
class TORCH_OVERLAP_API CallLog final : public CallObserver,
                                        public std::enable_shared_from_this<CallLog> {
 public:
  // Appends to `path`. `events` may contain Q, S, E, ALL and NONE. `verbose` may contain "buffers",
  // which adds the addresses of the tensors to Q. Throws kValue on any other value, and kRuntime if
  // the file cannot be opened.
  static std::shared_ptr<CallLog> open(const std::string& path,
                                       const std::vector<std::string>& events,
                                       const std::vector<std::string>& verbose = {});
  ~CallLog() override;

  // Logs the calls of a communicator from now on. Returns the id of the hook in hooks.record.
  uint64_t attach(Hooks& hooks);
  // Blocks until all lines added so far are in the file.
  void flush();

  void on_started(const CallRecord& record) noexcept override;
  void on_ended(const CallRecord& record) noexcept override;

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

  CallLog(std::string path, int file, Events events, bool has_buffers);
  void on_queued(const Call& call);
  void add(std::string line) noexcept;
  static void write(Lines& lines);

  const Events events_;
  const bool has_buffers_;
  const ProcessStamp process_;
  const std::shared_ptr<Lines> lines_;
  std::thread writer_;
};

}  // namespace torch_overlap
