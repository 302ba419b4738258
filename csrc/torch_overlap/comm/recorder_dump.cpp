#include "torch_overlap/comm/recorder_dump.h"

#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>

#include "torch_overlap/base/env.h"
#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/comm/recorder.h"
#include "torch_overlap/comm/shutdown.h"

namespace torch_overlap {
namespace {

constexpr std::string_view kJsonSuffix = ".json";

// --- Files ---------------------------------------------------------------------------------------

[[noreturn]] void fail_to_write(const std::string& path, int error) {
  fail(ErrorKind::kRuntime, "flight_recorder.dump: expected to write ", path, ", got ",
       std::strerror(error), "; set TORCHCOMM_FR_DUMP_TEMP_FILE to a folder that takes files");
}

int write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(file, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    text.remove_prefix(static_cast<size_t>(written));
  }
  return 0;
}

// Writes a file under a temporary name and renames it. That name must not look like a trace's:
// readers of the folder, during or after the death of a process, take all files that do.
void write_file(const std::string& path, std::string_view text) {
  static std::atomic<int> count{0};
  const size_t slash = path.find_last_of('/');
  const std::string folder = slash == std::string::npos ? "" : path.substr(0, slash + 1);
  const std::string draft = concat(folder, ".dump.", ::getpid(), ".", count.fetch_add(1), ".tmp");
  const int file =
      ::open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (file < 0) fail_to_write(path, errno);
  int error = write_all(file, text);
  // Some file systems report a full disk only here.
  if (::close(file) != 0 && error == 0) error = errno;
  if (error == 0 && ::rename(draft.c_str(), path.c_str()) != 0) error = errno;
  if (error == 0) return;
  ::unlink(draft.c_str());
  fail_to_write(path, error);
}

// Destination of dumps without a path. A dump in the background does not read the environment,
// because the program may be changing it.
struct Target {
  std::string prefix;
  std::optional<int> launcher_rank;

  static Target read() {
    const auto launcher = Env::launcher_if_valid();
    return {Env::recorder_file(), launcher ? std::optional(launcher->rank) : std::nullopt};
  }
};

struct Prepared {
  ForkSafeMutex mutex;
  Target target{.prefix = Env::kRecorderFile, .launcher_rank = std::nullopt};
  bool is_dynamic = false;
};

Prepared& prepared() { return LeakySingleton<Prepared>::get(); }

Target prepared_target() {
  std::lock_guard lock(prepared().mutex);
  return prepared().is_dynamic ? Target::read() : prepared().target;
}

// Returns the rank of the process: its launcher's, otherwise that of the most recent communicator.
int process_rank(const Target& target) {
  if (target.launcher_rank) return *target.launcher_rank;
  int rank = 0;
  for (const auto& comm : comm_records()) {
    if (!comm->thread_rank) rank = comm->world_rank();
  }
  return rank;
}

std::vector<std::string> write_traces(const Target& target, const std::optional<std::string>& path,
                                      const std::string& reason, bool include_stacks) {
  const FlightRecorder& recorder = FlightRecorder::of_process();
  TraceOptions options{.include_stacks = include_stacks, .reason = reason};
  if (path && path->ends_with(kJsonSuffix)) {
    options.all_ranks = true;
    write_file(*path, trace(recorder, options));
    return {*path};
  }
  options.format = TraceFormat::kAnalyzer;
  std::set<std::optional<int>> ranks;  // several traces if ranks are threads
  for (const auto& comm : comm_records()) ranks.insert(comm->thread_rank);
  const int own_rank = process_rank(target);
  if (ranks.empty()) ranks.insert(std::nullopt);
  if (ranks.count(own_rank) > 0) ranks.erase(std::nullopt);  // both would write the same file
  std::vector<std::string> written;
  for (const auto& rank : ranks) {
    options.thread_rank = rank;
    options.with_process = rank == own_rank;
    const bool is_whole_name = path && !rank;
    const std::string prefix = path.value_or(target.prefix);
    written.push_back(is_whole_name ? prefix : concat(prefix, rank.value_or(own_rank)));
    write_file(written.back(), trace(recorder, options));
  }
  return written;
}

// --- The thread ----------------------------------------------------------------------------------

// Dumps on request, on a separate thread: the requester may hold locks, may be in a signal handler,
// or must notify its peers of a failure instead of waiting for a slow disk. Never destroyed.
class Dumper {
 public:
  // A child of fork() does not inherit its parent's thread; it gets its own dumper.
  static Dumper& instance() {
    auto& current = LeakySingleton<Current>::get();
    const std::lock_guard lock(current.mutex);
    Dumper*& dumper = current.dumper;
    if (dumper == nullptr || !dumper->is_of_this_process()) dumper = new Dumper;
    return *dumper;
  }

