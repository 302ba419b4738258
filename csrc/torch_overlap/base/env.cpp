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

std::optional<int> number(const char* name, int most = std::numeric_limits<int>::max()) {
  const auto value = text(name);
  if (!value) return std::nullopt;
  const long long parsed = parse_int(*value, name);
  TORCH_OVERLAP_CHECK(parsed >= 0 && parsed <= most, kValue, name, ": expected a number in [0, ",
                      most, "], got ", *value);
  return static_cast<int>(parsed);
}

// The variables in which one family of launchers tells a process who it is.
struct Launcher {
  const char* family;
  const char* rank;
  const char* size;
  const char* local_rank;
};

// In the order in which they are asked: an explicit setting, then MPI and friends (whose variables
// are set only below their own launcher), then torchrun, then SLURM, whose variables are also set
// in a batch script that calls torchrun.
constexpr std::array<Launcher, 7> kLaunchers{{
    {"torchcomm", "TORCHCOMM_RANK", "TORCHCOMM_SIZE", "LOCAL_RANK"},
    {"mpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"mpi", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"},
    {"pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
    {"pals", "PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID"},
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"},
    {"slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"},
}};

void read_rank_and_size(Env& env, const std::string& method) {
  for (const Launcher& launcher : kLaunchers) {
    const bool asked = method == "auto" || method == launcher.family ||
                       std::string(launcher.family) == "torchcomm";
    if (!asked) continue;
    auto rank = number(launcher.rank);
    auto size = number(launcher.size);
    if (!rank && !size) continue;
    TORCH_OVERLAP_CHECK(rank && size, kValue, "new_comm: expected both ", launcher.rank, " and ",
                        launcher.size, " in the environment, got only ",
                        rank ? launcher.rank : launcher.size);
    TORCH_OVERLAP_CHECK(*size > 0 && *rank >= 0 && *rank < *size, kValue, "new_comm: expected ",
                        launcher.rank, " in [0, ", launcher.size, "), got ", *rank, " of ", *size);
    env.rank = rank;
    env.size = size;
    env.local_rank = number(launcher.local_rank);
    env.launcher = launcher.family;
    return;
  }
}

// "gpu[003-007,9],cpu1" -> "gpu003", "rack[0-1]n[2,4]-ib" -> "rack0n2-ib": the first host of a
// SLURM node list.
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

bool flag(const char* name, bool otherwise) {
  const auto value = text(name);
  return value ? parse_bool(*value, name) : otherwise;
}

std::optional<int> signal_number(const char* name) {
  const auto value = text(name);
  if (!value) return std::nullopt;
  if (*value == "SIGUSR1") return SIGUSR1;
  if (*value == "SIGUSR2") return SIGUSR2;
  const auto parsed = parse_int(*value, name);
  const bool is_catchable =
      parsed > 0 && parsed <= SIGRTMAX && parsed != SIGKILL && parsed != SIGSTOP;
  TORCH_OVERLAP_CHECK(is_catchable, kValue, name,
                      ": expected SIGUSR1, SIGUSR2 or the number of a signal that can be caught, "
                      "got ",
                      *value);
  return static_cast<int>(parsed);
}

void read_recorder(Env& env) {
  env.recorder_size = number("TORCHCOMM_FR_BUFFER_SIZE", 1 << 24).value_or(env.recorder_size);
  env.recorder_file = text("TORCHCOMM_FR_DUMP_TEMP_FILE").value_or(env.recorder_file);
  env.recorder_cpp_stack = flag("TORCHCOMM_FR_CPP_STACK", env.recorder_cpp_stack);
  env.recorder_python_stack = flag("TORCHCOMM_FR_PYTHON_STACK", env.recorder_python_stack);
  env.recorder_dynamic_file =
      flag("TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME", env.recorder_dynamic_file);
  env.recorder_signal = signal_number("TORCHCOMM_FR_DUMP_SIGNAL");
}

void read_overlap(Env& env) { env.log_chunks = flag("TORCH_OVERLAP_LOG_CHUNKS", env.log_chunks); }

}  // namespace

