// An all_reduce from C++, without Python.
//
//   all_reduce [ranks]     `local`: 4 (or `ranks`) threads of this process, on the CPU
//   all_reduce nccl        one process for each GPU, started as for any torchrun program:
//                          torchrun --no-python --nproc-per-node 2 build/examples/all_reduce nccl

#include <ATen/Functions.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>

#include "torch_overlap/comm/backends/local/spawn.h"
#include "torch_overlap/comm/torch_comm.h"

namespace {

using torch_overlap::RedOpType;
using torch_overlap::TorchComm;

// Every rank contributes rank + 1; the sum is n (n + 1) / 2 everywhere.
void sum_ranks(const std::shared_ptr<TorchComm>& comm) {
  const auto options = at::TensorOptions().device(comm->device()).dtype(at::kFloat);
  const at::Tensor x = at::full({1 << 20}, comm->rank() + 1, options);
  const auto work = comm->all_reduce(x, RedOpType::SUM, /*async_op=*/true);
  // ... work that does not need x ...
  work->wait();

  const double expected = comm->size() * (comm->size() + 1) / 2.0;
  const bool right = x.eq(expected).all().item<bool>();
  std::printf("rank %d of %d on %s: %s, expected %g: %s\n", comm->rank(), comm->size(),
              comm->device().str().c_str(), comm->backend_name().c_str(), expected,
              right ? "ok" : "WRONG");
  if (!right) std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc > 1 && std::strcmp(argv[1], "nccl") == 0) {
      const auto comm = TorchComm::create("nccl", c10::kCUDA);
      sum_ranks(comm);
      comm->finalize();
    } else {
      torch_overlap::run_local_ranks(argc > 1 ? std::atoi(argv[1]) : 4, sum_ranks);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
