// Failure and abort of a communicator.
#include <c10/util/Exception.h>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/backends/nccl/backend.h"
#include "torch_overlap/comm/process_abort.h"
#include "torch_overlap/comm/recorder_dump.h"

namespace torch_overlap {
namespace {

constexpr auto kStopTimeout = std::chrono::seconds(10);
constexpr Milliseconds kNotifyTimeout(1000);  // limit for a process that is about to end

}  // namespace

void NcclBackend::fail_launch(const Call& call, bool has_launched) {
  std::string what = "unknown error";
  bool fatal = has_launched;
  bool from_nccl = false;
  try {
    throw;
  } catch (const NcclError& error) {
    what = error.what();
    fatal = has_launched || error.is_fatal();
    from_nccl = true;
  } catch (const c10::Error& error) {
    what = error.what_without_backtrace();
  } catch (const std::exception& error) {
    what = error.what();
  } catch (...) {
  }
  if (!fatal && !from_nccl) throw;
  if (!fatal) fail(ErrorKind::kRuntime, call.describe(), ": ", what);
  const std::string message =
      has_launched ? concat(call.describe(),
                            ": expected to issue all of it, got an error half way, and "
                            "this rank is out of step with its peers; make a new communicator: ",
                            what)
                   : concat(call.describe(), ": ", what);
  runtime_->failure.set(WorkStatus::ERROR,
                        std::make_exception_ptr(Error(ErrorKind::kRuntime, message)));
  std::rethrow_exception(runtime_->failure.error());
}

void NcclBackend::abort() { abort_within_limit(kStopTimeout); }

void NcclBackend::abort_async(bool /*notify_peers*/) { abort_within_limit(Milliseconds(0)); }

void NcclBackend::abort_within_limit(Milliseconds limit) {
  acted_on_failure_ = true;  // done here, and without ending the process
  const std::string message = concat("communicator '", runtime_->name, "' was aborted");
  runtime_->failure.set(WorkStatus::ERROR,
                        std::make_exception_ptr(Error(ErrorKind::kState, message)));
  runtime_->stop_waits();
  remote_.stop();
  handle_->stop(limit);
}

void NcclBackend::fail_with(WorkStatus status, ErrorKind kind, const std::string& message) {
  if (!runtime_->failure.set(status, std::make_exception_ptr(Error(kind, message)))) return;
  act_on_failure();
}

void NcclBackend::act_on_failure(bool is_watchdog) {
  if (!runtime_->failure.is_set()) return;
  const bool ends_process = context_.options.abort_process_on_timeout_or_error;
  if (ends_process && !is_watchdog) return;  // a call can raise it first; the watchdog ends it
  if (acted_on_failure_.exchange(true)) return;
  const std::string message = runtime_->failure.message();
  peers_.publish(message, ends_process ? kNotifyTimeout : Milliseconds(0));
  report_failure(context_.record.get(), message);
  if (ends_process) abort_process(runtime_->failure.status(), message, context_.on_abort);
  TORCH_WARN(message);
  runtime_->stop_waits();
  remote_.stop();
  handle_->stop(Milliseconds(0));
}

}  // namespace torch_overlap