std::optional<std::string> Env::tune_cache() { return text("TORCH_OVERLAP_TUNE_CACHE"); }

Env Env::read() {
  Env env;
  env.abort_on_error = flag("TORCHCOMM_ABORT_ON_ERROR", env.abort_on_error);
  if (auto value = text("TORCHCOMM_TIMEOUT_SECONDS")) {
    const double seconds = parse_double(*value, "TORCHCOMM_TIMEOUT_SECONDS");
    TORCH_OVERLAP_CHECK(seconds > 0, kValue,
                        "TORCHCOMM_TIMEOUT_SECONDS: expected a number > 0, got ", *value);
    constexpr double kLongest = 365 * 24 * 3600.0;  // longer ones overflow when added to a clock
    env.timeout =
        std::chrono::milliseconds(std::llround(std::ceil(std::min(seconds, kLongest) * 1000)));
  }
  if (auto value = text("TORCH_OVERLAP_CHECK_MISMATCH")) {
    env.check_mismatch = parse_bool(*value, "TORCH_OVERLAP_CHECK_MISMATCH");
  }
  if (auto value = number("TORCHCOMM_HEALTH_CHECK_WAIT_MS")) {
    env.health_check_wait = std::chrono::milliseconds(*value);
  }
  const auto method = to_lower(text("TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD").value_or("auto"));
  bool known = method == "auto";
  for (const Launcher& launcher : kLaunchers) known = known || method == launcher.family;
  TORCH_OVERLAP_CHECK(known, kValue,
                      "TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD: expected auto, torchrun, mpi, "
                      "pmi, pals or slurm, got '",
                      method, "'");
  read_rank_and_size(env, method);

  env.master_addr = text("MASTER_ADDR");
  if (!env.master_addr) {
    for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}) {
      if (auto list = text(name)) {
        env.master_addr = first_slurm_host(*list);
        break;
      }
    }
  }
  env.master_port = number("MASTER_PORT", 65535).value_or(env.master_port);
  env.agent_store = to_lower(text("TORCHELASTIC_USE_AGENT_STORE").value_or("false")) == "true";
  env.run_id = text("TORCHELASTIC_RUN_ID").value_or("");
  env.restart_count = text("TORCHELASTIC_RESTART_COUNT").value_or("0");

  if (auto value = text("TORCHCOMM_NCCLX_GRAPH_TIMEOUT_MONITORING")) {
    env.graph_timeouts = parse_bool(*value, "TORCHCOMM_NCCLX_GRAPH_TIMEOUT_MONITORING");
  }
  env.may_nvls = text("NCCL_NVLS_ENABLE").value_or("") != "0";
  env.maps_in_captures = text("NCCL_GRAPH_REGISTER").value_or("") != "0";
  env.direct_collectives =
      text("TORCH_OVERLAP_DIRECT_COLLECTIVES").value_or(env.direct_collectives);
  env.gloo_hostname = text("TORCHCOMM_GLOO_HOSTNAME");
  env.gloo_interface = text("TORCHCOMM_GLOO_INTERFACE");
  env.unique_id_exchange =
      to_lower(text("TORCHCOMM_NCCL_BOOTSTRAP_UNIQUEID_EXCHANGE_METHOD").value_or("auto"));
  TORCH_OVERLAP_CHECK(env.unique_id_exchange == "auto" || env.unique_id_exchange == "tcpstore",
                      kValue,
                      "TORCHCOMM_NCCL_BOOTSTRAP_UNIQUEID_EXCHANGE_METHOD: expected auto or "
                      "tcpstore, got '",
                      env.unique_id_exchange, "'");
  env.serialization = to_lower(text("TORCHCOMMS_SERIALIZATION").value_or("torch_save"));
  read_recorder(env);
  read_overlap(env);
  return env;
}

}  // namespace torch_overlap
