#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "torch_overlap/base/export.h"
#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/overlap/channel.h"
#include "torch_overlap/overlap/config.h"
#include "torch_overlap/overlap/execute.h"
#include "torch_overlap/overlap/schedule.h"

namespace torch_overlap {

// A buffer that the ranks of a group share, and the products that are overlapped with moving it:
// Transformer Engine's class of this name, over any group.
//
//   out of the buffer   AG: it holds [tokens, features] of all ranks, of which each brings its rows
//                       (copy_into_buffer); products read all of it
//   into the buffer     RS: products of this rank's features write [tokens, features] to it; each
//                       rank gets the sum of its rows
//
// Rows are tokens, shared among the ranks by RowShare: equal parts, rounded up. A call may have
// fewer tokens than the buffer (set_active_tokens); so every call says how it is cut, and uneven
// ends are no special case.
//
// Streams (CUDA). A call reads and writes in the order of the current stream, and the host does not
// wait. All may be captured in CUDA graphs; making a buffer may not. Each rank makes the same
// calls in the same order; one call may follow another without anything between. What a call leaves
// in the buffer stays there until this rank's next call.
//
// A wait for another rank is bounded by the timeout of the group. When it expires, the call or one
// after it throws kTimeout, and the buffer is of no more use.
//
// Life. A class is made collectively, over a TorchComm or two callbacks of an outside framework;
// its end asks nobody. What the views of get_buffer() need lives as long as they do.
// Threads: any; a lock orders what they call, checks and settings included.
class TORCH_OVERLAP_API CommOverlapCore : public std::enable_shared_from_this<CommOverlapCore> {
 public:
  using Tensor = at::Tensor;
  virtual ~CommOverlapCore() = default;
  CommOverlapCore(const CommOverlapCore&) = delete;
  CommOverlapCore& operator=(const CommOverlapCore&) = delete;

  // The class that a method needs: CommOverlapP2PBase for RING_EXCHANGE, else CommOverlapBase.
  static std::shared_ptr<CommOverlapCore> create(std::shared_ptr<OverlapGroup> group,
                                                 const CommOverlapConfig& config);

  // --- What it is --------------------------------------------------------------------------------
  const CommOverlapConfig& config() const { return config_; }
  int rank() const { return channel_->group().rank(); }
  int get_tp_size() const { return config_.tp_size; }
  bool is_atomic_gemm() const { return config_.atomic_gemm; }
  virtual bool is_p2p_overlap() const = 0;
  // Whether the elements of the buffer have 8 bits.
  bool is_fp8_ubuf() const { return c10::elementSize(config_.buffer_dtype) == 1; }
  // The first byte of the buffer.
  void* get_ubuf_dptr() const { return data_.mutable_data_ptr(); }
  // Which way the last call went, and why if it is not the fastest: "split_overlap_ag: copy engine,
  // 4 products on 3 streams". An atomic method goes the way of the split one, and says so: ",
  // flags in place of counters"; where ranks do not reach each other's memory, without flags, ", as
  // the split method".
  std::string last_path() const;
  const OverlapGroup& group() const { return channel_->group(); }

  // --- The buffer --------------------------------------------------------------------------------
  // From the next call on, how many tokens there are; equal on all ranks, or that call throws on
  // all where they share memory.
  void set_active_tokens(int64_t tokens);
  int64_t active_tokens() const { return tokens_; }
  RowShare rows() const { return {tokens_, config_.tp_size}; }
  // `input` [tokens, features], or the rows of this rank with local_chunk, in the buffer's dtype
  // (or one of the same size).
  void copy_into_buffer(const Tensor& input, bool local_chunk = false);
  // While it lives no other thread uses the buffer, and what the caller reads or writes of it comes
  // behind the call before and before the next, also when those are on other streams.
  OverlapChannel::Use use() const { return OverlapChannel::Use(*channel_); }
  // Throws if a wait for another rank has expired since the last call, in a replay of a graph too.
  void check() const { channel_->check(); }
  // The active part of the buffer, or of it this rank's rows: a view.
  Tensor get_buffer(bool local_chunk = false) const;
  // The rows of rank `chunk_id`.
  Tensor get_buffer_chunk_by_id(int chunk_id) const;
  // For 8-bit buffers: one fp32 that all ranks have the same of. value = data * scale_inv. It is
  // read when a call is executed.
  void set_ubuf_scale_inv(const Tensor& scale_inv);
  Tensor ubuf_scale_inv() const;

