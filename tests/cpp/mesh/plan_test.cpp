#include "torch_overlap/mesh/plan.h"

#include <numeric>

#include "mesh/draws.h"
#include "torch_overlap/mesh/simulate.h"

namespace torch_overlap::mesh {
namespace {

using testing::h200;

Array counted(const Shape& shape) {
  Array out{shape, std::vector<double>(static_cast<size_t>(num_elements(shape)))};
  std::iota(out.data.begin(), out.data.end(), 1);
  return out;
}

struct Reshape {
  std::string mesh;
  std::string from;
  std::string to;
  Shape shape;
};

// 1 us and 1 GB/s: plans do not depend on one machine's times of small tensors.
const CostModel& plain() {
  static const CostModel model = [] {
    CostModel out = CostModel::bandwidth_only(1e9);
    out.links[kNvlink].start = 1e-6;
    return out;
  }();
  return model;
}

Plan plan(const Reshape& c) {
  const Mesh mesh = Mesh::parse(c.mesh);
  return plan_reshard(Layout::parse(mesh, c.from), Layout::parse(mesh, c.to), c.shape, 4, plain());
}

std::string kinds(const Plan& plan) {
  std::string out;
  for (const Step& step : plan.steps) {
    if (!out.empty()) out += ' ';
    out += to_string(step.kind);
  }
  return out;
}

// The plan, executed on numbers, gives the same as slicing the whole array.
void expect_right(const Plan& plan) {
  const Array global = counted(plan.shape);
  const Locals after = simulate(plan, distribute(global, plan.from));
  EXPECT_EQ(collect(after, plan.to, plan.shape), global) << plan.explain();
}

TEST(Plan, KnownCases) {
  const struct {
    Reshape reshard;
    std::string steps;
  } cases[] = {
      {{"x=4", "[x],[]", "[x],[]", {8, 4}}, ""},                           // T22
      {{"x=2,y=2", "[],[]", "[x],[y]", {8, 8}}, "slice slice"},            // T23
      {{"x=2,y=2", "[x],[y]", "[],[]", {8, 8}}, "all_gather all_gather"},  // T24, T14
      {{"dp=4,tp=2", "[dp],[]", "[],[tp]", {8, 8}}, "slice all_gather"},   // T25
      {{"x=2,y=2", "[x],[y]", "[y],[x]", {4, 4}}, "permute"},              // T26
      {{"x=2,y=2", "[x,y]", "[y,x]", {8}}, "permute"},                     // B4
      {{"x=2,y=2", "[x]", "[y]", {8}}, "permute"},
      {{"x=2,y=4", "[x,y]", "[y,x]", {8}}, "permute"},  // B4, of two sizes
      {{"x=2,y=3,z=6", "[],[x,y],[z]", "[],[z],[y,x]", {4, 12, 12}}, "permute"},
      {{"x=4,y=2,z=2", "[x]", "[y,z]", {8}}, "permute"},  // z and y are added, x is removed
      {{"x=3,y=2,z=4", "[x,y,z]", "[x,z,y]", {24}}, "permute"},
      {{"x=4", "[x:(1)2,x:(2)2]", "[x:(2)2,x:(1)2]", {8}}, "permute"},
      {{"x=2,y=2", "[x]", "[x,y]", {8}}, "slice"},                       // B3
      {{"x=2,y=2", "[x],[]", "[x],[y]", {8, 8}}, "slice"},               // B3
      {{"dp=4", "[dp],[]", "[],[]", {8, 4}}, "all_gather"},              // T5
      {{"dp=2,tp=4", "[dp],[tp]", "[],[tp]", {8, 16}}, "all_gather"},    // T6
      {{"dp=4,tp=2", "[dp],[tp]", "[dp],[]", {8, 16}}, "all_gather"},    // T7
      {{"dp=2,tp=2", "[dp,tp]", "[]", {8}}, "all_gather"},               // B1: once
      {{"dp=4", "[],[] P{dp}", "[dp],[]", {8, 4}}, "reduce_scatter"},    // T8
      {{"dp=4", "[dp],[]", "[],[dp]", {8, 4}}, "all_to_all"},            // T10
      {{"dp=2,tp=4", "[dp],[]", "[],[dp]", {8, 8}}, "all_to_all"},       // B5
      {{"x=2,y=2", "[],[] P{y}", "[y],[]", {8, 4}}, "reduce_scatter"},   // B6
      {{"x=2,y=2", "[x],[] P{y}", "[],[] P{y}", {4, 4}}, "all_gather"},  // B8
      {{"x=2,y=2", "[],[] P{x,y}", "[],[]", {4, 4}}, "all_reduce"},      // B9: once
      {{"x=2,y=2", "[] P{x,y}", "[x,y]", {8}}, "reduce_scatter"},        // PP -> SS
      {{"x=2,y=2", "[] P{x}", "[x]", {1 << 20}}, "reduce_scatter"},
      {{"x=4", "[x:(1)2],[]", "[],[]", {8, 4}}, "all_gather"},  // B2
      {{"x=4", "[] P{x:(1)2}", "[]", {8}}, "all_reduce"},       // B2
      {{"x=4", "[x]", "[x:(1)2]", {8}}, "all_gather"},
      {{"x=4", "[x:(1)2],[x:(2)2]", "[x],[]", {8, 4}}, "all_to_all"},
      {{"x=2", "[]", "[] P{x}", {8}}, "make_partial"},
      {{"x=2", "[] P{x:max}", "[] P{x}", {8}}, "all_reduce make_partial"},
      {{"x=2,y=2", "[] I{x}", "[] I{y}", {8}}, "cast"},
      {{"x=1,y=2", "[x],[y]", "[],[y] P{x}", {8, 8}}, ""},  // no other rank
  };
  for (const auto& c : cases) {
    const Plan made = plan(c.reshard);
    EXPECT_EQ(kinds(made), c.steps) << made.explain();
    expect_right(made);
  }
}

// T26: device 1 of a 2x2 mesh ends with rows 2:4 and columns 0:2.
TEST(Plan, ASwapGivesEachRankItsPart) {
  const Plan made = plan({"x=2,y=2", "[x],[y]", "[y],[x]", {4, 4}});
  const Array global = counted({4, 4});
  const Locals after = simulate(made, distribute(global, made.from));
  EXPECT_EQ(after[1], part(global, {{2, 2}, {0, 2}}));
  EXPECT_DOUBLE_EQ(made.wire_bytes(), 4 * 4);  // its own part, once
}

// Every rank sends its part to one other rank: at most its bytes, once. If parts are uneven, axes
// of two sizes cut the dimension elsewhere, and no part of the result is one that a rank has.
TEST(Plan, AxesOfTwoSizesChangePlacesInOneStepWhereTheyDivide) {
  for (const auto& c : {Reshape{"x=2,y=4", "[x,y],[]", "[y,x],[]", {16, 3}},
                        Reshape{"z=2,x=2,y=3", "[z,x,y],[]", "[z,y,x],[]", {24, 3}},
                        Reshape{"x=2,y=2,z=4", "[x,y],[z]", "[z],[y,x]", {8, 4}}}) {
    const Plan made = plan(c);
    EXPECT_EQ(kinds(made), "permute") << made.explain();
    const Mesh mesh = Mesh::parse(c.mesh);
    const Shape local = largest_local_shape(Layout::parse(mesh, c.from), c.shape);
    EXPECT_DOUBLE_EQ(made.wire_bytes(), 4.0 * static_cast<double>(num_elements(local)));
    expect_right(made);
  }
  for (const auto& c : {Reshape{"x=2,y=4", "[x,y],[]", "[y,x],[]", {12, 8}},
                        Reshape{"z=2,x=2,y=3", "[z,x,y],[]", "[z,y,x],[]", {18, 8}}}) {
    const Plan made = plan(c);
    EXPECT_EQ(kinds(made).find("permute"), std::string::npos) << made.explain();
    expect_right(made);
  }
}

// T52-T55: the byte counts of the specification.
TEST(Plan, BytesAreThoseOfTheFormulas) {
  EXPECT_DOUBLE_EQ(wire_bytes(Collective::kAllReduce, 4, 1000), 1500);
  EXPECT_DOUBLE_EQ(wire_bytes(Collective::kAllReduce, 8, 1000), 1750);
  EXPECT_DOUBLE_EQ(wire_bytes(Collective::kAllGather, 4, 1000), 750);
  EXPECT_DOUBLE_EQ(wire_bytes(Collective::kReduceScatter, 4, 1000), 750);
  EXPECT_DOUBLE_EQ(wire_bytes(Collective::kAllToAll, 4, 1000), 750);
  EXPECT_DOUBLE_EQ(wire_bytes(Collective::kAllGather, 1, 1000), 0);
  const CostModel unit = CostModel::bandwidth_only();
  const CostModel twice = CostModel::bandwidth_only(2);
  const Mesh mesh = Mesh::parse("x=4,y=2");
  const auto time = [&](const CostModel& model, const char* from, const char* to,
                        int64_t element_size, Shape shape) {
    return plan_reshard(Layout::parse(mesh, from), Layout::parse(mesh, to), shape, element_size,
                        model)
        .seconds();
  };
  EXPECT_DOUBLE_EQ(time(unit, "[x]", "[]", 4, {250}), 0.75 * 4 * 252);  // parts of 63
  EXPECT_DOUBLE_EQ(time(unit, "[x]", "[]", 2, {256}), 0.75 * 512);      // by dtype
  EXPECT_DOUBLE_EQ(time(unit, "[x]", "[]", 2, {512}), 2 * time(unit, "[x]", "[]", 2, {256}));
  EXPECT_DOUBLE_EQ(time(twice, "[x]", "[]", 2, {256}), 0.75 * 256);
  EXPECT_DOUBLE_EQ(time(unit, "[] P{x}", "[]", 4, {250}), 1500);  // partial costs, unlike upstream
  EXPECT_DOUBLE_EQ(time(unit, "[] P{x,y}", "[]", 4, {250}), 1750);
  EXPECT_EQ(time(unit, "[]", "[x]", 4, {250}), 0);
  EXPECT_EQ(time(unit, "[]", "[]", 4, {250}), 0);
  EXPECT_GT(time(unit, "[x,y]", "[]", 4, {256}), time(unit, "[x]", "[]", 4, {256}));
  EXPECT_GT(time(unit, "[x,y]", "[]", 4, {256}), time(unit, "[y]", "[]", 4, {256}));
}

bool permutes_two_sizes(const Plan& plan) {
  return std::any_of(plan.steps.begin(), plan.steps.end(), [](const Step& step) {
    return step.kind == StepKind::kPermute &&
           !std::equal(step.axes.begin(), step.axes.end(), step.sources.begin(), step.sources.end(),
                       [](const AxisRef& a, const AxisRef& b) { return a.size == b.size; });
  });
}

TEST(Plan, IsRightAndNeverWorseThanTheGreedyOne) {
  testing::Draw draw(1);
  int better = 0;
  int two_sizes = 0;
  for (int i = 0; i < testing::draws(); ++i) {
    const Mesh mesh = draw.mesh(draw.chance(0.1) ? 5 : 3);
    const auto dims = static_cast<size_t>(draw.number(1, 3));
    const Layout from = draw.layout(mesh, dims);
    const bool is_reordered = draw.chance(0.3);
    const Layout to =
        is_reordered ? draw.reordered(from) : draw.layout(mesh, dims, draw.chance(0.2));
    const Shape shape = is_reordered ? draw.divided_shape(from) : draw.shape(dims);
    const Array global = counted(shape);
    for (const CostModel& cost : {h200(), CostModel::bandwidth_only()}) {
      const Plan best = plan_reshard(from, to, shape, 4, cost);
      const Plan greedy = greedy_reshard(from, to, shape, 4, cost);
      ASSERT_LE(best.seconds(), greedy.seconds()) << best.explain() << greedy.explain();
      better += static_cast<int>(best.seconds() < greedy.seconds());
      two_sizes += static_cast<int>(permutes_two_sizes(best));
      for (const Plan* one : {&best, &greedy}) {
        Locals locals;
        ASSERT_NO_THROW(locals = simulate(*one, distribute(global, from)))
            << one->explain() << "seed " << testing::seed();
        const Array back = collect(locals, to, shape);
        ASSERT_EQ(back, global) << one->explain() << "seed " << testing::seed();
        ASSERT_EQ(locals.size(), static_cast<size_t>(mesh.size()));
        if (!to.is_partial()) {
          ASSERT_EQ(locals, distribute(global, to)) << one->explain();
        }
      }
    }
  }
  EXPECT_GT(better, 0);
  EXPECT_GT(two_sizes, 0);
}

// Partial values differ on every rank, so that one reduction too many or too few is detected.
TEST(Plan, PendingValuesAreReducedOnce) {
  testing::Draw draw(2);
  for (int i = 0; i < testing::draws(); ++i) {
    const Mesh mesh = draw.mesh();
    const Layout from = draw.layout(mesh, 2);
    const Layout to = draw.layout(mesh, 2, false);
    const Shape shape = draw.shape(2);
    // Copies along the axes that are not partial are equal.
    const Array global = counted(shape);
    Locals locals = distribute(global, from);
    for (int64_t index = 0; index < mesh.size(); ++index) {
      double factor = 1;
      for (const Partial& p : from.partial()) {
        factor = factor * 5 + static_cast<double>(mesh.coordinate_at(index, p.axis));
      }
      locals[static_cast<size_t>(index)] = part(global, extents_at(from, shape, index));
      for (double& value : locals[static_cast<size_t>(index)].data) value *= factor;
    }
    const Array expected = collect(locals, from, shape);
    const Plan made = plan_reshard(from, to, shape, 8, h200());
    EXPECT_EQ(collect(simulate(made, locals), to, shape), expected) << made.explain();
  }
}

TEST(Plan, PartsOfAxesMeetWhereTheyDoNotFit) {
  for (const auto& c :
       {Reshape{"x=4", "[x]", "[x:(1)2,x:(2)2]", {10}},  // uneven: 3 3 3 1, 3 2 3 2
        Reshape{"x=4", "[x:(1)2]", "[x]", {5}}, Reshape{"x=6", "[x:(1)2]", "[x:(1)3]", {12}},
        Reshape{"x=12", "[x:(1)4],[x:(4)3]", "[],[x:(1)6]", {24, 12}},
        Reshape{"x=4,y=2", "[x,y],[]", "[y,x:(2)2],[x:(1)2]", {16, 5}}}) {
    expect_right(plan(c));
  }
}

// Every layout of a matrix over two axes, or two parts of one axis, in either order, each sharded,
// partial, invariant or replicated; and over the whole of `whole`, if it is not empty.
std::vector<Layout> layouts_over(const Mesh& mesh, const std::string& one, const std::string& two,
                                 const std::string& whole) {
  std::vector<Layout> out;
  const auto add = [&](const std::vector<std::string>& names, const std::vector<int>& places) {
    std::vector<AxisList> dims(2);
    std::vector<Partial> partial;
    AxisList invariant;
    for (size_t i = 0; i < names.size(); ++i) {
      const AxisRef ref = mesh.axis(names[i]);
      if (places[i] < 2) dims[static_cast<size_t>(places[i])].push_back(ref);
      if (places[i] == 2) partial.push_back({ref});
      if (places[i] == 3) invariant.push_back(ref);
    }
    const Layout made(mesh, dims, partial, invariant);
    if (std::find(out.begin(), out.end(), made) == out.end()) out.push_back(made);
  };
  for (int a = 0; a < 5; ++a) {
    for (int b = 0; b < 5; ++b) {
      add({one, two}, {a, b});
      add({two, one}, {a, b});
    }
    if (!whole.empty()) add({whole}, {a});
  }
  return out;
}

// True if all of the axis is invariant, or nothing of it.
bool is_uniform(const AxisRef& ref, const AxisList& invariant) {
  int64_t shared = 1;
  for (const AxisRef& other : invariant) {
    if (overlap(ref, other)) shared *= other.size;
  }
  return shared == 1 || shared >= ref.size;
}

// Sizes that the axes divide and sizes that they do not; every element is compared.
TEST(Plan, PartsOfAnAxisSplitOneAfterTheOther) {
  const struct {
    std::string mesh;
    std::string one;
    std::string two;
    std::string whole;
  } meshes[] = {{"x=4", "x:(1)2", "x:(2)2", "x"},
                {"x=6", "x:(1)2", "x:(2)3", "x:(1)3"},
                {"x=2,y=2", "x", "y", ""}};
  for (const auto& m : meshes) {
    const Mesh mesh = Mesh::parse(m.mesh);
    const std::vector<Layout> layouts = layouts_over(mesh, m.one, m.two, m.whole);
    for (const Shape& shape : {Shape{8, 4}, Shape{12, 6}, Shape{5, 7}, Shape{10, 3}}) {
      const Array global = counted(shape);
      for (const Layout& from : layouts) {
        for (const Layout& to : layouts) {
          for (const Plan& made : {plan_reshard(from, to, shape, 4, plain()),
                                   greedy_reshard(from, to, shape, 4, plain())}) {
            Locals after;
            ASSERT_NO_THROW(after = simulate(made, distribute(global, from))) << made.explain();
            ASSERT_EQ(collect(after, to, shape), global) << made.explain();
            for (const Step& step : made.steps) {
              ASSERT_EQ(step.ranks, size_of(step.axes)) << made.explain();
              for (const AxisRef& ref : step.axes) {
                ASSERT_TRUE(is_uniform(ref, step.before.invariant())) << made.explain();
                ASSERT_TRUE(is_uniform(ref, step.after.invariant())) << made.explain();
              }
            }
          }
        }
      }
    }
  }
}

TEST(Plan, PartsAreNamedAsAnAxisWhereItIsTheSame) {
  const struct {
    Reshape reshard;
    std::string step;
  } cases[] = {
      {{"x=4", "[x:(1)2,x:(2)2]", "[] I{x}", {8}}, "all_gather dim 0 over [x]"},
      {{"x=4", "[x:(1)2,x:(2)2]", "[] I{x}", {5}}, "all_gather dim 0 over [x:(1)2,x:(2)2]"},
      {{"x=4", "[x:(1)2,x:(2)2]", "[] I{x:(1)2}", {8}}, "all_gather dim 0 over [x:(1)2,x:(2)2]"},
      {{"x=4", "[] P{x}", "[x:(1)2,x:(2)2]", {8}}, "reduce_scatter sum to dim 0 over [x]"},
      {{"x=4", "[] P{x}", "[x:(1)2,x:(2)2]", {6}},
       "reduce_scatter sum to dim 0 over [x:(1)2,x:(2)2]"},
      {{"x=4", "[] P{x:(1)2,x:(2)2}", "[] I{x}", {5}}, "all_reduce sum over [x]"},
      {{"x=4", "[] P{x}", "[] I{x:(1)2}", {5}}, "all_reduce sum over [x:(1)2,x:(2)2]"},
      {{"x=4", "[]", "[] P{x:(1)2,x:(2)2}", {5}}, "make_partial sum over [x]"},
      {{"x=4", "[] I{x:(2)2}", "[] P{x}", {5}}, "make_partial sum over [x:(1)2,x:(2)2]"},
      {{"x=4", "[] I{x:(2)2}", "[] I{x}", {5}}, "cast [x:(1)2] to invariant"},
  };
  for (const auto& c : cases) {
    const Plan made = plan(c.reshard);
    ASSERT_FALSE(made.steps.empty()) << made.explain();
    EXPECT_EQ(made.steps.front().str(), c.step) << made.explain();
    expect_right(made);
  }
  const Mesh mesh = Mesh::parse("x=4");
  EXPECT_TRUE(plan({"x=4", "[] I{x:(1)2,x:(2)2}", "[] I{x}", {5}}).steps.empty());
}

TEST(Plan, ThousandsOfRanks) {
  const Mesh mesh = Mesh::parse("pp=4,dp=32,tp=8", 8);
  const Layout from = Layout::parse(mesh, "[dp],[tp]");
  const Layout to = Layout::parse(mesh, "[tp,dp],[]");
  const Plan made = plan_reshard(from, to, {512, 64}, 2, h200());
  const Array global = counted({512, 64});
  EXPECT_EQ(simulate(made, distribute(global, from)), distribute(global, to)) << made.explain();
}

TEST(Plan, SaysWhatItDoes) {
  const Plan made = plan({"dp=2,tp=4", "[dp],[] P{tp}", "[],[tp]", {1024, 1024}});
  const std::string text = made.explain();
  EXPECT_NE(text.find("[1024, 1024] [dp],[] P{tp} -> [],[tp] on Mesh(dp=2, tp=4): 2 collectives"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("1. reduce_scatter sum to dim 1 over [tp]: 4 ranks, sends 1.57 MB"),
            std::string::npos)
      << text;
  EXPECT_EQ(plan({"x=2", "[]", "[]", {4}}).explain(), "[4] [] -> [] on Mesh(x=2): nothing to do\n");
}

TEST(Plan, RefusesWhatDoesNotFit) {
  const Mesh mesh = Mesh::parse("x=2");
  const Layout one = Layout::parse(mesh, "[x]");
  EXPECT_ERROR(plan_reshard(one, Layout::parse(Mesh::parse("y=2"), "[y]"), {4}, 4, h200()), kValue,
               "two layouts of one mesh");
  EXPECT_ERROR(plan_reshard(one, one, {4, 4}, 4, h200()), kValue, "a shape of 1 dimensions");
  EXPECT_ERROR(plan_reshard(one, one, {4}, 0, h200()), kValue, "element size of at least 1");
  const Mesh odd({{"x", 2, "carrier_pigeon"}});
  EXPECT_ERROR(plan_reshard(Layout::parse(odd, "[x]"), Layout::parse(odd, "[]"), {4}, 4, h200()),
               kValue, "expected a link of [network, nvlink], got 'carrier_pigeon'");
}

}  // namespace
}  // namespace torch_overlap::mesh
