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

// Returns the bytes that one of `ranks` sends for a collective on a tensor of `bytes`, the larger
// of its input and output. The factors are: all_reduce 2(n-1)/n; all_gather, reduce_scatter and
// all_to_all (n-1)/n; permute and broadcast 1; 0 for one rank.
TORCH_OVERLAP_API double wire_bytes(Collective collective, int64_t ranks, double bytes);

// Measured times of one collective on a number of ranks, in increasing order of bytes.
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
// bandwidth. With curves it takes the measured time; for another number of ranks, the time at equal
// wire bytes.
struct LinkModel {
  double start = 0;      // seconds of a collective on no data
  double latency = 0;    // seconds per step of a ring
  double bandwidth = 1;  // bytes per second that one rank sends while it receives at the same rate
  std::vector<Curve> curves = {};
};

// One GPU. A matrix product is split into tiles, which the processors execute in waves.
struct DeviceModel {
  std::map<int64_t, double> flops = {};  // sustained flop/s by element size in bytes
  double flops_hot = 1;  // share of `flops` that products of at least 2 Tflop sustain (power)
  double memory = 1;     // bytes per second, reads and writes
  int64_t processors = 1;
  double kernel = 0;   // minimum seconds of any kernel
  bool tiles = false;  // round up to whole waves of tiles
};

// Overlap of a product and its communication.
struct OverlapModel {
  double contention = 0;  // relative slowdown of a product while data is transferred
  double start = 0;       // seconds before the first byte moves
  double step = 0;        // additional seconds for the chunk of each rank after the first two
};

// Costs in seconds. A plain value without state, which docs and files can show.
struct TORCH_OVERLAP_API CostModel {
  std::string name;
  std::map<std::string, LinkModel> links;
  DeviceModel device;
  OverlapModel overlap;

  // Returns a model of wire bytes / bandwidth on every link and nothing else, as the specification
  // counts.
  static CostModel bandwidth_only(double bandwidth = 1.0);
  // Returns a model measured on H200s: NVLink without multicast, NCCL 2.28.9, cuBLASLt. The network
  // between hosts (one 400 Gbit/s adapter per GPU) is assumed, not measured.
  static CostModel h200();

  // Errors: a negative or non-finite number, curves that are not increasing.
  void check() const;

  // Returns the time of one collective over the levels of a group (Mesh::links). The levels run
  // concurrently, each with its share of the data: the time is that of the slowest one plus all
  // latencies except the largest.
  double collective(Collective what, const std::vector<LinkLevel>& levels, double bytes) const;
  // Returns the time of [m, k] x [k, n], with elements of `element_size` bytes.
  double matmul(double m, double n, double k, int64_t element_size) const;
  // Returns the time of a kernel that only reads and writes memory.
  double elementwise(double bytes) const;
  // Returns the time of a product overlapped with the collective that gathers its operand
  // (all_gather) or reduces its result (reduce_scatter; all_reduce: a scatter, then a gather that
  // is not overlapped), on `bytes` as in collective(). Other collectives do not overlap.
  double overlapped(Collective what, const std::vector<LinkLevel>& levels, double bytes,
                    double matmul_seconds) const;

  const LinkModel& link(const std::string& name) const;
};

}  // namespace torch_overlap::mesh
