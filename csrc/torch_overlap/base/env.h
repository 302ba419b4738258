#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Every environment variable that the library reads, and nothing else reads one.
// The values are read when the object is made: `Env::read()` looks at the process as it is now, so
// a test or a launcher may change a variable between two communicators.
struct TORCH_OVERLAP_API Env {
  // --- Defaults of a new communicator -----------------------------------------------------------
  // TORCHCOMM_ABORT_ON_ERROR: end the process when an operation times out or fails. Default true.
  bool abort_on_error = true;
  // TORCHCOMM_TIMEOUT_SECONDS: how long an operation may take, a number > 0. Default 600.
  std::chrono::milliseconds timeout{600'000};
  // TORCH_OVERLAP_CHECK_MISMATCH: the ranks compare every operation before it is issued
  // (comm/mismatch.h). Default false. Equal on all ranks.
  bool check_mismatch = false;

  // TORCHCOMM_HEALTH_CHECK_WAIT_MS: how long a process that a timeout or an error is about to end
  // waits, after its dump and its abort hooks, so that whoever polls its health can see the failure
  // and fetch the flight recorder. Default 0. Read when a communicator is made.
  std::chrono::milliseconds health_check_wait{0};

  // --- Who am I (see comm/bootstrap.h for the order in which launchers are asked)
  // ----------------- TORCHCOMM_RANK, TORCHCOMM_SIZE: rank and size, before every launcher's own
  // variables. TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD: auto (default), torchrun, mpi, pmi, slurm
  // or pals.
  std::optional<int> rank;
  std::optional<int> size;
  std::optional<int> local_rank;
  std::string launcher;  // which family of variables gave rank and size; empty if none did

  // --- Where do we meet
  // --------------------------------------------------------------------------- MASTER_ADDR,
  // MASTER_PORT: the TCPStore; without MASTER_ADDR the first host of SLURM_STEP_NODELIST or
  // SLURM_JOB_NODELIST. Without MASTER_PORT, 29500.
  std::optional<std::string> master_addr;
  int master_port = 29500;
  // TORCHELASTIC_USE_AGENT_STORE: torchrun's agent already serves the store at MASTER_PORT.
  bool agent_store = false;
  // TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT: part of every key, so that a restarted job
  // never reads what the attempt before it left in the store.
  std::string run_id;
  std::string restart_count;

  // --- Backends
  // -----------------------------------------------------------------------------------
  // TORCHCOMM_GLOO_HOSTNAME, TORCHCOMM_GLOO_INTERFACE: the address that gloo listens on.
  std::optional<std::string> gloo_hostname;
  std::optional<std::string> gloo_interface;
  // TORCHCOMM_NCCL_BOOTSTRAP_UNIQUEID_EXCHANGE_METHOD: auto or tcpstore (both use the store).
  std::string unique_id_exchange = "auto";
  // TORCHCOMM_NCCLX_GRAPH_TIMEOUT_MONITORING: the default of the hint graph_timeouts. Default
  // false.
  bool graph_timeouts = false;
  // NCCL_NVLS_ENABLE, NCCL's own: "0" keeps it from making NVLink multicast objects. Read once, at
  // the first NCCL communicator, as NCCL does.
  bool may_nvls = true;
  // NCCL_GRAPH_REGISTER, NCCL's own: "0" keeps it from mapping memory into the peers by itself, as
  // it does in captures. Read with the one before.
  bool maps_in_captures = true;
  // TORCH_OVERLAP_DIRECT_COLLECTIVES: the default of the hint direct_collectives
  // (comm/options.h). Default auto. Equal on all ranks.
  std::string direct_collectives = "auto";
  // TORCHCOMMS_SERIALIZATION: torch_save (default) or pickle, for object collectives.
  std::string serialization = "torch_save";

  // --- Flight recorder (comm/recorder.h)
  // --------------------------------------------------------
  // TORCHCOMM_FR_BUFFER_SIZE: how many calls it keeps; 0 switches it off. Read once.
  int recorder_size = 2048;
  // TORCHCOMM_FR_DUMP_TEMP_FILE: a dump is written to this and the rank. Read when it is asked for
  // by a call; for a dump at a failure or a signal, when a communicator is made.
  std::string recorder_file = "/tmp/torch_overlap_trace_rank_";
  // TORCHCOMM_FR_CPP_STACK, TORCHCOMM_FR_PYTHON_STACK: keep the stack of every call. Read once.
  bool recorder_cpp_stack = false;
  bool recorder_python_stack = false;
  // TORCHCOMM_FR_DUMP_SIGNAL: SIGUSR1, SIGUSR2 or a number; the recorder is dumped when it comes.
  // Read once; not set: no signal is touched.
  std::optional<int> recorder_signal;
  // TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME: the file's name is read at every dump. Programs that
  // change their environment while threads run take their own risk.
  bool recorder_dynamic_file = false;

  // --- Overlapped products
  // ----------------------------------------------------------------------------------------
  // TORCH_OVERLAP_LOG_CHUNKS: write each product and each exchange to stderr as it is issued.
  // Default false. Read when a buffer or an operator's channel is made.
  bool log_chunks = false;

  // TORCH_OVERLAP_TUNE_CACHE: the file of what this machine has measured (torch_overlap/tune.py).
  // Of the process, not of a communicator: read when the Python package is imported.
  static std::optional<std::string> tune_cache();

  static Env read();
};

}  // namespace torch_overlap