  void request(const std::string& reason) {
    {
      std::lock_guard lock(mutex_);
      if (!reason_.empty()) reason_ += "; ";
      reason_ += reason;
      ++requested_;
    }
    wake();
  }

  void wait(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    done_changed_.wait_for(lock, limit, [this, until = requested_] { return done_ >= until; });
  }

  // Async-signal-safe.
  void request_in_handler(int signal) noexcept {
    signal_.store(signal, std::memory_order_relaxed);
    wake();
  }
  bool is_of_this_process() const noexcept { return pid_ == ::getpid(); }

 private:
  struct Current {
    ForkSafeMutex mutex;
    Dumper* dumper = nullptr;
  };

  Dumper() : pid_(::getpid()) {
    ::sem_init(&awake_, /*pshared=*/0, /*value=*/0);
    sigset_t all;
    sigset_t before;
    sigfillset(&all);  // leave the program's signals to the program's threads
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread([this] { run(); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void wake() noexcept { ::sem_post(&awake_); }

  void run() {
    while (true) {
      while (::sem_wait(&awake_) != 0) {
      }
      std::string reason;
      uint64_t ticket = 0;
      {
        std::lock_guard lock(mutex_);
        reason = std::exchange(reason_, {});
        ticket = requested_;
      }
      if (const int signal = signal_.exchange(0, std::memory_order_relaxed)) {
        reason = concat("signal ", signal, reason.empty() ? "" : "; ", reason);
      }
      if (!reason.empty()) dump(reason);
      std::lock_guard lock(mutex_);
      done_ = ticket;
      done_changed_.notify_all();
    }
  }

  static void dump(const std::string& reason) noexcept {
    try {
      const Target target = prepared_target();
      const auto files = write_traces(target, std::nullopt, reason, /*include_stacks=*/false);
      std::fprintf(stderr, "[torch_overlap] flight recorder: wrote %s (%s)\n",
                   list_string(files).c_str(), reason.c_str());
      // Write again with stacks, if there are any. Stacks come second because they may need
      // Python's lock, which may be what hangs. A process that ends waits for this, or goes
      // without.
      const Permit permit;
      if (!permit) return;
      for (const auto& record : FlightRecorder::of_process().records()) {
        if (!record->stack) continue;
        write_traces(target, std::nullopt, reason, /*include_stacks=*/true);
        break;
      }
    } catch (const std::exception& error) {
      static std::atomic<bool> has_warned{false};
      if (has_warned.exchange(true)) return;
      std::fprintf(stderr, "[torch_overlap] warning: %s\n", error.what());
    }
  }

  const pid_t pid_;
  sem_t awake_;
  std::atomic<int> signal_{0};
  std::mutex mutex_;  // guards all members below
  std::condition_variable done_changed_;
  std::string reason_;
  uint64_t requested_ = 0;
  uint64_t done_ = 0;
};

// --- The signal ----------------------------------------------------------------------------------

std::atomic<Dumper*> dumper_of_handler{nullptr};
constexpr size_t kSignals = 65;
std::array<struct sigaction, kSignals> actions_before{};  // by signal; set before ours
std::array<std::atomic<long>, kSignals> thread_in_handler{};

struct Handlers {
  ForkSafeMutex mutex;  // serializes the installation
};

void on_signal(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  Dumper* const dumper = dumper_of_handler.load();
  if (dumper != nullptr && dumper->is_of_this_process()) dumper->request_in_handler(signal);
  // The previous handler may forward the signal to this one, if it was installed between two calls
  // of dump_trace_on_signal(). The recursion ends here.
  auto& thread = thread_in_handler[signal];
  const long self = ::syscall(SYS_gettid);
  if (thread.exchange(self) == self) return;
  const struct sigaction& before = actions_before[signal];
  if ((before.sa_flags & SA_SIGINFO) != 0) {
    if (before.sa_sigaction != nullptr) before.sa_sigaction(signal, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(signal);
  }
  long left = self;  // not cleared if another thread has entered meanwhile
  thread.compare_exchange_strong(left, 0);
  errno = error;
}

}  // namespace

std::vector<std::string> dump_trace(const std::optional<std::string>& path,
                                    const std::string& reason) {
  TORCH_OVERLAP_CHECK(!path || !path->empty(), kValue,
                      "flight_recorder.dump: expected a path that is not empty, got ''");
  return write_traces(Target::read(), path, reason, /*include_stacks=*/true);
}

std::string dump_trace_of(const FlightRecorder& recorder, int rank, bool include_completed) {
  TraceOptions options{.format = TraceFormat::kAnalyzer,
                       .include_completed = include_completed,
                       .only_recorded = true};
  for (const auto& record : recorder.records()) {
    if (record->comm->thread_rank) options.thread_rank = rank;
  }
  // A name that is read at the dump is the whole name, as in torchcomms.
  std::string path =
      Env::recorder_dynamic_file() ? Env::recorder_file() : concat(Env::recorder_file(), rank);
  write_file(path, trace(recorder, options));
  return path;
}

void dump_trace_async(const std::string& reason) noexcept {
  try {
    if (FlightRecorder::of_process().is_enabled()) Dumper::instance().request(reason);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[torch_overlap] warning: flight recorder: %s\n", error.what());
  }
}

void wait_for_dumps(std::chrono::milliseconds limit) noexcept {
  try {
    if (FlightRecorder::of_process().is_enabled()) Dumper::instance().wait(limit);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[torch_overlap] warning: flight recorder: %s\n", error.what());
  }
}

void report_failure(CommRecord* comm, const std::string& why) noexcept {
  if (comm != nullptr) comm->failed(why);
  dump_trace_async(why);
}

void dump_trace_on_signal(int signal) {
  TORCH_OVERLAP_CHECK(signal > 0 && signal < static_cast<int>(actions_before.size()), kValue,
                      "flight_recorder.dump_on_signal: expected the number of a signal, got ",
                      signal);
  const std::lock_guard lock(LeakySingleton<Handlers>::get().mutex);
  dumper_of_handler.store(&Dumper::instance());
  struct sigaction current{};
  struct sigaction ours{};
  ours.sa_sigaction = &on_signal;
  // With SA_NODEFER a forwarded signal is delivered at once, while thread_in_handler identifies it.
  ours.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  if (::sigaction(signal, nullptr, &current) == 0) {
    const bool is_ours = (current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == &on_signal;
    if (is_ours) return;
    actions_before[signal] = current;
    if (::sigaction(signal, &ours, nullptr) == 0) return;
  }
  fail(ErrorKind::kValue,
       "flight_recorder.dump_on_signal: expected a signal that can be caught, "
       "got ",
       signal, ": ", std::strerror(errno));
}

void prepare_dumps(const Env& env) {
  {
    std::lock_guard lock(prepared().mutex);
    prepared().target = Target::read();
    prepared().is_dynamic = env.recorder_dynamic_file();
  }
  static std::once_flag once;
  std::call_once(once, [&env] {
    // These are read when the first call is recorded; parsing them here reports an invalid value
    // early.
    (void)env.recorder_size();
    (void)env.recorder_cpp_stack();
    (void)env.recorder_python_stack();
    if (const auto signal = env.recorder_signal()) dump_trace_on_signal(*signal);
  });
}

}  // namespace torch_overlap
