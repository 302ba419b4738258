#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/overlap/execute.h"
#include "torch_overlap/overlap/op_channels.h"

// How the fused operators run their products over a channel of their communicator.
namespace torch_overlap::ops {

// What an operator does, and why that: `algorithm` as it was asked for, or what "auto" has found.
// Pure in its arguments but for the channel, which all ranks have alike; so all choose the same.
enum class Algorithm { sequential, chunked, ring, bulk };
struct Choice {
  Algorithm algorithm;
  std::string why;
};
TORCH_OVERLAP_API std::string_view to_string(Algorithm algorithm);
// Throws a kValue error that lists the choices for an unknown one.
void check_algorithm(std::string_view op, std::string_view algorithm);
// `chunk_rows`: of one rank's chunk; `bytes`: what a channel must have room for, 0: none is used.
// kUnsupported where "ring" or "bulk" was asked for and cannot be.
TORCH_OVERLAP_API Choice choose_algorithm(std::string_view op, std::string_view algorithm,
                                          const std::shared_ptr<TorchComm>& comm,
                                          at::ScalarType dtype, int64_t chunk_rows,
                                          int64_t gather_bytes, int64_t scatter_bytes);

// The same without making a channel, so without communication: what would be chosen, on the
// assumption that ranks reach each other's memory where nobody has tried yet.
TORCH_OVERLAP_API Choice explain_algorithm(std::string_view op, std::string_view algorithm,
                                           const std::shared_ptr<TorchComm>& comm,
                                           at::ScalarType dtype, int64_t chunk_rows,
                                           int64_t gather_bytes, int64_t scatter_bytes);
// matmul_all_reduce's, of so many rows. "auto" does not take the channels, over which each element
// moves twice.
TORCH_OVERLAP_API Choice choose_all_reduce(const TorchComm& comm, std::string_view algorithm,
                                           int64_t rows);
// In how many pieces it goes when it is chunked: each travels while the next is computed.
inline constexpr int64_t kAllReduceChunks = 4;

// What `algorithm` means for a forward pass: "bulk" hides only the communication of gradients.
inline std::string_view forward_algorithm(std::string_view algorithm) {
  return algorithm == "bulk" ? "sequential" : algorithm;
}

// Whether products over channels take it, and channels sum it.
bool is_channel_dtype(at::ScalarType dtype);

// Whether a chunk of so many rows outlasts what its transfer costs to start.
bool is_worth_chunks(int64_t rows);

// Blocks of a reduction beside a product.
inline constexpr int kBulkBlocks = 16;

// op(x) as an operand: x [m, k] itself, or the transpose of what lies in memory.
GemmOperand operand(const at::Tensor& x);

// products[i] = all rows * weights[i]^T + biases[i]; `gathered`, if defined, becomes all rows.
void ring_gather_multiply(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                          const at::Tensor& own, at::TensorList weights,
                          const std::vector<at::Tensor>& biases,
                          const std::vector<at::Tensor>& products, const at::Tensor& gathered);
// The same for products whose lhs, but for its scales, is what is gathered.
void ring_gather_gemms(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                       const at::Tensor& own, std::vector<GemmArgs> gemms,
                       const at::Tensor& gathered);

// out = this rank's rows of the sum (or mean) over ranks of sum_i inputs[i] weights[i] + bias.
struct ScatterMultiply {
  std::vector<at::Tensor> inputs;   // [rows of all, k_i]
  std::vector<at::Tensor> weights;  // [k_i, columns]
  at::Tensor start;                 // [rows of all, columns]: added to this rank's; or undefined
  at::Tensor bias;
  bool mean = false;
  at::Tensor out;
};
void ring_multiply_scatter(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                           const ScatterMultiply& problem);

// The same with one product for all rows: `before_sum` is called behind it, and the reduction goes
// on beside `beside`.
void bulk_multiply_scatter(std::string_view op, const std::shared_ptr<TorchComm>& comm,
                           const ScatterMultiply& problem, const std::function<void()>& before_sum,
                           const std::vector<GemmArgs>& beside);

// All ranks' rows, gathered in the background.
class ChannelGather {
 public:
  // `all_rows`: of all ranks, each with its part of them; 0: all have as many as this one.
  ChannelGather(std::string_view op, const std::shared_ptr<TorchComm>& comm, const at::Tensor& own,
                int64_t all_rows = 0);
  // Valid after finish(), as long as this lives.
  const at::Tensor& rows() const { return rows_; }
  void finish() { gather_->finish(); }

 private:
  std::shared_ptr<OverlapChannel> channel_;
  std::optional<OverlapChannel::Use> use_;
  at::Tensor rows_;
  std::optional<BackgroundGather> gather_;
};

// Bytes of a channel that the two need.
int64_t gather_bytes(const TorchComm& comm, const at::Tensor& own);
int64_t scatter_bytes(const TorchComm& comm, int64_t rows, int64_t columns, at::ScalarType dtype);

}  // namespace torch_overlap::ops
