#include "torch_overlap/overlap/fused.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <atomic>

#include "comm/local_ranks.h"
#include "symm/thread_ranks.h"
#include "torch_overlap/ops/ops.h"
#include "torch_overlap/overlap/device.h"

// Fused kernels on CPUs, as plain code: what is around the kernels of a GPU. Small integers in
// fp32 are exact.

namespace torch_overlap {
namespace {

using at::Tensor;
using testing::Comm;
using testing::milliseconds;
using testing::sample;
using testing::ThreadExchange;

constexpr milliseconds kKernelTimeout{10'000};

// The device of CPUs with fused kernels. A kernel waits for those of the other ranks at a barrier.
class FusedCpuDevice final : public OverlapDevice {
 public:
  FusedCpuDevice(int size, std::shared_ptr<OverlapDevice> cpu)
      : board_(size), cpu_(std::move(cpu)) {}
  static thread_local int rank;

  std::unique_ptr<OverlapStreams> make_streams(c10::Device device,
                                               const StreamOptions& options) override {
    return cpu_->make_streams(device, options);
  }
  std::unique_ptr<Transport> make_transport(std::shared_ptr<SymmetricMemory> memory,
                                            const PeerMappedOptions& options) override {
    return cpu_->make_transport(std::move(memory), options);
  }
  void sum(const SumArgs& args) override { cpu_->sum(args); }
  std::string name(c10::Device device) override { return cpu_->name(device); }
  int sm_count(c10::Device device) override { return cpu_->sm_count(device); }
  uint64_t capture() override { return 0; }
  void keep_for_graph(std::vector<std::shared_ptr<void>>) override {}
  std::string fused_unsupported_reason(const FusedShape&) override { return {}; }

  // The chunks are sent on the communication stream, which runs first.
  void run_fused(Transport&, const FusedGather& problem) override {
    ++num_gathers;
    barrier();
    Tensor rows = problem.gathered.clone();
    rows.narrow(0, problem.rows.begin(rank), problem.rows.length(rank)).copy_(problem.own);
    GemmArgs args = problem.gemm;
    args.lhs.data = rows;
    gemm("fused", args);
    barrier();
  }

  void run_fused(Transport& transport, const FusedReduceScatter& problem) override {
    ++num_scatters;
    const RowPartition& rows = problem.rows;
    transport.begin({.rows = rows.rows, .signature = OpSignature::kernel()});
    const int64_t columns = problem.out.size(1);
    const auto dtype = problem.out.scalar_type();
    const int64_t slot_bytes = rows.largest() * columns * problem.out.element_size();
    GemmArgs args = problem.gemm;
    args.out = at::empty({rows.rows, columns}, problem.out.options());
    gemm("fused", args);
    for (int peer = 0; peer < rows.size; ++peer) {
      const auto part = args.out.narrow(0, rows.begin(peer), rows.length(peer));
      transport.peer(peer, problem.at + rank * slot_bytes, part.sizes(), dtype).copy_(part);
    }
    barrier();
    problem.out.zero_();
    for (int peer = 0; peer < rows.size; ++peer) {
      problem.out.add_(
          transport.peer(rank, problem.at + peer * slot_bytes, problem.out.sizes(), dtype));
    }
  }

  std::atomic<int> num_gathers{0};
  std::atomic<int> num_scatters{0};

 private:
  void barrier() { board_.all_gather(rank, "", kKernelTimeout); }
  ThreadExchange board_;
  const std::shared_ptr<OverlapDevice> cpu_;
};

thread_local int FusedCpuDevice::rank = 0;

// CPUs have fused kernels while it lives.
class WithFusedKernels {
 public:
  explicit WithFusedKernels(int size)
      : cpu_(register_overlap_device(c10::kCPU, nullptr)),
        device_(std::make_shared<FusedCpuDevice>(size, cpu_)) {
    register_overlap_device(c10::kCPU, device_);
  }
  ~WithFusedKernels() { register_overlap_device(c10::kCPU, cpu_); }
  WithFusedKernels(const WithFusedKernels&) = delete;
  WithFusedKernels& operator=(const WithFusedKernels&) = delete;
  FusedCpuDevice* operator->() { return device_.get(); }

  template <typename Body>
  static void run(int size, const Body& body) {
    run_local_ranks(size, [&](const Comm& comm) {
      FusedCpuDevice::rank = comm->rank();
      body(comm);
    });
  }

 private:
  const std::shared_ptr<OverlapDevice> cpu_;
  const std::shared_ptr<FusedCpuDevice> device_;
};

void expect_same(const Tensor& got, const Tensor& expected) {
  ASSERT_EQ(got.sizes(), expected.sizes());
  EXPECT_TRUE(at::equal(got, expected)) << (got - expected).abs().max();
}

Tensor floats(int rank, int salt, at::IntArrayRef sizes) {
  return sample(rank, salt, sizes, at::kFloat);
}

constexpr int kRanks = 3;
constexpr int64_t kRowsOfRank = 256;  // enough for "auto" to overlap
constexpr int64_t kColumns = 8;

Tensor rows_of_all(int salt, int64_t columns) {
  std::vector<Tensor> rows;
  for (int rank = 0; rank < kRanks; ++rank) {
    rows.push_back(floats(rank, salt, {kRowsOfRank, columns}));
  }
  return at::cat(rows);
}

TEST(FusedGather, MultipliesByEveryWeightAndCopiesTheRows) {
  WithFusedKernels device(kRanks);
  WithFusedKernels::run(kRanks, [](const Comm& comm) {
    const std::vector<Tensor> weights{floats(comm->rank(), 1, {4, kColumns}),
                                      floats(comm->rank(), 2, {6, kColumns})};
    const auto [products, gathered] =
        ops::all_gather_matmul({.x = floats(comm->rank(), 0, {kRowsOfRank, kColumns}),
                                .weights = weights,
                                .comm = comm->name(),
                                .group_size = kRanks,
                                .return_gathered = true,
                                .algorithm = "fused"});
    const Tensor all = rows_of_all(0, kColumns);
    expect_same(gathered, all);
    for (size_t i = 0; i < weights.size(); ++i) {
      expect_same(products[i], at::mm(all, weights[i].t()));
    }
  });
  EXPECT_EQ(device->num_gathers, 2 * kRanks);
}

// The results of which a rank's loss depends on.
struct Uses {
  bool products;
  bool gathered;
};

// Checks the gradients of x and of the weights if the losses of the ranks use other results.
void check_gradients_of(const std::vector<Uses>& uses, std::string_view algorithm) {
  SCOPED_TRACE(algorithm);
  WithFusedKernels device(kRanks);
  WithFusedKernels::run(kRanks, [&](const Comm& comm) {
    const auto weights_of = [](int rank) {
      return std::vector{floats(rank, 1, {8 + 8 * rank, kColumns}), floats(rank, 2, {8, kColumns})};
    };
    const int64_t all_rows = kRanks * kRowsOfRank;
    const auto grads_of = [&](int rank) {
      return std::vector{floats(rank, 3, {all_rows, 8 + 8 * rank}), floats(rank, 4, {all_rows, 8}),
                         floats(rank, 5, {all_rows, kColumns})};
    };
    const int me = comm->rank();
    const auto x = floats(me, 0, {kRowsOfRank, kColumns}).requires_grad_();
    auto weights = weights_of(me);
    for (Tensor& weight : weights) weight.requires_grad_();
    const auto [products, gathered] = ops::all_gather_matmul({.x = x,
                                                              .weights = weights,
                                                              .comm = comm->name(),
                                                              .group_size = kRanks,
                                                              .return_gathered = true,
                                                              .algorithm = algorithm});
    std::vector<Tensor> roots;
    std::vector<Tensor> grads;
    const auto mine = grads_of(me);
    for (size_t i = 0; i < products.size() && uses[me].products; ++i) {
      roots.push_back(products[i]);
      grads.push_back(mine[i]);
    }
    if (uses[me].gathered) {
      roots.push_back(gathered);
      grads.push_back(mine[2]);
    }
    torch::autograd::backward(roots, grads);
    Tensor total = at::zeros({all_rows, kColumns});
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto theirs = grads_of(rank);
      const auto factors = weights_of(rank);
      if (uses[rank].products) {
        for (size_t i = 0; i < factors.size(); ++i) total.addmm_(theirs[i], factors[i]);
      }
      if (uses[rank].gathered) total.add_(theirs[2]);
    }
    expect_same(x.grad(), total.narrow(0, me * kRowsOfRank, kRowsOfRank));
    const Tensor all = rows_of_all(0, kColumns);
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!uses[me].products) {
        EXPECT_FALSE(weights[i].grad().defined());
      } else {
        expect_same(weights[i].grad(), at::mm(mine[i].t(), all));
      }
    }
  });
  EXPECT_EQ(device->num_scatters, kRanks) << "every rank has to use the fused kernel";
}

TEST(FusedReduceScatter, AddsTheGradientOfTheGatheredRowsOfSomeRanks) {
  const Uses products{.products = true, .gathered = false};
  const Uses both{.products = true, .gathered = true};
  const Uses rows{.products = false, .gathered = true};
  for (const auto* algorithm : {"auto", "fused"}) {
    check_gradients_of({products, products, products}, algorithm);
    check_gradients_of({both, products, products}, algorithm);
    check_gradients_of({products, both, rows}, algorithm);
    check_gradients_of({rows, rows, rows}, algorithm);
  }
}

}  // namespace
}  // namespace torch_overlap
