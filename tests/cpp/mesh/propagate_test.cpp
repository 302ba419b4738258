#include "torch_overlap/mesh/propagate.h"

#include <cmath>

#include "mesh/evaluate.h"

namespace torch_overlap::mesh {
namespace {

using testing::Body;

using testing::h200;

Propagation run(const OpRule& rule, const Mesh& mesh, const std::vector<std::string>& inputs,
                const std::vector<std::string>& wanted = {}) {
  std::vector<Layout> layouts;
  for (const std::string& text : inputs) layouts.push_back(Layout::parse(mesh, text));
  PropagateOptions options;
  for (const std::string& text : wanted) options.wanted.push_back(Layout::parse(mesh, text));
  const std::vector<int64_t> sizes(rule.inputs.size() + rule.outputs.size(), 4);
  return propagate(rule, layouts, sizes, h200(), options);
}

std::string sends(const Propagation& p) {
  std::string out;
  for (const Plan& plan : p.plans) {
    for (const Step& step : plan.steps) {
      if (step.sends()) out += concat(out.empty() ? "" : " ", to_string(step.kind));
    }
  }
  return out;
}

struct Case {
  const char* mesh;
  OpRule rule;
  std::vector<std::string> inputs;
  const char* sends;
  const char* output;
};

void expect(const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    const Propagation p = run(c.rule, Mesh::parse(c.mesh), c.inputs);
    EXPECT_EQ(sends(p), c.sends) << p.explain();
    EXPECT_EQ(p.chosen.outputs[0].str(), c.output) << p.explain();
  }
}

OpRule mm(int64_t m = 64, int64_t k = 64, int64_t n = 64) { return matmul_rule({m, k}, {k, n}); }
// Large enough that the cost of bytes dominates the cost of each message.
OpRule ew(const char* op, Elementwise how, int inputs = 1) {
  return elementwise_rule(op, std::vector<Shape>(static_cast<size_t>(inputs), {4096, 4096}), how);
}

TEST(Propagate, Products) {
  expect({
      {"tp=2", mm(), {"[],[]", "[],[tp]"}, "", "[],[tp]"},                          // T27
      {"tp=2", mm(4, 8, 4), {"[],[tp]", "[tp],[]"}, "", "[],[] P{tp}"},             // T28: deferred
      {"dp=8", mm(), {"[dp],[]", "[],[]"}, "", "[dp],[]"},                          // T32
      {"data=2,model=4", mm(), {"[data],[]", "[],[model]"}, "", "[data],[model]"},  // T33
      {"data=4,model=2", mm(), {"[data],[]", "[],[model]"}, "", "[data],[model]"},
      {"x=4", matmul_rule({64}, {64, 32}), {"[x]", "[x],[]"}, "", "[] P{x}"},  // T34
      {"x=4", matmul_rule({32, 64}, {64}), {"[x],[]", "[]"}, "", "[x]"},
      {"x=4", matmul_rule({8, 16, 16}, {16, 16}), {"[x],[],[]", "[],[]"}, "", "[x],[],[]"},
      {"x=4", matmul_rule({8, 16, 16}, {8, 16, 16}), {"[x],[],[]", "[x],[],[]"}, "", "[x],[],[]"},
      {"x=4", mm(256, 64, 64), {"[x],[]", "[],[x]"}, "all_gather", "[x],[]"},  // T35, B13
      {"x=2,y=2", mm(), {"[],[x,y]", "[x,y],[]"}, "", "[],[] P{x,y}"},
      {"x=2,y=2", mm(), {"[],[x]", "[],[]"}, "", "[],[] P{x}"},  // B11: sliced
      {"x=2,y=4", mm(), {"[],[x]", "[],[]"}, "", "[],[] P{x}"},
      {"x=2", mm(), {"[],[] P{x}", "[],[]"}, "", "[],[] P{x}"},
      {"x=2", mm(), {"[],[] P{x}", "[],[x]"}, "all_reduce", "[],[x]"},  // B14
  });
}

TEST(Propagate, NeverTwiceOnOneAxis) {
  const Mesh mesh = Mesh::parse("x=2,y=2");
  // B11: k is on x in one operand and on y in the other. B12: m and k are on one axis.
  for (const auto& inputs : std::vector<std::vector<std::string>>{{"[],[x]", "[y],[]"},
                                                                  {"[x],[]", "[x],[]"},
                                                                  {"[x],[y]", "[x],[y]"},
                                                                  {"[x,y],[]", "[y,x],[]"},
                                                                  {"[],[] P{x,y}", "[x],[y]"},
                                                                  {"[] ,[x] P{y}", "[],[] P{x}"}}) {
    const Propagation p = run(mm(), mesh, inputs);
    EXPECT_LE(p.chosen.seconds(), p.strategies.back().seconds());
    EXPECT_NO_THROW(Layout::parse(mesh, p.chosen.outputs[0].str())) << p.explain();
  }
}

TEST(Propagate, Elementwise) {
  expect({
      {"tp=2", ew("exp", Elementwise::kNonlinear), {"[],[] P{tp}"}, "all_reduce", "[],[] I{tp}"},
      {"tp=2", ew("neg", Elementwise::kLinear), {"[],[] P{tp}"}, "", "[],[] P{tp}"},  // T29
      {"tp=2", ew("neg", Elementwise::kLinear), {"[],[] P{tp:max}"}, "all_reduce", "[],[] I{tp}"},
      {"tp=2", ew("copy", Elementwise::kMove), {"[],[] P{tp:max}"}, "", "[],[] P{tp:max}"},
      {"tp=2", ew("add", Elementwise::kAdd, 2), {"[],[] P{tp}", "[],[] P{tp}"}, "", "[],[] P{tp}"},
      {"tp=2",
       ew("add", Elementwise::kAdd, 2),
       {"[],[] P{tp}", "[],[]"},
       "",
       "[],[] P{tp}"},  // T30
      {"tp=2", ew("mul", Elementwise::kMultiply, 2), {"[],[] P{tp}", "[],[]"}, "", "[],[] P{tp}"},
      {"tp=2",
       ew("mul", Elementwise::kMultiply, 2),
       {"[],[] P{tp}", "[],[] P{tp}"},
       "all_reduce",
       "[],[] P{tp}"},
      {"tp=2", ew("div", Elementwise::kDivide, 2), {"[],[]", "[],[] P{tp}"}, "all_reduce", "[],[]"},
      {"dp=2,tp=2",
       ew("add", Elementwise::kAdd, 2),
       {"[dp],[]", "[],[tp]"},
       "",
       "[dp],[tp]"},  // T36
      {"x=4", ew("add", Elementwise::kAdd, 2), {"[x],[]", "[],[]"}, "", "[x],[]"},
  });
}

TEST(Propagate, ConflictsAreSettledOnce) {
  // T37, T38: one dimension on two axes, one axis on two dimensions.
  const OpRule add = ew("add", Elementwise::kAdd, 2);
  const Propagation same = run(add, Mesh::parse("dp=2,tp=2"), {"[dp],[]", "[tp],[]"});
  EXPECT_EQ(sends(same), "permute") << same.explain();
  const Propagation crossed = run(add, Mesh::parse("dp=2,tp=2"), {"[dp],[]", "[],[dp]"});
  EXPECT_EQ(sends(crossed), "all_to_all") << crossed.explain();
  EXPECT_NE(crossed.explain().find("chosen dp on a"), std::string::npos) << crossed.explain();
  EXPECT_NE(crossed.explain().find("over   dp on b"), std::string::npos) << crossed.explain();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(run(add, Mesh::parse("dp=2,tp=2"), {"[dp],[]", "[],[dp]"}).chosen.outputs,
              crossed.chosen.outputs);
  }
}

