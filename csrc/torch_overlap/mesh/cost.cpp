#include "torch_overlap/mesh/cost.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "torch_overlap/base/errors.h"

namespace torch_overlap::mesh {
namespace {

constexpr std::array<std::string_view, 6> kCollectiveNames{
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast"};

double num_hops(Collective what, int64_t ranks) {
  switch (what) {
    case Collective::kAllReduce:
      return 2.0 * static_cast<double>(ranks - 1);
    case Collective::kPermute:
      return 1;
    default:
      return static_cast<double>(ranks - 1);
  }
}

// Interpolates between points. Below the first point the line runs to `start`; above the last point
// it is extrapolated.
double interpolate(const std::vector<Curve::Point>& points, double start, double bytes) {
  Curve::Point high = points.front();
  Curve::Point low{0, std::min(start, high.seconds)};
  for (size_t i = 1; i < points.size() && bytes > high.bytes; ++i) {
    low = high;
    high = points[i];
  }
  return low.seconds +
         (high.seconds - low.seconds) * (bytes - low.bytes) / (high.bytes - low.bytes);
}

const Curve* nearest_curve(const LinkModel& link, Collective what, int64_t ranks) {
  const Curve* best = nullptr;
  double distance = std::numeric_limits<double>::infinity();
  for (const Curve& curve : link.curves) {
    if (curve.collective != what) continue;
    const double d = std::abs(std::log2(static_cast<double>(curve.ranks)) -
                              std::log2(static_cast<double>(ranks)));
    if (d < distance) {
      distance = d;
      best = &curve;
    }
  }
  return best;
}

double link_seconds(const LinkModel& link, Collective what, int64_t ranks, double bytes) {
  if (const Curve* curve = nearest_curve(link, what, ranks)) {
    const double equivalent_bytes =
        bytes * wire_bytes(what, ranks, 1) / wire_bytes(what, curve->ranks, 1);
    const double extra_hops = num_hops(what, ranks) - num_hops(what, curve->ranks);
    return std::max(
        0.0, interpolate(curve->points, link.start, equivalent_bytes) + extra_hops * link.latency);
  }
  return link.start + num_hops(what, ranks) * link.latency +
         wire_bytes(what, ranks, bytes) / link.bandwidth;
}

void check_number(const std::string& model, std::string_view what, double value, bool positive) {
  TORCH_OVERLAP_CHECK(std::isfinite(value) && (positive ? value > 0 : value >= 0), kValue,
                      "CostModel '", model, "': expected ", what,
                      positive ? " above 0, got " : " of at least 0, got ", value);
}

// A tile of a product, and the fraction of the peak that its inner loop reaches.
struct Tile {
  double rows;
  double columns;
  double efficiency;
};
constexpr Tile kTiles[] = {{128, 256, 1.0},  {256, 128, 1.0}, {128, 192, 0.96},
                           {128, 128, 0.90}, {64, 256, 0.88}, {64, 128, 0.75}};

}  // namespace

std::string_view to_string(Collective collective) {
  const auto index = static_cast<size_t>(collective);
  TORCH_OVERLAP_CHECK(index < kCollectiveNames.size(), kValue,
                      "Collective: expected one of them, got ", index);
  return kCollectiveNames[index];
}

Collective parse_collective(std::string_view name) {
  const auto found = std::find(kCollectiveNames.begin(), kCollectiveNames.end(), name);
  if (found != kCollectiveNames.end())
    return static_cast<Collective>(found - kCollectiveNames.begin());
  fail(ErrorKind::kValue,
       "Collective: expected all_reduce, all_gather, reduce_scatter, all_to_all, ",
       "permute or broadcast, got '", name, "'");
}

double wire_bytes(Collective collective, int64_t ranks, double bytes) {
  if (ranks <= 1) return 0;
  const double others = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
  switch (collective) {
    case Collective::kAllReduce:
      return 2 * others * bytes;
    case Collective::kPermute:
    case Collective::kBroadcast:
      return bytes;
    default:
      return others * bytes;
  }
}

CostModel CostModel::bandwidth_only(double bandwidth) {
  CostModel model;
  model.name = "bandwidth_only";
  model.links[kNvlink].bandwidth = bandwidth;
  model.links[kNetwork].bandwidth = bandwidth;
  model.device.flops = {{1, 1}};
  model.check();
  return model;
}

void CostModel::check() const {
  for (const auto& [link_name, link] : links) {
    check_number(name, concat("the start of '", link_name, "'"), link.start, false);
    check_number(name, concat("the latency of '", link_name, "'"), link.latency, false);
    check_number(name, concat("the bandwidth of '", link_name, "'"), link.bandwidth, true);
    for (const Curve& curve : link.curves) {
      const std::string what =
          concat("curve ", to_string(curve.collective), " on '", link_name, "'");
      TORCH_OVERLAP_CHECK(curve.ranks >= 2 && !curve.points.empty(), kValue, "CostModel '", name,
                          "': expected points for 2 ranks or more in ", what, ", got ",
                          curve.points.size(), " points for ", curve.ranks, " ranks");
      double bytes = 0;
      double seconds = 0;
      for (const Curve::Point& point : curve.points) {
        check_number(name, what, point.bytes, true);
        check_number(name, what, point.seconds, true);
        TORCH_OVERLAP_CHECK(point.bytes > bytes && point.seconds >= seconds, kValue, "CostModel '",
                            name, "': expected rising bytes and times in ", what, ", got ",
                            point.bytes, " bytes in ", point.seconds, " s after ", bytes,
                            " bytes in ", seconds, " s");
        bytes = point.bytes;
        seconds = point.seconds;
      }
    }
  }
  TORCH_OVERLAP_CHECK(!device.flops.empty(), kValue, "CostModel '", name,
                      "': expected the flop/s of at least one element size, got none");
  for (const auto& [size, flops] : device.flops) {
    check_number(name, concat("flop/s of ", size, "-byte elements"), flops, true);
  }
  check_number(name, "flops_hot", device.flops_hot, true);
  check_number(name, "memory", device.memory, true);
  check_number(name, "processors", static_cast<double>(device.processors), true);
  check_number(name, "kernel", device.kernel, false);
  check_number(name, "contention", overlap.contention, false);
  check_number(name, "start", overlap.start, false);
  check_number(name, "step", overlap.step, false);
}

const LinkModel& CostModel::link(const std::string& link_name) const {
  const auto found = links.find(link_name);
  if (found != links.end()) return found->second;
  std::vector<std::string> known;
  for (const auto& [known_name, link] : links) known.push_back(known_name);
  fail(ErrorKind::kValue, "CostModel '", name, "': expected a link of ", list_string(known),
       ", got '", link_name, "'; add it to the model or name another in the mesh");
}

double CostModel::collective(Collective what, const std::vector<LinkLevel>& levels,
                             double bytes) const {
  if (levels.empty()) return 0;
  if (levels.size() == 1) {
    return link_seconds(link(levels[0].link), what, levels[0].size, bytes);
  }
  // Fast links come first: a slower link carries the data divided by the ranks of the faster
  // levels.
  std::vector<std::pair<const LinkModel*, int64_t>> sorted;
  double ranks = 1;
  for (const LinkLevel& level : levels) {
    sorted.emplace_back(&link(level.link), level.size);
    ranks *= static_cast<double>(level.size);
  }
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    return a.first->bandwidth > b.first->bandwidth;
  });
  double slowest = 0;
  double latency = 0;
  double max_latency = 0;
  double inner = 1;  // number of ranks joined by the faster levels
  for (const auto& [model, size] : sorted) {
    const double outer = inner * static_cast<double>(size);
    double carried_bytes = bytes / inner;
    if (what == Collective::kAllToAll) {  // data for the ranks that this level adds
      carried_bytes = bytes * (outer - inner) / ranks / wire_bytes(what, size, 1);
    } else if (what == Collective::kPermute || what == Collective::kBroadcast) {
      carried_bytes = bytes;
    }
    const double own_latency = num_hops(what, size) * model->latency;
    slowest = std::max(slowest, link_seconds(*model, what, size, carried_bytes));
    latency += own_latency;
    max_latency = std::max(max_latency, own_latency);
    inner = outer;
  }
  return slowest + latency - max_latency;
}