  // --- Products ----------------------------------------------------------------------------------
  // The product of `args` beside the all-gather of the buffer, or beside its reduce-scatter: into
  // `rs_output` [rows of this rank, features], or, undefined, into this rank's rows of the buffer.
  void bulk_overlap(const GemmArgs& args, CommOverlapType type, const Tensor& rs_output = {});
  // Throws what bulk_overlap() throws for these arguments; the product is checked by check_gemm().
  // For a caller that fills the buffer in the same call, which must leave it alone when it is
  // refused.
  void check_bulk(CommOverlapType type, const Tensor& rs_output = {}) const;
  // The all-gather of the buffer alone, on the streams of `lender`, which may be under way with a
  // product of its own.
  void bulk_overlap_external_ag(CommOverlapCore& lender);
  // args.out = product of the gathered rows. args.lhs.data: this rank's rows, which need not be in
  // the buffer then; or undefined: they are there. Scales of blocks are those of this rank's rows,
  // a row for each, and are gathered too. `gathered`: becomes all rows, if defined.
  void split_overlap_ag(const GemmArgs& args, const Tensor& gathered = {});
  // rs_output [rows of this rank, n] = sum over ranks of the product. args.out is not looked at.
  void split_overlap_rs(const GemmArgs& args, const Tensor& rs_output);
  // The same results for a buffer with atomic_gemm: products of chunks that wait for flags, or are
  // told of by them, since no cuBLASLt from CUDA 13 on counts tiles.
  void atomic_gemm_overlap_ag(const GemmArgs& args, const Tensor& gathered = {});
  void atomic_gemm_overlap_rs(const GemmArgs& args, const Tensor& rs_output);

 protected:
  CommOverlapCore(std::shared_ptr<OverlapGroup> group, const CommOverlapConfig& config,
                  bool is_p2p);

  // What a class has. Each is called only if the class and its configuration have it.
  virtual bool has_bulk() const { return false; }
  virtual bool has_split(CommOverlapType type) const { return false; }
  virtual void do_bulk(const GemmArgs&, CommOverlapType, const Tensor&) {}
  virtual void do_external_ag(CommOverlapCore&) {}
  virtual void do_ag(std::string_view, const GemmArgs&, const Tensor&) {}
  virtual void do_rs(std::string_view, const GemmArgs&, const Tensor&) {}

  OverlapChannel& channel() const { return *channel_; }
  static OverlapChannel& channel_of(const CommOverlapCore& other) { return *other.channel_; }
  void set_path(std::string_view op, const std::string& how);
  // "copy engine, 4 products on 3 streams"
  std::string describe(std::string_view op, size_t products) const;
  // `args` with the SMs that products are to leave free.
  GemmArgs with_margin(GemmArgs args) const;
  // The product of a reduce-scatter: checked, without what belongs behind the sum.
  GemmArgs partial_product(std::string_view op, const GemmArgs& args,
                           const Tensor& rs_output) const;
  // `what` is sized incorrectly where it does not fit.
  void check_rs_output(std::string_view op, std::string_view what, const Tensor& rs_output,
                       int64_t columns) const;
  void check_bias_of_sum(std::string_view op, const Tensor& bias, const Tensor& rs_output) const;
  // Of sums of an 8-bit buffer; undefined for others.
  Tensor scale_of_sum(std::string_view op) const;

 private:
  void require_bulk(std::string_view op) const;
  void require_split(std::string_view op, CommOverlapType type, bool atomic) const;

  const CommOverlapConfig config_;
  const std::shared_ptr<TorchComm> comm_;  // kept; null for an outside framework
  std::shared_ptr<OverlapChannel> channel_;
  Tensor data_;  // the whole buffer, flat
  std::atomic<int64_t> tokens_;
  Tensor scale_inv_;
  mutable std::mutex path_mutex_;
  std::string path_;
};

// Collectives beside products (BULK), and reduce-scatter in pieces of the output features
// (PIPELINE).
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

// Chunks from rank to rank (RING_EXCHANGE): all-gather before products, reduce-scatter behind them.
class TORCH_OVERLAP_API CommOverlapP2PBase final : public CommOverlapCore {
 public:
  // Collective.
  CommOverlapP2PBase(std::shared_ptr<OverlapGroup> group, const CommOverlapConfig& config);
  bool is_p2p_overlap() const override { return true; }

 private:
  bool has_split(CommOverlapType type) const override { return type == config().comm_type; }
  void do_ag(std::string_view op, const GemmArgs& args, const Tensor& gathered) override;
  void do_rs(std::string_view op, const GemmArgs& args, const Tensor& rs_output) override;
  // A product is one of as many ranks' chunks.
  void check_rows_of_blocks(std::string_view op, const GemmOperand& lhs, int chunks) const;
  // Block scales of lhs, which are those of `own`; undefined tensors for other modes.
  GatheredRows gathered_scales(std::string_view op, const GemmOperand& lhs,
                               const Tensor& own) const;
};

}  // namespace torch_overlap
