#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "torch_overlap/base/export.h"
#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/overlap/channel.h"
#include "torch_overlap/overlap/config.h"
#include "torch_overlap/overlap/execute.h"
#include "torch_overlap/overlap/schedule.h"

namespace torch_overlap {

// A communication buffer shared by the ranks of a group, and GEMMs that are overlapped with
// communicating it. Transformer Engine's class of this name, over any group.
//
//   read from the buffer      AG: it holds [tokens, features] of all ranks; each rank provides its
//                             rows (copy_into_buffer), and GEMMs read all of it
//   written to the buffer     RS: GEMMs of this rank's features write [tokens, features] to it;
//                             each rank gets the sum of its rows
//
// Rows are tokens, distributed over the ranks by RowPartition: equal parts, rounded up. A call may
// have fewer tokens than the buffer (set_active_tokens). Every call computes its own partition, so
// uneven remainders are no special case.
//
// Streams (CUDA): a call reads and writes in the order of the current stream, and the host does not
// wait. All calls may be captured in CUDA graphs; creating a buffer may not. All ranks must make
// the same calls in the same order. Consecutive calls need no synchronization between them. The
// result of a call stays in the buffer until this rank's next call.
//
// A wait for another rank is bounded by the timeout of the group. When it expires, that call or a
// later one throws kTimeout, and the buffer can no longer be used.
//
// Lifetime: construction is collective, over a TorchComm or over two callbacks of another
// framework; destruction is not. The memory behind the views of get_buffer() lives as long as the
// views. Thread-safe: a lock serializes the calls, including checks and settings.
class TORCH_OVERLAP_API CommOverlapCore : public std::enable_shared_from_this<CommOverlapCore> {
 public:
  using Tensor = at::Tensor;
  virtual ~CommOverlapCore() = default;
  CommOverlapCore(const CommOverlapCore&) = delete;
  CommOverlapCore& operator=(const CommOverlapCore&) = delete;

  // Creates the class for the method: CommOverlapP2PBase for RING_EXCHANGE, otherwise
  // CommOverlapBase.
  static std::shared_ptr<CommOverlapCore> create(std::shared_ptr<OverlapGroup> group,
                                                 const CommOverlapConfig& config);

  // --- Properties --------------------------------------------------------------------------------
  const CommOverlapConfig& config() const { return config_; }
  int rank() const { return channel_->group().rank(); }
  int get_tp_size() const { return config_.tp_size; }
  bool is_atomic_gemm() const { return config_.atomic_gemm; }
  virtual bool is_p2p_overlap() const = 0;
  // True if the elements of the buffer have 8 bits.
  bool is_fp8_ubuf() const { return c10::elementSize(config_.buffer_dtype) == 1; }
  // Returns the address of the first byte of the buffer.
  void* get_ubuf_dptr() const { return data_.mutable_data_ptr(); }
  // Returns the path that the last call took, and why if it is not the fastest: "split_overlap_ag:
  // copy engine, 4 products on 3 streams". An atomic method takes the path of the split method, and
  // reports that: ", flags in place of counters"; or ", as the split method" if ranks cannot map
  // each other's memory, since there are no flags then.
  std::string last_path() const;
  const OverlapGroup& group() const { return channel_->group(); }

  // --- The buffer --------------------------------------------------------------------------------
  // Sets the number of tokens, from the next call on. Must be equal on all ranks; otherwise that
  // call throws on all ranks if they share memory.
  void set_active_tokens(int64_t tokens);
  int64_t active_tokens() const { return tokens_; }
  RowPartition rows() const { return {tokens_, config_.tp_size}; }
  // Copies `input` to the buffer: [tokens, features], or the rows of this rank if local_chunk. Its
  // dtype is that of the buffer, or one of the same size.
  void copy_into_buffer(const Tensor& input, bool local_chunk = false);
  // While the result lives, no other thread uses the buffer. What the caller reads or writes of the
  // buffer is ordered after the previous call and before the next, even if those are on other
  // streams.
  OverlapChannel::Use use() const { return OverlapChannel::Use(*channel_); }
  // Throws if a wait for another rank has expired since the last call, including in a graph replay.
  void check() const { channel_->check(); }
  // Returns a view of the active part of the buffer, or of this rank's rows of it.
  Tensor get_buffer(bool local_chunk = false) const;
  // Returns the rows of rank `chunk_id`.
  Tensor get_buffer_chunk_by_id(int chunk_id) const;
  // Sets the scale of an 8-bit buffer: one fp32, equal on all ranks. value = data * scale_inv. It
  // is read when a call is executed.
  void set_ubuf_scale_inv(const Tensor& scale_inv);
  Tensor ubuf_scale_inv() const;