double CostModel::matmul(double m, double n, double k, int64_t element_size) const {
  if (m == 0 || n == 0) return 0;
  auto entry = device.flops.lower_bound(element_size);
  if (entry == device.flops.end()) --entry;
  const double flops = 2 * m * n * k;
  const double bytes = (m * k + k * n + m * n) * static_cast<double>(element_size);
  const double throttling = std::clamp(flops / 1e12 - 1, 0.0, 1.0);
  const double rate = entry->second * (1 - throttling * (1 - device.flops_hot));
  double compute = flops / rate;
  if (device.tiles) {
    compute = std::numeric_limits<double>::infinity();
    const auto processors = static_cast<double>(device.processors);
    for (const Tile& tile : kTiles) {
      const double tiles = std::ceil(m / tile.rows) * std::ceil(n / tile.columns);
      // With too few tiles for all processors, several processors split k, and their sums are
      // added.
      for (const double split : {1.0, 2.0, 4.0, 8.0}) {
        if (split > 1 && tiles * split > processors) break;
        const double waves = std::ceil(tiles * split / processors);
        const double wave =
            2 * tile.rows * tile.columns * k * processors / (rate * tile.efficiency) / split;
        const double sums = split > 1 ? split * m * n * 4 * 2 / device.memory : 0;
        compute = std::min(compute, waves * wave + sums);
      }
    }
  }
  return device.kernel + std::max(compute, bytes / device.memory);
}

double CostModel::elementwise(double bytes) const { return device.kernel + bytes / device.memory; }

double CostModel::overlapped(Collective what, const std::vector<LinkLevel>& levels, double bytes,
                             double matmul_seconds) const {
  const double alone = collective(what, levels, bytes);
  double ranks = 1;
  for (const LinkLevel& level : levels) ranks *= static_cast<double>(level.size);
  // The received data is read, and the sum is written.
  const double sum = (ranks + 1) * bytes / ranks / device.memory;
  const auto beside = [&](double moving) {
    const double chunks = moving + overlap.step * std::max(ranks - 2, 0.0);
    return overlap.start + std::max(chunks, matmul_seconds * (1 + overlap.contention));
  };
  switch (what) {
    case Collective::kAllGather:
      return beside(alone);
    case Collective::kReduceScatter:
      return beside(alone) + sum;
    case Collective::kAllReduce:  // gathered into the peers' buffers, then copied
      return beside(alone / 2) + sum + alone / 2 + 2 * bytes / device.memory;
    default:
      return alone + matmul_seconds;
  }
}

}  // namespace torch_overlap::mesh
