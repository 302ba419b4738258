#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/mesh/mesh.h"

namespace torch_overlap::mesh {

enum class Collective : uint8_t {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kPermute,
  kBroadcast
};

TORCH_OVERLAP_API std::string_view to_string(Collective collective);
TORCH_OVERLAP_API Collective parse_collective(std::string_view name);

// What one of `ranks` sends for a collective on a tensor of `bytes`: the larger of its input and
// its output. all_reduce 2(n-1)/n, all_gather, reduce_scatter and all_to_all (n-1)/n, permute and
// broadcast 1; nothing for one rank.
TORCH_OVERLAP_API double wire_bytes(Collective collective, int64_t ranks, double bytes);

// Times that were measured for one collective on so many ranks, by bytes, rising.
struct Curve {
  struct Point {
    double bytes = 0;
    double seconds = 0;
  };
  Collective collective = Collective::kAllReduce;
  int64_t ranks = 2;
  std::vector<Point> points;
};

// A class of links. Without curves a collective takes start + latency * hops + wire bytes /
// bandwidth; with them it takes what was measured, carried over to another number of ranks by equal
// wire bytes.
struct LinkModel {
  double start = 0;      // seconds of a collective on nothing
  double latency = 0;    // seconds for each step of a ring
  double bandwidth = 1;  // bytes a second that one rank sends while it receives as many
  std::vector<Curve> curves = {};
};

// One GPU. A product of matrices is cut into tiles, which the processors take in waves.
struct DeviceModel {
  std::map<int64_t, double> flops = {};  // sustained flop/s by bytes of an element
  double flops_hot = 1;  // of that, what is left for products of 2 Tflop and more (power)
  double memory = 1;     // bytes a second, read and written
  int64_t processors = 1;
  double kernel = 0;   // seconds that any kernel takes at least
  bool tiles = false;  // round up to whole waves of tiles
};

// How a product and its communication run together.
struct OverlapModel {
  double contention = 0;  // a product is slower by this part while bytes come and go
  double start = 0;       // seconds before the first byte moves
  double step = 0;        // seconds more for the chunk of every rank but the first two
};

// What things cost, in seconds. A value: plain numbers, which docs and files can show; no state.
struct TORCH_OVERLAP_API CostModel {
  std::string name;
  std::map<std::string, LinkModel> links;
  DeviceModel device;
  OverlapModel overlap;

  // wire bytes / bandwidth on every link and nothing else: what the specification counts.
  static CostModel bandwidth_only(double bandwidth = 1.0);
  // Measured on H200s: NVLink without multicast, NCCL 2.28.9, cuBLASLt. The network between hosts
  // (one 400 Gbit/s adapter a GPU) is assumed, not measured.
  static CostModel h200();

  // Errors: a negative or non-finite number, curves that do not rise.
  void check() const;

  // One collective over the levels of a group (Mesh::links). Over several levels, each moves its
  // part while the others do: the slowest one counts, and the latencies of the others.
  double collective(Collective what, const std::vector<LinkLevel>& levels, double bytes) const;
  // [m, k] x [k, n], elements of so many bytes.
  double matmul(double m, double n, double k, int64_t element_size) const;
  // A kernel that only moves bytes.
  double elementwise(double bytes) const;
  // A product beside the collective that brings its operand (all_gather) or takes its result
  // (reduce_scatter, all_reduce: a scatter, then a gather that nothing hides), on `bytes` as in
  // collective(). Others are not hidden.
  double overlapped(Collective what, const std::vector<LinkLevel>& levels, double bytes,
                    double matmul_seconds) const;

  const LinkModel& link(const std::string& name) const;
};

}  // namespace torch_overlap::mesh
