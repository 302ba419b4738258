#pragma once

#include <memory>
#include <string>

#include "torch_overlap/comm/call_record.h"

namespace torch_overlap {

enum class LogFormat : uint8_t {
  kJson,  // one object per line
  kText,  // torchcomms' format, version 1: fields between "|"
};

// Writes the lines of a CallLog. Each function returns whole lines, or nothing. Threads: any.
class LogFormatter {
 public:
  virtual ~LogFormatter() = default;
  // The first lines of a log.
  virtual std::string opened() { return {}; }
  // The communicator is logged from now on. `parent` is null unless a split made it.
  virtual std::string attached(const CommRecord& comm, const CommRecord* parent) { return {}; }
  virtual std::string queued(const Call& call, bool has_buffers) = 0;
  virtual std::string started(const CallRecord& record) = 0;
  virtual std::string ended(const CallRecord& record) = 0;
};

std::unique_ptr<LogFormatter> make_json_formatter();
std::unique_ptr<LogFormatter> make_text_formatter();

}  // namespace torch_overlap
