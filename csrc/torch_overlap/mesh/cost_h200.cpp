// Measured on H200s (NVLink 4, all pairs, no multicast; NCCL 2.28.9; bf16). Up to 16 MiB (4 MiB for
// two ranks) the times are of the communicator's own choice in CUDA graphs; above, of eager NCCL.
// tests/python/mesh/test_h200.py compares them with benchmarks/results.

#include "torch_overlap/mesh/cost.h"

namespace torch_overlap::mesh {
namespace {

struct Row {
  double kib;
  double microseconds;
};

using Rows = std::vector<Row>;

Curve curve(Collective what, int64_t ranks, const Rows& rows, const Rows& larger = {}) {
  Curve out{what, ranks, {}};
  for (const Rows* part : {&rows, &larger}) {
    for (const Row& row : *part) out.points.push_back({row.kib * 1024, row.microseconds * 1e-6});
  }
  return out;
}

}  // namespace

CostModel CostModel::h200() {
  using enum Collective;
  CostModel model;
  model.name = "h200";
  LinkModel& nvlink = model.links[kNvlink];
  nvlink.start = 9e-6;       // the smallest NCCL call
  nvlink.latency = 0.7e-6;   // a flag's store to a peer and its load there
  nvlink.bandwidth = 320e9;  // slope between the last two points of all_gather on 4 ranks
  // all_gather and all_to_all send the same number of bytes by the same kernels.
  const Rows small_on_2{{1, 2.7}, {64, 2.9}, {256, 3.4}, {1024, 6.0}, {4096, 15.0}};
  const Rows small_on_4{{1, 3.2},     {64, 3.8},     {256, 4.6},  {1024, 7.5},
                        {4096, 16.1}, {16384, 50.0}, {32768, 105}};
  nvlink.curves = {
      curve(kAllReduce, 2,
            {{1, 2.7},
             {64, 3.0},
             {256, 5.1},
             {1024, 8.1},
             {4096, 26.2},
             {16384, 75.1},
             {65536, 255.8},
             {262144, 901.1}}),
      curve(kAllReduce, 4,
            {{1, 3.2},
             {64, 4.4},
             {256, 7.1},
             {1024, 12.5},
             {4096, 29.0},
             {8192, 51.2},
             {16384, 96.7},
             {65536, 324.7},
             {262144, 1188.3}}),
      curve(kAllGather, 2, small_on_2, {{16384, 54.2}, {65536, 159.1}, {262144, 555.3}}),
      curve(kAllGather, 4, small_on_4, {{65536, 190.2}, {262144, 662.3}}),
      // Small sizes are capped by all_reduce, which does strictly more.
      curve(kReduceScatter, 2,
            {{1, 2.6},
             {64, 3.0},
             {256, 3.5},
             {1024, 6.6},
             {4096, 16.4},
             {16384, 51.4},
             {65536, 168.8},
             {262144, 589.9}}),
      curve(kReduceScatter, 4,
            {{1, 3.2},
             {64, 3.8},
             {256, 4.2},
             {1024, 7.7},
             {4096, 16.8},
             {16384, 52.6},
             {32768, 103.0},
             {65536, 194.7},
             {262144, 675.9}}),
      curve(kAllToAll, 2, small_on_2, {{16384, 58.4}, {65536, 139.9}, {262144, 480.0}}),
      curve(kAllToAll, 4, small_on_4, {{65536, 200.1}, {262144, 674.7}}),
      curve(kBroadcast, 2, {{16384, 64.8}, {65536, 206.0}, {262144, 753.6}}),
      curve(kBroadcast, 4, {{16384, 88.7}, {65536, 230.1}, {262144, 784.0}}),
      // One exchange between two ranks: all_to_all on 2 ranks with half the bytes.
      curve(kPermute, 2, {{8192, 58.4}, {32768, 139.9}, {131072, 480.0}}),
  };
  LinkModel& network = model.links[kNetwork];
  network.start = 20e-6;     // assumed
  network.latency = 8e-6;    // assumed
  network.bandwidth = 45e9;  // assumed: 90 % of 400 Gbit/s a GPU

  model.device.flops = {{1, 1350e12}, {2, 790e12}, {4, 48e12}, {8, 60e12}};
  model.device.flops_hot = 0.89;  // large products are limited by power
  model.device.memory = 3.9e12;
  model.device.processors = 132;
  model.device.kernel = 5e-6;
  model.device.tiles = true;
  model.overlap = {.contention = 0.03, .start = 12e-6, .step = 5e-6};
  return model;
}

}  // namespace torch_overlap::mesh
