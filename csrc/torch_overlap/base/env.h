#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Rank and size, and the family of variables that they are from: torchcomm, mpi, pmi, pals,
// torchrun or slurm.
struct Launcher {
  std::string family;
  int rank = 0;
  int size = 1;
  std::optional<int> local_rank;
};

// Every environment variable that the library reads, and nothing else reads one.
//
// Each function reads its own variables when it is called, and no others: a variable that a call
// does not need cannot make it fail, and a test or a launcher may change one between two
// communicators. A value that cannot be parsed is a kValue error that names the variable.
class TORCH_OVERLAP_API Env {
 public:
  // Holds nothing; for callers that pass it on.
  static Env read() { return {}; }

  // --- Defaults of a new communicator -----------------------------------------------------------
  // TORCHCOMM_ABORT_ON_ERROR: end the process when an operation times out or fails. Default true.
  static bool abort_on_error();
  // TORCHCOMM_TIMEOUT_SECONDS: how long an operation may take, a number > 0. Default 600.
  static std::chrono::milliseconds timeout();
  // TORCH_OVERLAP_CHECK_MISMATCH: the ranks compare every operation before it is issued
  // (comm/mismatch.h). Default false. Equal on all ranks.
  static bool check_mismatch();
  // TORCHCOMM_HEALTH_CHECK_WAIT_MS: how long a process that a timeout or an error is about to end
  // waits, after its dump and its abort hooks, so that whoever polls its health can see the failure
  // and fetch the flight recorder. Default 0. Read when a communicator is made.
  static std::chrono::milliseconds health_check_wait();

  // --- Who am I (see comm/bootstrap.h) ----------------------------------------------------------
  // TORCHCOMM_RANK and TORCHCOMM_SIZE, else those of the first launcher that sets a rank or a size.
  // TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD: auto (default), torchrun, mpi, pmi, slurm or pals.
  // Empty if none does. kValue if only one of the two is set, or the rank is not below the size.
  static std::optional<Launcher> launcher();
  // The same for whom a rank is of help and not needed: empty where launcher() would throw.
  static std::optional<Launcher> launcher_if_valid() noexcept;

  // --- Where do we meet -------------------------------------------------------------------------
  // MASTER_ADDR, MASTER_PORT: the TCPStore; without MASTER_ADDR the first host of
  // SLURM_STEP_NODELIST or SLURM_JOB_NODELIST. Without MASTER_PORT, 29500.
  static std::optional<std::string> master_addr();
  static int master_port();
  // TORCHELASTIC_USE_AGENT_STORE: torchrun's agent already serves the store at MASTER_PORT.
  static bool agent_store();
  // TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT: part of every key, so that a restarted job
  // never reads what the attempt before it left in the store.
  static std::string run_id();
  static std::string restart_count();

  // --- Backends ---------------------------------------------------------------------------------
  // TORCHCOMM_GLOO_HOSTNAME, TORCHCOMM_GLOO_INTERFACE: the address that gloo listens on.
  static std::optional<std::string> gloo_hostname();
  static std::optional<std::string> gloo_interface();
  // TORCHCOMM_NCCL_BOOTSTRAP_UNIQUEID_EXCHANGE_METHOD: auto or tcpstore (both use the store).
  static std::string unique_id_exchange();
  // TORCHCOMM_NCCLX_GRAPH_TIMEOUT_MONITORING: the default of the hint graph_timeouts. Default
  // false.
  static bool graph_timeouts();
  // NCCL_NVLS_ENABLE, NCCL's own: "0" keeps it from making NVLink multicast objects. Read once, at
  // the first NCCL communicator, as NCCL does.
  static bool may_nvls();
  // NCCL_GRAPH_REGISTER, NCCL's own: "0" keeps it from mapping memory into the peers by itself, as
  // it does in captures. Read with the one before.
  static bool maps_in_captures();
  // TORCH_OVERLAP_DIRECT_COLLECTIVES: the default of the hint direct_collectives
  // (comm/options.h). Default auto. Equal on all ranks.
  static std::string direct_collectives();
  // TORCHCOMMS_SERIALIZATION: torch_save (default) or pickle, for object collectives.
  static std::string serialization();

  // --- Flight recorder (comm/recorder.h) --------------------------------------------------------
  // TORCHCOMM_FR_BUFFER_SIZE: how many calls it keeps; 0 switches it off. Read once.
  static int recorder_size();
  // TORCHCOMM_FR_DUMP_TEMP_FILE: a dump is written to this and the rank. Read when it is asked for
  // by a call; for a dump at a failure or a signal, when a communicator is made.
  static std::string recorder_file();
  static constexpr const char* kRecorderFile = "/tmp/torch_overlap_trace_rank_";  // its default
  // TORCHCOMM_FR_CPP_STACK, TORCHCOMM_FR_PYTHON_STACK: keep the stack of every call. Read once.
  static bool recorder_cpp_stack();
  static bool recorder_python_stack();
  // TORCHCOMM_FR_DUMP_SIGNAL: SIGUSR1, SIGUSR2 or a number; the recorder is dumped when it comes.
  // Read once; not set: no signal is touched.
  static std::optional<int> recorder_signal();
  // TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME: the file's name is read at every dump. Programs that
  // change their environment while threads run take their own risk.
  static bool recorder_dynamic_file();

  // --- Overlapped products ----------------------------------------------------------------------
  // TORCH_OVERLAP_LOG_CHUNKS: write each product and each exchange to stderr as it is issued.
  // Default false. Read when a buffer or an operator's channel is made.
  static bool log_chunks();
  // TORCH_OVERLAP_TUNE_CACHE: the file of what this machine has measured (torch_overlap/tune.py).
  static std::optional<std::string> tune_cache();
};

}  // namespace torch_overlap
