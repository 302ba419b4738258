#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/mesh/cost.h"
#include "torch_overlap/mesh/layout.h"

// Helpers of the planner's tests: random meshes, layouts and shapes, and checks of errors by their
// text.

namespace torch_overlap::mesh::testing {

// Seed of the run. It differs in every run and is printed with each failure, so that it can be
// repeated (TORCH_OVERLAP_TEST_SEED).
inline uint64_t seed() {
  static const uint64_t value = [] {
    const char* text = std::getenv("TORCH_OVERLAP_TEST_SEED");
    return text != nullptr ? std::strtoull(text, nullptr, 10) : std::random_device()();
  }();
  return value;
}

// Number of random cases that a property test draws: 500 times TORCH_OVERLAP_STRESS.
inline int draws() {
  const char* text = std::getenv("TORCH_OVERLAP_STRESS");
  return 500 * (text != nullptr ? std::max(1, std::atoi(text)) : 1);
}

inline const CostModel& h200() {
  static const CostModel model = CostModel::h200();
  return model;
}

class Draw {
 public:
  explicit Draw(uint64_t salt = 0) : engine_(seed() * 1000003 + salt) {}

  int64_t number(int64_t low, int64_t high) {  // both bounds included
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }
  bool chance(double probability) { return std::bernoulli_distribution(probability)(engine_); }
  double real() { return std::uniform_real_distribution<double>(-2, 2)(engine_); }
  template <typename T>
  const T& of(const std::vector<T>& items) {
    return items[static_cast<size_t>(number(0, static_cast<int64_t>(items.size()) - 1))];
  }
  template <typename T>
  void shuffle(std::vector<T>& items) {
    std::shuffle(items.begin(), items.end(), engine_);
  }

  // Returns a mesh of 1 to `most` axes and at most 24 ranks, sometimes in a permuted order.
  Mesh mesh(int64_t most = 3) {
    std::vector<Axis> axes;
    int64_t size = 1;
    const int64_t count = number(1, most);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t axis = of(std::vector<int64_t>{1, 2, 2, 2, 3, 4});
      if (size * axis > 24) continue;
      size *= axis;
      axes.push_back({std::string(1, static_cast<char>('a' + i)), axis});
    }
    std::vector<int64_t> ranks;
    for (int64_t i = 0; i < size; ++i) ranks.push_back(i);
    if (chance(0.3)) shuffle(ranks);
    return Mesh(std::move(axes), std::move(ranks));
  }
  // Each axis, or part of one, is sharded, partial or replicated at random.
  Layout layout(const Mesh& mesh, size_t dims, bool with_partial = true) {
    std::vector<AxisList> lists(dims);
    std::vector<Partial> partial;
    AxisList order;
    for (const Axis& axis : mesh.axes()) {
      AxisRef ref = mesh.axis(axis.name);
      if (ref.size == 4 && chance(0.5)) {
        order.push_back({ref.axis, 1, 2});
        ref = {ref.axis, 2, 2};
      }
      order.push_back(ref);
    }
    shuffle(order);
    const auto kind = of(std::vector<ReduceKind>{ReduceKind::kSum, ReduceKind::kSum,
                                                 ReduceKind::kMax, ReduceKind::kAvg});
    for (const AxisRef& ref : order) {
      const int64_t where = number(0, static_cast<int64_t>(dims) + 1);
      if (where < static_cast<int64_t>(dims)) {
        lists[static_cast<size_t>(where)].push_back(ref);
      } else if (with_partial && chance(0.5)) {
        partial.push_back({ref, kind});
      }
    }
    return Layout(mesh, std::move(lists), std::move(partial));
  }
  // Returns the layout with the axes of each dimension in another order; dimensions with the same
  // number of parts may be swapped. Nothing is partial.
  Layout reordered(const Layout& layout) {
    std::vector<AxisList> lists = layout.dims();
    for (size_t d = 0; d < lists.size(); ++d) {
      shuffle(lists[d]);
      const auto other = static_cast<size_t>(number(0, static_cast<int64_t>(d)));
      if (size_of(lists[d]) == size_of(lists[other])) std::swap(lists[d], lists[other]);
    }
    return Layout(layout.mesh(), std::move(lists));
  }
  // Sizes that the layout divides evenly.
  Shape divided_shape(const Layout& layout) {
    Shape out;
    for (const AxisList& axes : layout.dims()) out.push_back(number(1, 3) * size_of(axes));
    return out;
  }
  Shape shape(size_t dims, int64_t most = 13) {
    Shape out;
    for (size_t d = 0; d < dims; ++d)
      out.push_back(chance(0.5) ? 4 * number(1, 3) : number(1, most));
    return out;
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace torch_overlap::mesh::testing

// Expects that the statement raises an Error of this kind whose message contains this text.
#define EXPECT_ERROR(statement, expected_kind, text)                                      \
  do {                                                                                    \
    try {                                                                                 \
      statement;                                                                          \
      ADD_FAILURE() << "nothing was raised by " #statement;                               \
    } catch (const ::torch_overlap::Error& error) {                                       \
      EXPECT_EQ(error.kind(), ::torch_overlap::ErrorKind::expected_kind) << error.what(); \
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what(); \
    }                                                                                     \
  } while (false)
