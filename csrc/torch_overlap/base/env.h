#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Rank and size, and the family of variables that define them: torchcomm, mpi, pmi, pals, torchrun
// or slurm.
struct Launcher {
  std::string family;
  int rank = 0;
  int size = 1;
  std::optional<int> local_rank;
};

// All environment variables that the library reads. No other code reads one.
//
// Each function reads only its own variables, and reads them when it is called. A variable that a
// call does not need cannot make it fail, and a test or a launcher may change one between two
// communicators. A value that cannot be parsed is a kValue error that names the variable.
class TORCH_OVERLAP_API Env {
 public:
  // Returns an empty object, for callers that pass it on.
  static Env read() { return {}; }

  // --- Defaults of a new communicator -----------------------------------------------------------
  // TORCHCOMM_ABORT_ON_ERROR: ends the process when an operation times out or fails. Default true.
  static bool abort_on_error();
  // TORCHCOMM_TIMEOUT_SECONDS: timeout of an operation in seconds, > 0. Default 600.
  static std::chrono::milliseconds timeout();
  // TORCH_OVERLAP_CHECK_MISMATCH: the ranks compare every operation before it is issued
  // (comm/mismatch.h). Default false. Must be equal on all ranks.
  static bool check_mismatch();
  // TORCHCOMM_HEALTH_CHECK_WAIT_MS: time in milliseconds that a process waits before a timeout or
  // an error ends it, after its dump and its abort hooks, so that a health monitor can see the
  // failure and fetch the flight recorder. Default 0. Read when a communicator is created.
  static std::chrono::milliseconds health_check_wait();

  // --- Rank and size (comm/bootstrap.h) ----------------------------------------------------------
  // TORCHCOMM_RANK and TORCHCOMM_SIZE, else the variables of the first launcher that sets a rank or
  // a size. TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD: auto (default), torchrun, mpi, pmi, slurm or
  // pals. Empty if no launcher does. Throws kValue if only one of the two is set, or the rank is
  // not below the size.
  static std::optional<Launcher> launcher();
  // The same for callers that do not require a rank: empty if launcher() would throw.
  static std::optional<Launcher> launcher_if_valid() noexcept;

  // --- Store -------------------------------------------------------------------------------------
  // MASTER_ADDR, MASTER_PORT: address of the TCPStore. Without MASTER_ADDR, the first host of
  // SLURM_STEP_NODELIST or SLURM_JOB_NODELIST. Without MASTER_PORT, 29500.
  static std::optional<std::string> master_addr();
  static int master_port();
  // TORCHELASTIC_USE_AGENT_STORE: torchrun's agent already serves the store at MASTER_PORT.
  static bool agent_store();
  // TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT: part of every key, so that a restarted job
  // never reads entries that its previous attempt left in the store.
  static std::string run_id();
  static std::string restart_count();

  // --- Backends ---------------------------------------------------------------------------------
  // TORCHCOMM_GLOO_HOSTNAME, TORCHCOMM_GLOO_INTERFACE: the address that gloo listens on.
  static std::optional<std::string> gloo_hostname();
  static std::optional<std::string> gloo_interface();
  // TORCHCOMM_NCCL_BOOTSTRAP_UNIQUEID_EXCHANGE_METHOD: auto or tcpstore (both use the store).
  static std::string unique_id_exchange();
  // TORCHCOMM_NCCLX_GRAPH_TIMEOUT_MONITORING: default of the hint graph_timeouts. Default false.
  static bool graph_timeouts();
  // NCCL_NVLS_ENABLE, a variable of NCCL: "0" keeps NCCL from creating NVLink multicast objects.
  // Read once, at the first NCCL communicator, as NCCL does.
  static bool is_nvls_enabled();
  // NCCL_GRAPH_REGISTER, a variable of NCCL: "0" keeps NCCL from mapping memory into the peers by
  // itself, as it does in captures. Read together with NCCL_NVLS_ENABLE.
  static bool is_graph_register_enabled();
  // TORCH_OVERLAP_CUSTOM_COLLECTIVES: default of the hint custom_collectives (comm/options.h).
  // Default auto. Must be equal on all ranks.
  static std::string custom_collectives();
  // TORCHCOMMS_SERIALIZATION: torch_save (default) or pickle, for object collectives.
  static std::string serialization();

  // --- Flight recorder (comm/recorder.h) --------------------------------------------------------
  // TORCHCOMM_FR_BUFFER_SIZE: number of calls that the recorder keeps; 0 disables it. Read once.
  static int recorder_size();
  // TORCHCOMM_FR_DUMP_TEMP_FILE: prefix of the dump file's name, which ends with the rank. Read by
  // each call that requests a dump; for a dump at a failure or a signal, when a communicator is
  // created.
  static std::string recorder_file();
  static constexpr const char* kRecorderFile = "/tmp/torch_overlap_trace_rank_";  // its default
  // TORCHCOMM_FR_CPP_STACK, TORCHCOMM_FR_PYTHON_STACK: records the stack of every call. Read once.
  static bool recorder_cpp_stack();
  static bool recorder_python_stack();
  // TORCHCOMM_FR_DUMP_SIGNAL: SIGUSR1, SIGUSR2 or a number; the recorder is dumped when the process
  // receives it. Read once. If it is not set, no signal handler is installed.
  static std::optional<int> recorder_signal();
  // TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME: the file's name is read at every dump. This is unsafe in
  // programs that change their environment while threads run.
  static bool recorder_dynamic_file();

  // --- Overlapped operators ----------------------------------------------------------------------
  // TORCH_OVERLAP_LOG_CHUNKS: writes each product and each exchange to stderr as it is issued.
  // Default false. Read when a buffer or an operator's channel is created.
  static bool log_chunks();
  // TORCH_OVERLAP_TUNE_CACHE, else torch_overlap/tune.json of the user's cache folder; "": no file.
  static std::optional<std::string> tune_cache();
};

}  // namespace torch_overlap
