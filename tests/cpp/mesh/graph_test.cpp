#include "torch_overlap/mesh/graph.h"

#include "mesh/draws.h"

namespace torch_overlap::mesh {
namespace {

using testing::h200;

Constraint said(const Mesh& mesh, const std::string& text, bool is_open, int64_t priority = 0) {
  Constraint out = Constraint::fixed(Layout::parse(mesh, text));
  for (DimConstraint& dim : out.dims) {
    dim.is_open = is_open;
    dim.priority = dim.axes.empty() ? 0 : priority;
    if (dim.axes.empty()) dim.is_open = true;
  }
  return out;
}

std::string dims_of(const Graph& graph, size_t value, int64_t max_priority = 1000) {
  return Layout(graph.mesh(), propagate_dims(graph, max_priority)[value]).str();
}

OpRule add(const Shape& shape) {
  return elementwise_rule("add", {shape, shape}, Elementwise::kAdd);
}
OpRule relu(const Shape& shape) {
  return elementwise_rule("relu", {shape}, Elementwise::kNonlinear);
}

// T49-T50.
TEST(Graph, StrongerPrioritiesAreHeardFirst) {
  const Mesh mesh = Mesh::parse("x=2,y=2");
  Graph graph(mesh);
  const size_t a = graph.add_value({"a", {8, 8}, 4, said(mesh, "[x],[]", true, 1)});
  const size_t b = graph.add_value({"b", {8, 8}, 4, said(mesh, "[y],[]", true, 0)});
  const size_t c = graph.add_node(add({8, 8}), {a, b}, {"c"}, 4)[0];
  EXPECT_EQ(dims_of(graph, c), "[y],[]");
  EXPECT_EQ(dims_of(graph, b), "[y],[]");
  EXPECT_EQ(dims_of(graph, a, 0), "[y],[]");  // x has no effect yet
  Graph alone(mesh);
  const size_t d = alone.add_value({"d", {8, 8}, 4, said(mesh, "[x],[]", true, 1)});
  const size_t e = alone.add_node(relu({8, 8}), {d}, {"e"}, 4)[0];
  EXPECT_EQ(dims_of(alone, e, 0), "[],[]");   // ignored,
  EXPECT_EQ(dims_of(alone, e, 1), "[x],[]");  // then applied
}

// T51.
TEST(Graph, ChainsPassAxesOnBothWays) {
  const Mesh mesh = Mesh::parse("x=2,y=2");
  for (const bool from_the_end : {false, true}) {
    Graph graph(mesh);
    size_t v = graph.add_value({"v0", {8, 8}});
    std::vector<size_t> chain{v};
    for (int i = 1; i <= 3; ++i) {
      v = graph.add_node(relu({8, 8}), {v}, {concat("v", i)}, 4)[0];
      chain.push_back(v);
    }
    graph.constrain(from_the_end ? chain.back() : chain.front(), said(mesh, "[x],[]", false));
    for (const size_t each : chain) EXPECT_EQ(dims_of(graph, each), "[x],[]");
  }
}

// T51: a closed dimension holds back nothing but itself.
TEST(Graph, DisagreementKeepsTheCommonBeginning) {
  const Mesh mesh = Mesh::parse("x=2,y=2,z=2");
  Graph graph(mesh);
  const size_t a = graph.add_value({"a", {8}, 4, Constraint::fixed(Layout::parse(mesh, "[x,y]"))});
  const size_t b = graph.add_value({"b", {8}, 4, Constraint::fixed(Layout::parse(mesh, "[x,z]"))});
  const size_t c = graph.add_node(add({8}), {a, b}, {"c"}, 4)[0];
  EXPECT_EQ(dims_of(graph, c), "[x]");
  graph.constrain(b, Constraint::fixed(Layout::parse(mesh, "[x]")));  // closed: it does not change
  EXPECT_EQ(dims_of(graph, c), "[x,y]");
  EXPECT_EQ(dims_of(graph, b), "[x]");
}

TEST(Graph, ClosedDimensionsStayAsTheyAre) {
  const Mesh mesh = Mesh::parse("x=2");
  Graph graph(mesh);
  const size_t a =
      graph.add_value({"a", {8, 8}, 4, Constraint::fixed(Layout::parse(mesh, "[],[x]"))});
  const size_t b =
      graph.add_value({"b", {8, 8}, 4, Constraint::fixed(Layout::parse(mesh, "[],[]"))});
  const size_t w = graph.add_value({"w", {8, 8}});
  graph.add_node(matmul_rule({8, 8}, {8, 8}), {a, b}, {"ab"}, 4);
  graph.add_node(matmul_rule({8, 8}, {8, 8}), {a, w}, {"aw"}, 4);
  EXPECT_EQ(dims_of(graph, b), "[],[]");
  EXPECT_EQ(dims_of(graph, w), "[x],[]");  // k is a's
}

// T48.
TEST(Graph, AFixedOutputReachesBack) {
  const Mesh mesh = Mesh::parse("d=4");
  Graph graph(mesh);
  const size_t a = graph.add_value({"a", {1024, 1024}});
  const size_t w = graph.add_value({"w", {1024, 1024}});
  const size_t b = graph.add_value({"b", {1024, 1024}});
  const size_t y = graph.add_node(matmul_rule({1024, 1024}, {1024, 1024}), {a, w}, {"y"}, 4)[0];
  const size_t z = graph.add_node(add({1024, 1024}), {y, b}, {"z"}, 4)[0];
  graph.constrain(z, Constraint::fixed(Layout::parse(mesh, "[d],[]")));
  EXPECT_EQ(dims_of(graph, y), "[d],[]");
  EXPECT_EQ(dims_of(graph, a), "[d],[]");
  EXPECT_EQ(dims_of(graph, w), "[],[]");
  const GraphPlan plan = plan_graph(graph, h200());
  EXPECT_EQ(plan.num_sends(), 0) << explain(graph, plan);
  EXPECT_EQ(plan.layouts[z].str(), "[d],[]");
}

TEST(Graph, WhatWasGatheredOnceIsThere) {
  const Mesh mesh = Mesh::parse("tp=2");
  const Layout rows = Layout::parse(mesh, "[tp],[]");
  const Layout columns = Layout::parse(mesh, "[],[tp]");
  Graph graph(mesh);
  const size_t x = graph.add_value({"x", {8192, 4096}, 2, Constraint::fixed(rows)});
  std::vector<size_t> projections;
  for (const char* name : {"wq", "wk", "wv"}) {
    const size_t w = graph.add_value({name, {4096, 4096}, 2, Constraint::fixed(columns)});
    const OpRule rule = matmul_rule({8192, 4096}, {4096, 4096});
    const size_t y = graph.add_node(rule, {x, w}, {concat(name, "x")}, 2)[0];
    graph.constrain(y, Constraint::fixed(columns));
  }
  const GraphPlan plan = plan_graph(graph, h200());
  EXPECT_EQ(plan.num_sends(), 1) << explain(graph, plan);
}

TEST(Graph, AMegatronBlockHasTwoCollectives) {
  const Mesh mesh = Mesh::parse("tp=4");
  Graph graph(mesh);
  const int64_t s = 4096, d = 4096;
  const auto fixed = [&](const char* text) { return Constraint::fixed(Layout::parse(mesh, text)); };
  const size_t x = graph.add_value({"x", {s, d}, 2, fixed("[tp],[]")});
  const size_t up = graph.add_value({"up", {4 * d, d}, 2, fixed("[tp],[]"), true});
  const size_t down = graph.add_value({"down", {d, 4 * d}, 2, fixed("[],[tp]"), true});
  const size_t h = graph.add_node(linear_rule({s, d}, {4 * d, d}, false), {x, up}, {"h"}, 2)[0];
  const size_t g = graph.add_node(relu({s, 4 * d}), {h}, {"g"}, 2)[0];
  const size_t y =
      graph.add_node(linear_rule({s, 4 * d}, {d, 4 * d}, false), {g, down}, {"y"}, 2)[0];
  graph.constrain(y, fixed("[tp],[]"));
  const GraphPlan plan = plan_graph(graph, h200());
  const std::string text = explain(graph, plan);
  EXPECT_EQ(plan.num_sends(), 2) << text;
  EXPECT_NE(text.find("all_gather dim 0 over [tp]"), std::string::npos) << text;
  EXPECT_NE(text.find("reduce_scatter sum to dim 0 over [tp]"), std::string::npos) << text;
}

TEST(Graph, RefusesWhatDoesNotFit) {
  const Mesh mesh = Mesh::parse("x=2");
  Graph graph(mesh);
  const size_t a = graph.add_value({"a", {8, 8}});
  EXPECT_ERROR(graph.add_node(relu({8, 4}), {a}, {"b"}, 4), kValue, "relu: expected shape [8, 4]");
  EXPECT_ERROR(graph.add_node(relu({8, 8}), {a, a}, {"b"}, 4), kValue, "expected 1 inputs, got 2");
  EXPECT_ERROR(graph.add_node(relu({8, 8}), {7}, {"b"}, 4), kValue, "expected one of 1 values");
  EXPECT_ERROR(graph.add_value({"c", {8}, 4, Constraint::fixed(Layout::parse(mesh, "[],[]"))}),
               kValue, "a constraint of 1 dimensions for 'c', got 2");
  EXPECT_ERROR(graph.add_value({"c", {8}, 0}), kValue, "element size of at least 1 for 'c'");
}

}  // namespace
}  // namespace torch_overlap::mesh
