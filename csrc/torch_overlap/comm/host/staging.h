#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "torch_overlap/comm/call.h"

namespace torch_overlap {

// Lets a host backend accept tensors of another device: the operation runs on CPU copies. Created
// on the caller's thread, after the host has waited for the caller's current stream. The thread
// that runs the operation copies the results back before the operation is done, so they are visible
// on whatever stream the caller uses next. Cannot be used during graph capture, in which the host
// must not wait for a stream.
class Staging {
 public:
  // Replaces the tensors of `call` by CPU copies. Returns null if they are on the CPU already.
  static std::unique_ptr<Staging> to_host(Call& call, int rank, c10::Device device);

  // Copy the results back: all of them, or those received from `peer` with `tag`.
  void write_back() const;
  void write_back_from(int peer, int tag) const;

 private:
  struct Pair {
    at::Tensor device;
    at::Tensor host;
    int peer;  // peer of a receive; -1 otherwise
    int tag;
  };
  at::Tensor move(const at::Tensor& tensor, bool is_input, bool is_output, int peer = -1,
                  int tag = 0);
  void move(RankTensors& blocks, bool is_output);

  std::vector<Pair> results_;
  std::vector<at::Tensor> sources_;  // kept alive until the operation is done
};

}  // namespace torch_overlap