TEST(Propagate, Reductions) {
  const auto sum = [](const char* op, std::vector<int64_t> dims, bool keepdim) {
    return reduction_rule(op, {64, 64}, std::move(dims), keepdim);
  };
  expect({
      {"x=4", sum("sum", {0}, false), {"[x],[]"}, "", "[] P{x}"},  // T39
      {"x=4", sum("sum", {1}, false), {"[x],[]"}, "", "[x]"},
      {"x=4", sum("sum", {1}, true), {"[],[x]"}, "", "[],[] P{x}"},
      {"x=4", sum("sum", {}, false), {"[x],[]"}, "", "scalar P{x}"},
      {"x=4", sum("mean", {0}, false), {"[x],[]"}, "", "[] P{x}"},
      {"x=4", sum("amax", {0}, false), {"[x],[]"}, "", "[] P{x:max}"},  // B10: with its kind
      {"x=4", sum("amax", {0}, false), {"[],[] P{x}"}, "all_reduce", "[] I{x}"},  // B10: sum first
      {"x=4", sum("amax", {0}, false), {"[],[] P{x:max}"}, "", "[] P{x:max}"},
      {"x=4,y=2", sum("sum", {0}, false), {"[x],[] P{y}"}, "", "[] P{x,y}"},
  });
}

