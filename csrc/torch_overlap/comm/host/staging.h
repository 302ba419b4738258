#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "torch_overlap/comm/call.h"

namespace torch_overlap {

// Lets a host backend take tensors of another device: the operation runs on CPU copies. Made on the
// caller's thread, after everything that is on its current stream; the host waits for that. Results
// go back from the thread that ran the operation, and are there when it is done: whatever stream
// the caller uses next sees them. Not for graph capture, where a stream must not be waited for.
class Staging {
 public:
  // Replaces the tensors of `call` by CPU ones. Null if they are on the CPU already.
  static std::unique_ptr<Staging> to_host(Call& call, int rank, c10::Device device);

  // Copies the results back: all, or those received from `peer` under `tag`.
  void write_back() const;
  void write_back_from(int peer, int tag) const;

 private:
  struct Pair {
    at::Tensor device;
    at::Tensor host;
    int peer;  // of a receive; -1 for others
    int tag;
  };
  at::Tensor move(const at::Tensor& tensor, bool is_input, bool is_output, int peer = -1,
                  int tag = 0);
  void move(Blocks& blocks, bool is_output);

  std::vector<Pair> results_;
  std::vector<at::Tensor> sources_;  // kept until done, as the caller was promised
};

}  // namespace torch_overlap
