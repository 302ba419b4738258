#include "torch_overlap/mesh/auto_shard.h"

#include "mesh/draws.h"

namespace torch_overlap::mesh {
namespace {

using testing::h200;

// T46: no layout is given; the rows are split, nothing moves.
TEST(AutoShard, AProductIsSplitByRows) {
  Graph graph(Mesh::parse("d=4"));
  const size_t a = graph.add_value({"a", {1024, 1024}});
  const size_t b = graph.add_value({"b", {1024, 1024}});
  const size_t c = graph.add_node(matmul_rule({1024, 1024}, {1024, 1024}), {a, b}, {"c"}, 4)[0];
  const AutoShard found = auto_shard(graph, h200());
  EXPECT_EQ(found.plan.layouts[a].str(), "[d],[]") << found.explain(graph);
  EXPECT_EQ(found.plan.layouts[b].str(), "[],[]");
  EXPECT_EQ(found.plan.layouts[c].str(), "[d],[]");
  EXPECT_EQ(found.plan.num_sends(), 0);
  EXPECT_NE(found.explain(graph).find("d on m"), std::string::npos) << found.explain(graph);
  EXPECT_NE(found.explain(graph).find("not replicated inputs"), std::string::npos);
}

// T47: three rows are not split over four ranks; a weight that is sharded along k is not moved.
TEST(AutoShard, AFlatProductIsSplitByItsInnerDimension) {
  const Mesh mesh = Mesh::parse("d=4");
  Graph graph(mesh);
  const size_t a = graph.add_value({"a", {3, 4096}});
  const size_t b =
      graph.add_value({"b", {4096, 1024}, 4, Constraint::fixed(Layout::parse(mesh, "[d],[]"))});
  const size_t c = graph.add_node(matmul_rule({3, 4096}, {4096, 1024}), {a, b}, {"c"}, 4)[0];
  graph.constrain(c, Constraint::fixed(Layout::parse(mesh, "[],[]")));
  const AutoShard found = auto_shard(graph, h200());
  EXPECT_EQ(found.plan.layouts[a].str(), "[],[d]") << found.explain(graph);
  EXPECT_EQ(found.plan.layouts[c].str(), "[],[] P{d}");
  EXPECT_EQ(found.plan.num_sends(), 1);
  EXPECT_EQ(found.plan.results[0].second.steps[0].kind, StepKind::kAllReduce);
}

// Upstream has no split by columns; without given layouts it moves nothing.
TEST(AutoShard, AFlatProductMayBeSplitByColumns) {
  Graph graph(Mesh::parse("d=4"));
  const size_t a = graph.add_value({"a", {64, 8192}});
  const size_t b = graph.add_value({"b", {8192, 8192}});
  const size_t c = graph.add_node(matmul_rule({64, 8192}, {8192, 8192}), {a, b}, {"c"}, 4)[0];
  const AutoShard found = auto_shard(graph, h200());
  EXPECT_EQ(found.plan.layouts[c].str(), "[],[d]") << found.explain(graph);
  EXPECT_EQ(found.plan.num_sends(), 0);
}

// T48.
TEST(AutoShard, AFixedOutputDecidesTheProduct) {
  const Mesh mesh = Mesh::parse("d=4");
  for (const char* wanted : {"[d],[]", "[],[d]"}) {
    Graph graph(mesh);
    const size_t a = graph.add_value({"a", {1024, 1024}});
    const size_t b = graph.add_value({"b", {1024, 1024}});
    const size_t bias = graph.add_value({"bias", {1024, 1024}});
    const size_t c = graph.add_node(matmul_rule({1024, 1024}, {1024, 1024}), {a, b}, {"c"}, 4)[0];
    const OpRule add = elementwise_rule("add", {{1024, 1024}, {1024, 1024}}, Elementwise::kAdd);
    const size_t d = graph.add_node(add, {c, bias}, {"d"}, 4)[0];
    graph.constrain(d, Constraint::fixed(Layout::parse(mesh, wanted)));
    const AutoShard found = auto_shard(graph, h200());
    EXPECT_EQ(found.plan.layouts[c].str(), wanted) << found.explain(graph);
    EXPECT_EQ(found.plan.num_sends(), 0);
  }
}

Graph mlp(const Mesh& mesh, int64_t rows, int64_t dim, const char* input) {
  Graph graph(mesh);
  const Constraint fixed = Constraint::fixed(Layout::parse(mesh, input));
  const size_t x = graph.add_value({"x", {rows, dim}, 2, fixed});
  const size_t up = graph.add_value({"up", {4 * dim, dim}, 2, std::nullopt, true});
  const size_t down = graph.add_value({"down", {dim, 4 * dim}, 2, std::nullopt, true});
  const OpRule gelu = elementwise_rule("gelu", {{rows, 4 * dim}}, Elementwise::kNonlinear);
  const size_t h =
      graph.add_node(linear_rule({rows, dim}, {4 * dim, dim}, false), {x, up}, {"h"}, 2)[0];
  const size_t g = graph.add_node(gelu, {h}, {"g"}, 2)[0];
  const size_t y =
      graph.add_node(linear_rule({rows, 4 * dim}, {dim, 4 * dim}, false), {g, down}, {"y"}, 2)[0];
  graph.constrain(y, fixed);
  return graph;
}

TEST(AutoShard, AnMlpOnReplicatedRowsIsColumnsThenRows) {
  const Mesh mesh = Mesh::parse("tp=4");
  const Graph graph = mlp(mesh, 8192, 4096, "[],[]");
  const AutoShard found = auto_shard(graph, h200());
  const std::string text = found.explain(graph);
  // A split by rows computes at the same cost, but the result has to be gathered afterwards.
  EXPECT_LE(found.plan.seconds(), found.alternatives[1].plan.seconds());
  EXPECT_EQ(found.plan.num_sends(), 1) << text;
}

TEST(AutoShard, TrainingCountsGradients) {
  // Few rows and large weights: sharded rows need a reduction of every weight's gradient.
  const Mesh mesh = Mesh::parse("tp=4");
  const Graph graph = mlp(mesh, 1024, 8192, "[],[]");
  const AutoShard found = auto_shard(graph, h200(), {.training = true});
  EXPECT_EQ(found.plan.layouts[1].str(), "[tp],[]") << found.explain(graph);
  EXPECT_EQ(found.plan.layouts[2].str(), "[],[tp]");
  // Many rows that are already sharded, small weights: the weights stay whole.
  const Graph wide = mlp(mesh, 1 << 18, 256, "[tp],[]");
  const AutoShard rows = auto_shard(wide, h200(), {.training = true});
  EXPECT_EQ(rows.plan.layouts[1].str(), "[],[]") << rows.explain(wide);
  EXPECT_EQ(rows.plan.num_sends(), 0);
  EXPECT_GT(rows.plan.gradients, 0);
}

TEST(AutoShard, IsDeterministic) {
  const Mesh mesh = Mesh::parse("dp=2,tp=4", 4);
  const Graph graph = mlp(mesh, 8192, 4096, "[dp],[]");
  const std::string first = auto_shard(graph, h200()).explain(graph);
  EXPECT_EQ(auto_shard(graph, h200()).explain(graph), first);
  EXPECT_NE(first.find("chosen: "), std::string::npos) << first;
}

TEST(AutoShard, RefusesWhatDoesNotFit) {
  Graph graph(Mesh::parse("x=2"));
  EXPECT_ERROR(auto_shard(graph, h200()), kValue, "at least one operator");
  graph.add_node(elementwise_rule("relu", {{4}}, Elementwise::kNonlinear),
                 {graph.add_value({"a", {4}})}, {"b"}, 4);
  EXPECT_ERROR(auto_shard(graph, h200(), {.width = 0}), kValue, "at least 1, got 0");
}

}  // namespace
}  // namespace torch_overlap::mesh