TEST(Propagate, Reshapes) {
  expect({
      {"x=4,y=4", reshape_rule({4, 4}, {16}), {"[x],[y]"}, "", "[x,y]"},  // T40
      {"x=4,y=4", reshape_rule({16}, {4, 4}), {"[x,y]"}, "", "[x],[y]"},  // T41
      {"x=4", reshape_rule({4}, {2, 2}), {"[x]"}, "", "[x:(1)2],[x:(2)2]"},
      {"x=4", reshape_rule({4, 3}, {2, 2, 3}), {"[x],[]"}, "", "[x:(1)2],[x:(2)2],[]"},
      {"x=2", reshape_rule({8, 32}, {2, 4, 32}), {"[x],[]"}, "", "[x],[],[]"},  // T42
      {"x=2", reshape_rule({8, 32}, {2, 4, 32}), {"[],[x]"}, "", "[],[],[x]"},
      {"x=2", reshape_rule({4096, 4096}, {1 << 24}), {"[],[x]"}, "all_to_all", "[x]"},  // minor:
                                                                                        // must move
      {"x=2", reshape_rule({7, 2}, {14}), {"[x],[]"}, "all_gather", "[] I{x}"},         // uneven
      {"x=2", reshape_rule({7, 2, 3}, {7, 6}), {"[x],[],[]"}, "", "[x],[]"},
      {"x=2", reshape_rule({6, 4}, {4, 6}), {"[x],[]"}, "", "[x],[]"},
      {"x=2", reshape_rule({4, 4}, {16}), {"[],[] P{x}"}, "", "[] P{x}"},
  });
}

TEST(Propagate, OtherOperators) {
  expect({
      {"tp=2", take_rule({64, 8}, {3}, 0), {"[tp],[]", "[]"}, "", "[],[] P{tp}"},      // B15
      {"tp=2", take_rule({64, 8}, {3}, 0), {"[],[] P{tp}", "[]"}, "", "[],[] P{tp}"},  // T29
      {"tp=2", take_rule({64, 8}, {4}, 0), {"[],[tp]", "[]"}, "", "[],[tp]"},
      {"tp=2", along_rule("softmax", {64, 64}, {-1}), {"[tp],[]"}, "", "[tp],[]"},
      {"tp=2", along_rule("softmax", {64, 64}, {-1}), {"[],[tp]"}, "all_gather", "[],[] I{tp}"},
      {"tp=2",
       along_rule("softmax", {64, 64}, {1}),
       {"[],[tp]"},
       "all_gather",
       "[],[] I{tp}"},  // B16
      {"tp=2", along_rule("softmax", {64, 64}, {1}), {"[],[] P{tp}"}, "all_reduce", "[],[] I{tp}"},
      {"tp=2", norm_rule({8, 64}, 1, 1), {"[tp],[]", "[]"}, "", "[tp],[]"},
      {"tp=2", concat_rule({{8, 8}, {8, 8}}, 0), {"[],[] P{tp}", "[],[]"}, "", "[],[] P{tp}"},
      {"tp=2", concat_rule({{8, 8}, {8, 8}}, 0), {"[],[tp]", "[],[]"}, "", "[],[tp]"},
      {"tp=2", slice_rule({8, 8}, 0, {{0, 4}}), {"[],[] P{tp}"}, "", "[],[] P{tp}"},
      {"tp=2", transpose_rule({8, 6}, {1, 0}), {"[tp],[]"}, "", "[],[tp]"},
      {"tp=2", broadcast_rule({8}, {4, 8}), {"[tp]"}, "", "[],[tp]"},
      {"tp=2",
       conv_rule({2, 4, 5, 5}, {8, 4, 3, 3}, {2, 8, 3, 3}, 1, false),
       {"[],[],[],[]", "[tp],[],[],[]"},
       "",
       "[],[tp],[],[]"},
      {"tp=2",
       attention_rule({2, 8, 5, 4}, {2, 4, 5, 4}, {2, 4, 5, 4}, true),
       {"[],[tp],[],[]", "[],[tp],[],[]", "[],[tp],[],[]"},
       "",
       "[],[tp],[],[]"},
      {"d=8",
       ew("relu", Elementwise::kNonlinear),
       {"[d:(1)2],[d:(2)4]"},
       "",
       "[d:(1)2],[d:(2)4]"},  // T45
  });
}

