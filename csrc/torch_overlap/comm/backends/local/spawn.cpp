#include "torch_overlap/comm/backends/local/spawn.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <exception>
#include <thread>
#include <vector>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

using Body = std::function<void(const std::shared_ptr<TorchComm>&)>;

// Returns the error message of one rank; empty if it succeeded.
std::string run_rank(RankAndSize who, const Body& body, const CommOptions& options) {
  std::shared_ptr<TorchComm> comm;
  try {
    comm = TorchComm::create("local", c10::kCPU, options.name.value_or("local"), options, who);
    body(comm);
    if (!comm->is_finalized() && !comm->is_aborted()) comm->finalize();
    return {};
  } catch (const std::exception& error) {
    if (comm && !comm->is_finalized()) comm->abort();
    return concat("rank ", who.rank, ": ", error.what());
  }
}

}  // namespace

void run_local_ranks(int size, const Body& body, CommOptions options) {
  TORCH_OVERLAP_CHECK(size > 0, kValue, "run_local_ranks: expected a size > 0, got ", size);
  options.store = c10::make_intrusive<c10d::HashStore>();
  if (!options.abort_process_on_timeout_or_error) {
    options.abort_process_on_timeout_or_error = false;
  }
  std::vector<std::string> faults(size);
  std::vector<std::thread> threads;
  threads.reserve(size);
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] { faults[rank] = run_rank({rank, size}, body, options); });
  }
  for (auto& thread : threads) thread.join();
  std::string all;
  for (const auto& fault : faults) {
    if (!fault.empty()) all += concat(all.empty() ? "" : "\n", fault);
  }
  TORCH_OVERLAP_CHECK(all.empty(), kRuntime, all);
}

}  // namespace torch_overlap
