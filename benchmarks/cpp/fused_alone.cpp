// The fused kernels on one GPU, as those of one rank of several whose memory is all on this device:
// chunks are there before they are asked for, and what goes to other ranks goes to local memory.
// benchmarks/fused_alone.py loads this library and times them.

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/custom_class.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/overlap/channel.h"
#include "torch_overlap/overlap/device.h"
#include "torch_overlap/overlap/op_channels.h"
#include "torch_overlap/symm/symmetric_memory.h"

namespace {

using torch_overlap::ChannelLayout;
using torch_overlap::GemmArgs;
using torch_overlap::GemmOperand;
using torch_overlap::OverlapDevice;
using torch_overlap::OverlapGroup;
using torch_overlap::RowPartition;
using torch_overlap::SymmetricMemory;
using torch_overlap::Transport;

constexpr const char* kName = "fused_alone";
constexpr std::chrono::milliseconds kPatience{30'000};

// Where the threads that make the memory, one for each rank, tell each other of it.
class ThreadExchange {
 public:
  explicit ThreadExchange(int size) : values_(size) {}

  std::vector<std::string> all_gather(int rank, const std::string& mine) {
    std::unique_lock lock(mutex_);
    const int round = round_;
    values_.at(rank) = mine;
    if (++num_arrived_ == static_cast<int>(values_.size())) {
      num_arrived_ = 0;
      ++round_;
      result_ = values_;
      changed_.notify_all();
    } else {
      TORCH_OVERLAP_CHECK(changed_.wait_for(lock, kPatience, [&] { return round_ != round; }),
                          kTimeout, kName, ": expected all ranks to come, got fewer");
    }
    return result_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> values_;
  std::vector<std::string> result_;
  int num_arrived_ = 0;
  int round_ = 0;
};

GemmOperand operand_of(const at::Tensor& data, bool transposed,
                       const std::optional<at::Tensor>& scale) {
  GemmOperand operand{.data = data, .transposed = transposed};
  if (scale) {
    operand.scaling = scale->numel() == 1 ? torch_overlap::ScalingMode::CURRENT_TENSOR_SCALING
                                          : torch_overlap::ScalingMode::ROW_SCALING;
    operand.scale_inv = *scale;
  }
  return operand;
}

// Rank `rank` of `size`. All words of the channel are 0, its epoch too: every flag and every tile
// has come to it.
class Rank final : public torch::CustomClassHolder {
 public:
  // `bytes`: what the scatter of this shape needs for the tiles of all ranks.
  Rank(int64_t size, int64_t rank, int64_t bytes)
      : device_(c10::kCUDA, c10::cuda::current_device()),
        overlap_(torch_overlap::overlap_device(kName, device_.type())),
        rank_(static_cast<int>(rank)),
        layout_{.bytes = bytes,
                .flags = torch_overlap::kOperatorFlagsPerRank * static_cast<int>(size),
                .size = static_cast<int>(size),
                .tiles = overlap_.tiles()} {
    ThreadExchange exchange(layout_.size);
    std::vector<std::exception_ptr> failures(size);
    std::vector<std::thread> threads;
    for (int r = 0; r < layout_.size; ++r) {
      threads.emplace_back([&, r] {
        try {
          join(exchange, r);
        } catch (...) {
          failures.at(r) = std::current_exception();
        }
      });
    }
    for (auto& thread : threads) thread.join();
    for (const auto& failure : failures) {
      if (failure) std::rethrow_exception(failure);
    }
  }

  // out = all rows of x * weight^T, chunk by chunk from this rank's on.
  void gather(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& out,
              const std::optional<at::Tensor>& x_scale,
              const std::optional<at::Tensor>& weight_scale) {
    const RowPartition rows{x.size(0), layout_.size};
    std::vector<int> order;
    for (int step = 0; step < layout_.size; ++step) order.push_back((rank_ + step) % layout_.size);
    overlap_.run_fused(*transport_, torch_overlap::FusedGather{
                                        .gemm = args_of(x, weight, out, x_scale, weight_scale),
                                        .rows = rows,
                                        .own = x.narrow(0, rows.begin(rank_), rows.length(rank_)),
                                        .gathered = x,
                                        .own_scales = {},
                                        .gathered_scales = {},
                                        .order = std::move(order)});
  }

  // out = this rank's rows of x * weight^T, and what tiles() has of the other ranks. Each rank has
  // `chunk_rows` of the rows, as long as there are any. `pieces`: see FusedReduceScatter. Scales:
  // one of each operand, or one for each row of both.
  void scatter(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& out,
               int64_t chunk_rows, int64_t pieces, const std::optional<at::Tensor>& x_scale,
               const std::optional<at::Tensor>& weight_scale) {
    const RowPartition rows{x.size(0), layout_.size, chunk_rows};
    const auto computed = [&](const at::Tensor& of) {
      const bool is_whole = pieces == 0 || of.size(0) != x.size(0);
      return is_whole ? of : of.narrow(0, rows.begin(rank_), rows.length(rank_));
    };
    const std::optional<at::Tensor> scale =
        x_scale ? std::optional(computed(*x_scale)) : std::nullopt;
    overlap_.run_fused(*transport_,
                       torch_overlap::FusedReduceScatter{
                           .gemm = args_of(computed(x), weight, out, scale, weight_scale),
                           .rows = rows,
                           .at = 0,
                           .out = out,
                           .factor = 1,
                           .pieces = static_cast<int>(pieces)});
  }

  // Returns the data that `source` stored for the rows of `owner`, in the shape of `like`: one
  // chunk.
  at::Tensor tiles(int64_t owner, int64_t source, const at::Tensor& like) {
    return memory_->view(static_cast<int>(owner), like.sizes(), like.scalar_type(),
                         source * static_cast<int64_t>(like.nbytes()));
  }

 private:
  void join(ThreadExchange& exchange, int rank) {
    const c10::OptionalDeviceGuard guard(device_);
    const auto all_gather = [&exchange, rank](const std::string& mine) {
      return exchange.all_gather(rank, mine);
    };
    const auto group =
        OverlapGroup::of({.all_gather = all_gather, .barrier = [=] { (void)all_gather({}); }}, rank,
                         layout_.size, device_, kName, kPatience);
    auto part = torch_overlap::symmetric_empty({layout_.total()}, at::kByte, device_);
    auto memory = SymmetricMemory::rendezvous(
        *group->bootstrap("fused_alone", "memory"),
        {.op = kName, .name = kName, .tensor = part, .digest = "", .fault = {}});
    if (rank != rank_) return;
    part_ = std::move(part);
    memory_ = std::move(memory);
    transport_ =
        overlap_.make_transport(memory_, {.layout = layout_, .use_ce = true, .group = group});
  }

  static GemmArgs args_of(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& out,
                          const std::optional<at::Tensor>& x_scale,
                          const std::optional<at::Tensor>& weight_scale) {
    GemmArgs args;
    args.lhs = operand_of(x, false, x_scale);
    args.rhs = operand_of(weight, true, weight_scale);
    args.out = out;
    return args;
  }

  const c10::Device device_;
  OverlapDevice& overlap_;
  const int rank_;
  const ChannelLayout layout_;
  at::Tensor part_;
  std::shared_ptr<SymmetricMemory> memory_;
  std::unique_ptr<Transport> transport_;
};

}  // namespace

TORCH_LIBRARY(fused_alone, library) {
  library.class_<Rank>("Rank")
      .def(torch::init<int64_t, int64_t, int64_t>())
      .def("gather", &Rank::gather)
      .def("scatter", &Rank::scatter)
      .def("tiles", &Rank::tiles);
}