TEST(Propagate, ABiasIsAddedOnce) {
  const Propagation p =
      run(linear_rule({64, 64}, {64, 64}, true), Mesh::parse("tp=2"), {"[],[tp]", "[],[tp]", "[]"});
  EXPECT_EQ(sends(p), "");
  EXPECT_EQ(p.chosen.inputs[2].str(), "[] P{tp}");  // on one rank only
  EXPECT_EQ(p.chosen.outputs[0].str(), "[],[] P{tp}");
}

// T31: one collective forward; an invariant value stays invariant, and gradients are reduced at its
// end.
TEST(Propagate, AMegatronMlp) {
  const Mesh mesh = Mesh::parse("tp=2");
  const Propagation up = run(mm(), mesh, {"[],[] I{tp}", "[],[tp]"});
  EXPECT_EQ(up.plans[0].steps.size(), 1U);
  EXPECT_EQ(up.plans[0].steps[0].kind, StepKind::kCast);  // its backward is the all_reduce of dX
  const Propagation act = run(ew("relu", Elementwise::kNonlinear), mesh, {"[],[tp]"});
  const Propagation down = run(mm(), mesh, {act.chosen.outputs[0].str(), "[tp],[]"});
  EXPECT_EQ(down.chosen.outputs[0].str(), "[],[] P{tp}");
  const Propagation add = run(ew("gelu", Elementwise::kNonlinear), mesh, {"[],[] P{tp}"});
  EXPECT_EQ(sends(up) + sends(act) + sends(down) + sends(add), "all_reduce");
  EXPECT_EQ(add.chosen.outputs[0].str(), "[],[] I{tp}");
}

TEST(Propagate, AWantedOutputDecides) {
  const Mesh mesh = Mesh::parse("x=2");
  EXPECT_EQ(run(mm(), mesh, {"[],[]", "[],[]"}, {"[x],[]"}).chosen.outputs[0].str(), "[x],[]");
  EXPECT_EQ(run(mm(), mesh, {"[],[]", "[],[]"}, {"[],[x]"}).chosen.outputs[0].str(), "[],[x]");
  EXPECT_EQ(run(mm(), mesh, {"[],[]", "[],[]"}).chosen.outputs[0].str(), "[],[]");
}

