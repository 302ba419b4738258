#include "torch_overlap/mesh/mesh.h"

#include "mesh/draws.h"

namespace torch_overlap::mesh {
namespace {

using Ranks = std::vector<int64_t>;

TEST(Mesh, CoordinatesAreRowMajor) {
  const Mesh mesh = Mesh::parse("x=2,y=2");
  Ranks x;
  Ranks y;
  for (int64_t rank = 0; rank < 4; ++rank) {
    x.push_back(mesh.coordinate(rank, mesh.axis("x")));
    y.push_back(mesh.coordinate(rank, mesh.axis("y")));
  }
  EXPECT_EQ(x, (Ranks{0, 0, 1, 1}));  // T17
  EXPECT_EQ(y, (Ranks{0, 1, 0, 1}));
  EXPECT_EQ(mesh.str(), "Mesh(x=2, y=2)");
}

TEST(Mesh, RanksAreNotIndices) {
  const Mesh mesh({{"x", 2}, {"y", 2}}, {7, 4, 6, 5});
  EXPECT_EQ(mesh.coordinate(6, mesh.axis("x")), 1);
  EXPECT_EQ(mesh.group(6, {mesh.axis("x")}), (Ranks{7, 6}));
  EXPECT_EQ(mesh.group(6, {mesh.axis("y")}), (Ranks{6, 5}));
  EXPECT_EQ(mesh.group(5, mesh.axis_list({"y", "x"})), (Ranks{7, 6, 4, 5}));
  EXPECT_EQ(mesh.group(4, {}), (Ranks{4}));
  EXPECT_ERROR(mesh.coordinate(0, mesh.axis("x")), kValue, "expected a rank of the mesh, got 0");
}

TEST(Mesh, PartsOfAnAxis) {
  const Mesh mesh = Mesh::parse("d=8");
  const AxisRef part = mesh.axis("d:(2)4");
  EXPECT_EQ(mesh.coordinate(7, part), 3);
  EXPECT_EQ(mesh.coordinate(2, part), 2);
  EXPECT_EQ(mesh.group(5, {part}), (Ranks{4, 5, 6, 7}));
  EXPECT_EQ(mesh.group(5, {mesh.axis("d:(1)2")}), (Ranks{1, 5}));  // B2: not the group of d
  EXPECT_EQ(mesh.name(part), "d:(2)4");
  EXPECT_EQ(mesh.name(mesh.axis("d:(1)8")), "d");
  EXPECT_TRUE(overlap(mesh.axis("d"), part));
  EXPECT_TRUE(overlap(mesh.axis("d:(1)4"), part));
  EXPECT_FALSE(overlap(mesh.axis("d:(1)2"), part));
  EXPECT_ERROR(mesh.axis("d:(3)2"), kValue, "divides 8, got (3)2");
  EXPECT_ERROR(mesh.axis("d:3"), kValue, "as in x:(2)4");
  EXPECT_ERROR(mesh.axis("e"), kValue, "expected one of the axes [d], got 'e'");
}

TEST(Mesh, LinksComeFromHostsOrNames) {
  const Mesh hosts = Mesh::parse("dp=4,tp=4", 8);
  EXPECT_EQ(hosts.links({hosts.axis("tp")}), (std::vector<LinkLevel>{{"nvlink", 4}}));
  EXPECT_EQ(hosts.links({hosts.axis("dp")}),
            (std::vector<LinkLevel>{{"nvlink", 2}, {"network", 2}}));
  EXPECT_EQ(hosts.links(hosts.axis_list({"dp", "tp"})),
            (std::vector<LinkLevel>{{"nvlink", 8}, {"network", 2}}));
  const Mesh named({{"dp", 4, "network"}, {"tp", 4, "nvlink"}, {"one", 1, "slow"}});
  EXPECT_EQ(named.links(named.axis_list({"tp", "dp", "one"})),
            (std::vector<LinkLevel>{{"nvlink", 4}, {"network", 4}}));
}

TEST(Mesh, RefusesWhatIsNoMesh) {
  EXPECT_ERROR(Mesh({{"x", 2}, {"x", 2}}), kValue, "got 'x' twice");
  EXPECT_ERROR(Mesh({{"x", 0}}), kValue, "at least 1 for axis 'x', got 0");
  EXPECT_ERROR(Mesh({{"x y", 2}}), kValue, "letters, digits and _");
  EXPECT_ERROR(Mesh({{"x", 2}}, {0, 1, 2}), kValue, "expected 2 ranks");
  EXPECT_ERROR(Mesh({{"x", 2}}, {3, 3}), kValue, "got 3 twice");
  EXPECT_ERROR(Mesh({{"x", 2}}, {0, -1}), kValue, "got -1");
  EXPECT_ERROR(Mesh({{"x", 1 << 20}, {"y", 1 << 20}}), kValue, "at most");
  EXPECT_ERROR(Mesh::parse("x=2,y"), kValue, "dp=2,tp=4");
  EXPECT_EQ(Mesh({}).size(), 1);
}

}  // namespace
}  // namespace torch_overlap::mesh
