#include "torch_overlap/base/env.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <limits>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/strings.h"

namespace torch_overlap {
namespace {

std::optional<std::string> text(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

// Returns the name of a variable for errors.
std::string variable(const char* name) { return concat("environment variable ", name); }

std::optional<int> number(const char* name, int max = std::numeric_limits<int>::max()) {
  const auto value = text(name);
  if (!value) return std::nullopt;
  const long long parsed = parse_int(*value, variable(name));
  TORCH_OVERLAP_CHECK(parsed >= 0 && parsed <= max, kValue, variable(name),
                      ": expected a number in [0, ", max, "], got ", *value);
  return static_cast<int>(parsed);
}

bool flag(const char* name, bool otherwise) {
  const auto value = text(name);
  return value ? parse_bool(*value, variable(name)) : otherwise;
}

// Variables in which one family of launchers passes rank and size to a process.
struct LauncherVariables {
  const char* family;
  const char* rank;
  const char* size;
  const char* local_rank;
};

// Order in which they are queried: an explicit setting, then MPI and similar launchers (whose
// variables are set only in processes that they start), then torchrun, then SLURM, whose variables
// are also set in a batch script that calls torchrun.
constexpr std::array<LauncherVariables, 7> kLaunchers{{
    {"torchcomm", "TORCHCOMM_RANK", "TORCHCOMM_SIZE", "LOCAL_RANK"},
    {"mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"mpi", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"},
    {"pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
    {"pals", "PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID"},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"},
    {"slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"},
}};

// Returns true if the method includes this launcher. TORCHCOMM_RANK and TORCHCOMM_SIZE are read
// with every method.
bool is_enabled_by(const LauncherVariables& launcher, const std::string& method) {
  return method == "auto" || method == launcher.family ||
         launcher.family == std::string_view("torchcomm");
}

std::string query_method() {
  const char* const name = "TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD";
  auto method = to_lower(text(name).value_or("auto"));
  bool known = method == "auto";
  for (const LauncherVariables& launcher : kLaunchers) known |= method == launcher.family;
  TORCH_OVERLAP_CHECK(known, kValue, variable(name),
                      ": expected auto, torchrun, mpi, pmi, pals or slurm, got '", method, "'");
  return method;
}

Launcher read_launcher(const LauncherVariables& from) {
  const auto rank = number(from.rank);
  const auto size = number(from.size);
  TORCH_OVERLAP_CHECK(rank && size, kValue, "new_comm: expected both ", from.rank, " and ",
                      from.size, " in the environment, got only ", rank ? from.rank : from.size,
                      "=", rank ? *rank : *size, "; set the other one, or pass rank= and size=");
  TORCH_OVERLAP_CHECK(*rank < *size, kValue, "new_comm: expected ", from.rank, " in [0, ",
                      from.size, ") in the environment, got ", from.rank, "=", *rank, " and ",
                      from.size, "=", *size);
  return {from.family, *rank, *size, number(from.local_rank)};
}

// Returns the first host of a SLURM node list: "gpu[003-007,9],cpu1" -> "gpu003",
// "rack[0-1]n[2,4]-ib" -> "rack0n2-ib".
std::string first_slurm_host(const std::string& list) {
  std::string host;
  for (size_t i = 0; i < list.size() && list[i] != ','; ++i) {
    if (list[i] != '[') {
      host += list[i];
      continue;
    }
    host += list.substr(i + 1, list.find_first_of(",-]", i) - i - 1);
    i = std::min(list.find(']', i), list.size());
  }
  return host;
}

}  // namespace

// --- Defaults of a new communicator --------------------------------------------------------------

bool Env::abort_on_error() { return flag("TORCHCOMM_ABORT_ON_ERROR", true); }

std::chrono::milliseconds Env::timeout() {
  const char* const name = "TORCHCOMM_TIMEOUT_SECONDS";
  const auto value = text(name);
  if (!value) return std::chrono::seconds(600);
  const double seconds = parse_double(*value, variable(name));
  TORCH_OVERLAP_CHECK(seconds > 0, kValue, variable(name), ": expected a number > 0, got ", *value);
  constexpr double kMaxSeconds = 365 * 24 * 3600.0;  // longer ones overflow when added to a clock
  return std::chrono::milliseconds(std::llround(std::ceil(std::min(seconds, kMaxSeconds) * 1000)));
}

bool Env::check_mismatch() { return flag("TORCH_OVERLAP_CHECK_MISMATCH", false); }

std::chrono::milliseconds Env::health_check_wait() {
  return std::chrono::milliseconds(number("TORCHCOMM_HEALTH_CHECK_WAIT_MS").value_or(0));
}

// --- Rank and size -------------------------------------------------------------------------------

std::optional<Launcher> Env::launcher() {
  const auto method = query_method();
  for (const LauncherVariables& launcher : kLaunchers) {
    if (!is_enabled_by(launcher, method)) continue;
    if (text(launcher.rank) || text(launcher.size)) return read_launcher(launcher);
  }
  return std::nullopt;
}

std::optional<Launcher> Env::launcher_if_valid() noexcept {
  try {
    return launcher();
  } catch (const Error&) {
    return std::nullopt;
  }
}

// --- Store ---------------------------------------------------------------------------------------

std::optional<std::string> Env::master_addr() {
  if (auto address = text("MASTER_ADDR")) return address;
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}) {
    if (const auto list = text(name)) return first_slurm_host(*list);
  }
  return std::nullopt;
}

int Env::master_port() { return number("MASTER_PORT", 65535).value_or(29500); }

bool Env::agent_store() {
  return to_lower(text("TORCHELASTIC_USE_AGENT_STORE").value_or("false")) == "true";
}

std::string Env::run_id() { return text("TORCHELASTIC_RUN_ID").value_or(""); }

std::string Env::restart_count() { return text("TORCHELASTIC_RESTART_COUNT").value_or("0"); }

// --- Backends ------------------------------------------------------------------------------------

std::optional<std::string> Env::gloo_hostname() { return text("TORCHCOMM_GLOO_HOSTNAME"); }

std::optional<std::string> Env::gloo_interface() { return text("TORCHCOMM_GLOO_INTERFACE"); }

std::string Env::unique_id_exchange() {
  const char* const name = "TORCHCOMM_NCCL_BOOTSTRAP_UNIQUEID_EXCHANGE_METHOD";
  auto method = to_lower(text(name).value_or("auto"));
  TORCH_OVERLAP_CHECK(method == "auto" || method == "tcpstore", kValue, variable(name),
                      ": expected auto or tcpstore, got '", method, "'");
  return method;
}

bool Env::graph_timeouts() { return flag("TORCHCOMM_NCCLX_GRAPH_TIMEOUT_MONITORING", false); }

bool Env::is_nvls_enabled() { return text("NCCL_NVLS_ENABLE").value_or("") != "0"; }

bool Env::is_graph_register_enabled() { return text("NCCL_GRAPH_REGISTER").value_or("") != "0"; }

std::string Env::custom_collectives() {
  return text("TORCH_OVERLAP_CUSTOM_COLLECTIVES").value_or("auto");
}

std::string Env::serialization() {
  return to_lower(text("TORCHCOMMS_SERIALIZATION").value_or("torch_save"));
}

// --- Flight recorder -----------------------------------------------------------------------------

int Env::recorder_size() { return number("TORCHCOMM_FR_BUFFER_SIZE", 1 << 24).value_or(2048); }

std::string Env::recorder_file() {
  return text("TORCHCOMM_FR_DUMP_TEMP_FILE").value_or(kRecorderFile);
}

bool Env::recorder_cpp_stack() { return flag("TORCHCOMM_FR_CPP_STACK", false); }

bool Env::recorder_python_stack() { return flag("TORCHCOMM_FR_PYTHON_STACK", false); }

std::optional<int> Env::recorder_signal() {
  const char* const name = "TORCHCOMM_FR_DUMP_SIGNAL";
  const auto value = text(name);
  if (!value) return std::nullopt;
  if (*value == "SIGUSR1") return SIGUSR1;
  if (*value == "SIGUSR2") return SIGUSR2;
  const auto parsed = parse_int(*value, variable(name));
  const bool is_catchable =
      parsed > 0 && parsed <= SIGRTMAX && parsed != SIGKILL && parsed != SIGSTOP;
  TORCH_OVERLAP_CHECK(is_catchable, kValue, variable(name),
                      ": expected SIGUSR1, SIGUSR2 or the number of a signal that can be caught, "
                      "got ",
                      *value);
  return static_cast<int>(parsed);
}

bool Env::recorder_dynamic_file() { return flag("TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME", false); }

// --- Overlapped operators ------------------------------------------------------------------------

bool Env::log_chunks() { return flag("TORCH_OVERLAP_LOG_CHUNKS", false); }

std::optional<std::string> Env::tune_cache() {
  const char* const file = std::getenv("TORCH_OVERLAP_TUNE_CACHE");
  if (file != nullptr) return *file == '\0' ? std::nullopt : std::optional<std::string>(file);
  const std::string name = "torch_overlap/tune.json";
  // The XDG specification ignores a relative path.
  const auto cache = text("XDG_CACHE_HOME");
  if (cache && cache->front() == '/') return concat(*cache, "/", name);
  const auto home = text("HOME");
  return home ? std::optional(concat(*home, "/.cache/", name)) : std::nullopt;
}

}  // namespace torch_overlap