// Random operands of every kind of rule: the local operator on the resharded inputs, collected by
// the propagated layout, gives the result of the whole operator.
TEST(Propagate, LocalResultsAreTheGlobalOne) {
  testing::Draw draw(3);
  const Body product = [](const std::vector<double>& v) {
    double out = 1;
    for (const double x : v) out *= x;
    return out;
  };
  const Body sum = [](const std::vector<double>& v) {
    double out = 0;
    for (const double x : v) out += x;
    return out;
  };
  const Body square = [](const std::vector<double>& v) { return v[0] * v[0] + 1; };
  for (int i = 0; i < testing::draws(); ++i) {
    const Mesh mesh = draw.mesh();
    const auto n = [&] { return draw.of(Shape{1, 2, 3, 4, 5, 6, 8}); };
    const int64_t a = n(), b = n(), c = n(), d = n();
    const std::vector<std::pair<OpRule, Body>> all = {
        {matmul_rule({a, b}, {b, c}), product},
        {matmul_rule({d, a, b}, {b, c}), product},
        {matmul_rule({d, a, b}, {d, b, c}), product},
        {elementwise_rule("add", {{a, b}, {b}}, Elementwise::kAdd), sum},
        {elementwise_rule("mul", {{a, 1}, {a, b}}, Elementwise::kMultiply), product},
        {elementwise_rule("square", {{a, b, c}}, Elementwise::kNonlinear), square},
        {reduction_rule("sum", {a, b, c}, {draw.number(0, 2)}, draw.chance(0.5)), sum},
        {reduction_rule("amax", {a, b}, {draw.number(0, 1)}, false), sum},
        {reshape_rule({a * b, c}, {a, b * c}), sum},
        {reshape_rule({a, b, c * d}, {a * b, c, d}), sum},
        {reshape_rule({a * b * c, d}, {a, b, c, d}), sum},
        {transpose_rule({a, b, c}, {2, 0, 1}), sum},
        {broadcast_rule({a, 1}, {b, a, c}), sum},
    };
    const auto& [rule, body] = draw.of(all);
    std::vector<Layout> layouts;
    std::vector<Array> globals;
    for (const Operand& input : rule.inputs) {
      Layout layout = draw.layout(mesh, input.shape.size());
      layouts.push_back(std::move(layout));
      globals.push_back(testing::random_array(draw, input.shape));
    }
    const std::vector<int64_t> sizes(rule.inputs.size() + 1, 4);
    const Propagation p = propagate(rule, layouts, sizes, h200());
    const Strategy& s = p.chosen;
    // Partial values are spread over their ranks, not whole on one of them.
    std::vector<Locals> inputs;
    for (size_t k = 0; k < layouts.size(); ++k) {
      Locals locals = distribute(globals[k], layouts[k]);
      globals[k] = collect(locals, layouts[k], rule.inputs[k].shape);
      inputs.push_back(simulate(p.plans[k], std::move(locals)));
    }
    Locals outputs;
    for (int64_t index = 0; index < mesh.size(); ++index) {
      std::vector<Array> own;
      for (const Locals& locals : inputs) own.push_back(locals[static_cast<size_t>(index)]);
      const auto local = testing::local_sizes(rule, s.inputs, s.outputs, index);
      outputs.push_back(testing::evaluate(rule, own, body, local));
    }
    std::vector<int64_t> whole;
    for (const Factor& factor : rule.factors) whole.push_back(factor.size);
    const Array expected = testing::evaluate(rule, globals, body, whole);
    Array got;
    ASSERT_NO_THROW(got = collect(outputs, s.outputs[0], rule.outputs[0].shape))
        << p.explain() << mesh.str() << " seed " << testing::seed();
    ASSERT_EQ(got, expected) << p.explain() << mesh.str() << " seed " << testing::seed();
  }
}

TEST(Propagate, RefusesWhatDoesNotFit) {
  const Mesh mesh = Mesh::parse("x=2");
  const Layout two = Layout::parse(mesh, "[],[]");
  const auto call = [&](std::vector<Layout> inputs, std::vector<int64_t> sizes) {
    return propagate(mm(), inputs, sizes, h200());
  };
  EXPECT_ERROR(call({two}, {4, 4, 4}), kValue, "matmul: expected 2 input layouts, got 1");
  EXPECT_ERROR(call({two, two}, {4}), kValue, "3 element sizes");
  EXPECT_ERROR(call({two, Layout::parse(mesh, "[]")}, {4, 4, 4}), kValue, "shape of 1 dimensions");
  EXPECT_ERROR(call({two, Layout::parse(Mesh::parse("y=2"), "[],[]")}, {4, 4, 4}), kValue,
               "operands on one mesh");
}

}  // namespace
}  // namespace torch_overlap::mesh