  // --- GEMMs -------------------------------------------------------------------------------------
  // Runs the GEMM of `args` concurrently with the all-gather or the reduce-scatter of the buffer.
  // The reduce-scatter writes `rs_output` [rows of this rank, features], or this rank's rows of the
  // buffer if `rs_output` is undefined.
  void bulk_overlap(const GemmArgs& args, CommOverlapType type, const Tensor& rs_output = {});
  // Throws what bulk_overlap() throws for these arguments; the GEMM is checked by check_gemm(). For
  // callers that fill the buffer in the same call, and must not modify it if the call is rejected.
  void check_bulk(CommOverlapType type, const Tensor& rs_output = {}) const;
  // Runs only the all-gather of the buffer, on the streams of `lender`, which may have a GEMM of
  // its own in flight.
  void bulk_overlap_external_ag(CommOverlapCore& lender);
  // args.out = GEMM of the gathered rows. args.lhs.data is this rank's rows, which need not be in
  // the buffer; or undefined if they are there. Block scales are those of this rank's rows, one row
  // of scales per row, and are gathered too. If `gathered` is defined, all rows are copied to it.
  void split_overlap_ag(const GemmArgs& args, const Tensor& gathered = {});
  // rs_output [rows of this rank, n] = sum over ranks of the GEMM. args.out is ignored.
  void split_overlap_rs(const GemmArgs& args, const Tensor& rs_output);
  // The same results for a buffer with atomic_gemm: GEMMs of chunks that wait for flags, or whose
  // completion flags signal, because cuBLASLt has no tile counters since CUDA 13.
  void atomic_gemm_overlap_ag(const GemmArgs& args, const Tensor& gathered = {});
  void atomic_gemm_overlap_rs(const GemmArgs& args, const Tensor& rs_output);

 protected:
  CommOverlapCore(std::shared_ptr<OverlapGroup> group, const CommOverlapConfig& config,
                  bool is_p2p);

  // Capabilities of a class. do_*() is called only if the class and its configuration support it.
  virtual bool has_bulk() const { return false; }
  virtual bool has_split(CommOverlapType type) const { return false; }
  virtual void do_bulk(const GemmArgs&, CommOverlapType, const Tensor&) {}
  virtual void do_external_ag(CommOverlapCore&) {}
  virtual void do_ag(std::string_view, const GemmArgs&, const Tensor&) {}
  virtual void do_rs(std::string_view, const GemmArgs&, const Tensor&) {}

  OverlapChannel& channel() const { return *channel_; }
  static OverlapChannel& channel_of(const CommOverlapCore& other) { return *other.channel_; }
  void set_path(std::string_view op, const std::string& how);
  // Returns the text for last_path(): "copy engine, 4 products on 3 streams".
  std::string describe(std::string_view op, size_t products) const;
  // Returns `args` with an SM target that leaves the communication SMs free.
  GemmArgs with_margin(GemmArgs args) const;
  // Returns the GEMM of a reduce-scatter, checked, without the part of the epilogue that is applied
  // after the sum.
  GemmArgs partial_product(std::string_view op, const GemmArgs& args,
                           const Tensor& rs_output) const;
  // Throws unless `rs_output` fits; the message says that `what` is sized incorrectly.
  void check_rs_output(std::string_view op, std::string_view what, const Tensor& rs_output,
                       int64_t columns) const;
  void check_bias_of_sum(std::string_view op, const Tensor& bias, const Tensor& rs_output) const;
  // Returns the scale of the sums of an 8-bit buffer; undefined for other buffers.
  Tensor scale_of_sum(std::string_view op) const;

 private:
  void require_bulk(std::string_view op) const;
  void require_split(std::string_view op, CommOverlapType type, bool atomic) const;

  const CommOverlapConfig config_;
  const std::shared_ptr<TorchComm> comm_;  // kept alive; null for another framework
  std::shared_ptr<OverlapChannel> channel_;
  Tensor data_;  // the whole buffer, flat
  std::atomic<int64_t> tokens_;
  Tensor scale_inv_;
  mutable std::mutex path_mutex_;
  std::string path_;
};

// Collectives that run concurrently with a GEMM (BULK), and reduce-scatter in pieces of the output
// features (PIPELINE).
class TORCH_OVERLAP_API CommOverlapBase final : public CommOverlapCore {
 public:
  // Collective.
  CommOverlapBase(std::shared_ptr<OverlapGroup> group, const CommOverlapConfig& config);
  bool is_p2p_overlap() const override { return false; }

 private:
  bool has_bulk() const override { return true; }
  bool has_split(CommOverlapType type) const override;
  void do_bulk(const GemmArgs& args, CommOverlapType type, const Tensor& rs_output) override;
  void do_external_ag(CommOverlapCore& lender) override;
  void do_rs(std::string_view op, const GemmArgs& args, const Tensor& rs_output) override;
};

// Point-to-point exchange of chunks (RING_EXCHANGE): all-gather before GEMMs, reduce-scatter after
// them.
class TORCH_OVERLAP_API CommOverlapP2PBase final : public CommOverlapCore {
 public:
  // Collective.
  CommOverlapP2PBase(std::shared_ptr<OverlapGroup> group, const CommOverlapConfig& config);
  bool is_p2p_overlap() const override { return true; }

 private:
  bool has_split(CommOverlapType type) const override { return type == config().comm_type; }
  void do_ag(std::string_view op, const GemmArgs& args, const Tensor& gathered) override;
  void do_rs(std::string_view op, const GemmArgs& args, const Tensor& rs_output) override;
  // Throws unless GEMMs of `chunks` ranks' rows fit the block scaling.
  void check_rows_of_blocks(std::string_view op, const GemmOperand& lhs, int chunks) const;
  // Returns the block scales of `lhs`, which are those of `own`; undefined tensors for other modes.
  GatheredRows gathered_scales(std::string_view op, const GemmOperand& lhs,
                               const Tensor& own) const;
};

}  // namespace torch_overlap
