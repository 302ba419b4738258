#include "torch_overlap/mesh/layout.h"

#include "mesh/draws.h"

namespace torch_overlap::mesh {
namespace {

std::vector<int64_t> sizes_of(const Layout& layout, int64_t n) {
  std::vector<int64_t> out;
  for (const int64_t rank : layout.mesh().ranks()) out.push_back(local_shape(layout, {n}, rank)[0]);
  return out;
}

TEST(Layout, TextIsReadAsItIsPrinted) {
  const Mesh mesh = Mesh::parse("x=4,y=2,z=2");
  for (const char* text : {"scalar", "[]", "[x],[y,z]", "[x:(1)2],[x:(2)2] P{y:max,z:max}",
                           "[] P{x,y} I{z}", "scalar P{x:(1)2:min}", "[],[],[z] I{x,y}"}) {
    EXPECT_EQ(Layout::parse(mesh, text).str(), text);
  }
  EXPECT_EQ(Layout::parse(mesh, " [ x , y ] , [ ]  P{ z : avg } ").str(), "[x,y],[] P{z:avg}");
  EXPECT_ERROR(Layout::parse(mesh, "[x"), kValue, "expected ']' at character 2");
  EXPECT_ERROR(Layout::parse(mesh, "[x] Q"), kValue, "the end");
  EXPECT_ERROR(Layout::parse(mesh, "[x] P{y:median}"), kValue, "got 'median'");
}

TEST(Layout, RefusesAnAxisUsedTwice) {
  const Mesh mesh = Mesh::parse("x=8,y=2");
  EXPECT_ERROR(Layout::parse(mesh, "[x],[x]"), kValue, "got 'x' in a dimension and in a dimension");
  EXPECT_ERROR(Layout::parse(mesh, "[x] P{x}"), kValue, "in a dimension and partial");
  EXPECT_ERROR(Layout::parse(mesh, "[] P{y} I{y}"), kValue, "partial and invariant");
  EXPECT_ERROR(Layout::parse(mesh, "[x],[x:(1)2]"), kValue, "share nothing");
  EXPECT_ERROR(Layout::parse(mesh, "[x:(2)2] I{x:(1)4}"), kValue, "share nothing");
  EXPECT_ERROR(Layout::parse(mesh, "[w]"), kValue, "expected one of the axes [x, y]");
  EXPECT_ERROR(Layout::parse(mesh, "[] P{x:sum,y:max}"), kValue, "kinds that commute");
  EXPECT_ERROR(Layout(mesh, {{AxisRef{7, 1, 2}}}), kValue, "expected an axis from 0 to 2");
  EXPECT_NO_THROW(Layout::parse(mesh, "[x:(1)2],[x:(2)4]"));
  EXPECT_NO_THROW(Layout::parse(mesh, "[] P{x:sum,y:avg}"));
}

TEST(Layout, PartsOfAnAxisAreNotFree) {
  const Mesh mesh = Mesh::parse("x=8,y=2");
  const Layout layout = Layout::parse(mesh, "[x:(1)2]");
  EXPECT_TRUE(layout.uses(mesh.axis("x")));
  EXPECT_FALSE(layout.uses(mesh.axis("x:(2)4")));
  EXPECT_FALSE(layout.uses(mesh.axis("y")));
}

// T43, T44, B20: the parts are those of torch.chunk.
TEST(Layout, UnevenPartsAreThoseOfChunk) {
  const Mesh one = Mesh::parse("x=4");
  const Layout layout = Layout::parse(one, "[x]");
  using Sizes = std::vector<int64_t>;
  EXPECT_EQ(sizes_of(layout, 7), (Sizes{2, 2, 2, 1}));
  EXPECT_EQ(sizes_of(layout, 11), (Sizes{3, 3, 3, 2}));
  EXPECT_EQ(sizes_of(layout, 10), (Sizes{3, 3, 3, 1}));
  EXPECT_EQ(sizes_of(layout, 5), (Sizes{2, 2, 1, 0}));
  EXPECT_EQ(sizes_of(layout, 3), (Sizes{1, 1, 1, 0}));
  EXPECT_EQ(sizes_of(layout, 1), (Sizes{1, 0, 0, 0}));
  EXPECT_EQ(sizes_of(layout, 0), (Sizes{0, 0, 0, 0}));
  const Mesh two = Mesh::parse("x=2,y=4");
  EXPECT_EQ(sizes_of(Layout::parse(two, "[x,y]"), 10), (Sizes{2, 2, 1, 0, 2, 2, 1, 0}));
  EXPECT_EQ(sizes_of(Layout::parse(two, "[y,x]"), 10), (Sizes{2, 2, 2, 1, 1, 1, 1, 0}));
}

// T45: parts of an axis cut their dimension by their sizes, and the rest of the axis holds copies.
TEST(Layout, PartsOfAnAxisCutTheirDimension) {
  const Mesh mesh = Mesh::parse("d=8");
  const Layout both = Layout::parse(mesh, "[d:(1)2],[d:(2)4]");
  for (int64_t rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(local_shape(both, {16, 32}, rank), (Shape{8, 8}));
    const std::vector<Extent> part = extents(both, {16, 32}, rank);
    EXPECT_EQ(part, (std::vector<Extent>{{rank / 4 * 8, 8}, {rank % 4 * 8, 8}}));
  }
  const Mesh four = Mesh::parse("g=4");
  const Layout half = Layout::parse(four, "[g:(1)2]");
  EXPECT_EQ(extents(half, {6}, 0), extents(half, {6}, 1));
  EXPECT_EQ(extents(half, {6}, 2), extents(half, {6}, 3));
}

TEST(Layout, EveryElementHasItsRanks) {
  testing::Draw draw;
  for (int i = 0; i < testing::draws(); ++i) {
    const Mesh mesh = draw.mesh();
    const auto dims = static_cast<size_t>(draw.number(1, 3));
    const Layout layout = draw.layout(mesh, dims);
    const Shape shape = draw.shape(dims);
    // Parts of a dimension, in the order of its axes, are contiguous from 0 to the end.
    std::vector<Shape> locals;
    for (int64_t index = 0; index < mesh.size(); ++index) {
      Shape local;
      for (const Extent& e : extents_at(layout, shape, index)) local.push_back(e.size);
      locals.push_back(local);
    }
    for (size_t d = 0; d < dims; ++d) {
      int64_t at = 0;
      for (const int64_t member :
           mesh.group_at(draw.number(0, mesh.size() - 1), layout.dims()[d])) {
        const Extent part = extents_at(layout, shape, member)[d];
        EXPECT_TRUE(part.offset == at) << layout.str() << " seed " << testing::seed();
        at += part.size;
      }
      EXPECT_EQ(at, shape[d]);
    }
    EXPECT_EQ(global_shape(layout, locals), shape);  // 7 stays 7
    EXPECT_EQ(Layout::parse(mesh, layout.str()), layout);
    EXPECT_EQ(Layout::parse(mesh, layout.str()).hash(), layout.hash());
  }
}

TEST(Layout, GlobalShapeRefusesWhatNoShapeGives) {
  const Mesh mesh = Mesh::parse("x=2");
  const Layout layout = Layout::parse(mesh, "[x],[]");
  EXPECT_EQ(global_shape(layout, {{3, 5}, {2, 5}}), (Shape{5, 5}));
  EXPECT_ERROR(global_shape(layout, {{2, 5}, {3, 5}}), kValue, "expected size 3 in dimension 0");
  EXPECT_ERROR(global_shape(layout, {{2, 5}, {2, 4}}), kValue, "expected size 5 in dimension 1");
  EXPECT_ERROR(global_shape(layout, {{2, 5}}), kValue, "one shape for each of the 2 ranks");
  EXPECT_ERROR(local_shape(layout, {4}, 0), kValue, "a shape of 2 dimensions");
  EXPECT_ERROR(local_shape(layout, {4, -1}, 0), kValue, "at least 0");
}

}  // namespace
}  // namespace torch_overlap::mesh
