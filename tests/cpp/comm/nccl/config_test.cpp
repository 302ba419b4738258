#include "torch_overlap/comm/backends/nccl/config.h"

#include <gtest/gtest.h>

#include "comm/nccl/fake_nccl.h"

namespace torch_overlap {
namespace {

using testing::FakeNccl;

class NcclConfigTest : public ::testing::Test {
 protected:
  void SetUp() override { FakeNccl::reset(); }
  const NcclApi api_ = FakeNccl::api();
};

TEST_F(NcclConfigTest, TheCommunicatorsNameIsNcclsName) {
  NcclConfig config(api_, "tp", {});
  EXPECT_STREQ(config.get()->commName, "tp");
  EXPECT_EQ(config.get()->blocking, 1);
  EXPECT_EQ(config.get()->minCTAs, NCCL_CONFIG_UNDEF_INT);
}

TEST_F(NcclConfigTest, HintsAreTakenInBothSpellings) {
  const Hints camel{{"cgaClusterSize", "2"}, {"minCTAs", "4"},       {"maxCTAs", "8"},
                    {"netName", "Socket"},   {"splitShare", "true"}, {"trafficClass", "7"},
                    {"commName", "other"},   {"CTAPolicy", "zero"},  {"nvlsCTAs", "3"}};
  const Hints snake{{"cga_cluster_size", "2"}, {"min_ctas", "4"},    {"max_ctas", "8"},
                    {"net_name", "Socket"},    {"split_share", "1"}, {"traffic_class", "7"},
                    {"comm_name", "other"},    {"cta_policy", "2"},  {"nvls_ctas", "3"}};
  for (const Hints& hints : {camel, snake}) {
    NcclConfig config(api_, "tp", hints);
    EXPECT_EQ(config.get()->cgaClusterSize, 2);
    EXPECT_EQ(config.get()->minCTAs, 4);
    EXPECT_EQ(config.get()->maxCTAs, 8);
    EXPECT_STREQ(config.get()->netName, "Socket");
    EXPECT_EQ(config.get()->splitShare, 1);
    EXPECT_EQ(config.get()->trafficClass, 7);
    EXPECT_STREQ(config.get()->commName, "other");
    EXPECT_EQ(config.get()->CTAPolicy, NCCL_CTA_POLICY_ZERO);
    EXPECT_EQ(config.get()->nvlsCTAs, 3);
  }
}

TEST_F(NcclConfigTest, AHintThatTheLoadedNcclLacksNamesBothVersions) {
  FakeNccl::instance().version = 22605;
  EXPECT_NO_THROW(NcclConfig(api_, "tp", {{"trafficClass", "1"}}));
  try {
    NcclConfig config(api_, "tp", {{"nvls_ctas", "1"}});
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    const std::string what = error.what();
    EXPECT_NE(what.find("nvlsCTAs"), std::string::npos) << what;
    EXPECT_NE(what.find("2.27.0"), std::string::npos) << what;
    EXPECT_NE(what.find("2.26.5"), std::string::npos) << what;
  }
}

TEST_F(NcclConfigTest, AValueThatIsNoNumberIsAnError) {
  EXPECT_THROW(NcclConfig(api_, "tp", {{"minCTAs", "many"}}), Error);
  EXPECT_THROW(NcclConfig(api_, "tp", {{"minCTAs", "-1"}}), Error);
  EXPECT_THROW(NcclConfig(api_, "tp", {{"splitShare", "perhaps"}}), Error);
}

TEST_F(NcclConfigTest, VersionsReadAsPeopleWriteThem) {
  EXPECT_EQ(nccl_version_string(22809), "2.28.9");
  EXPECT_EQ(nccl_version_string(23007), "2.30.7");
  EXPECT_EQ(nccl_version_string(2804), "2.8.4");
}

}  // namespace
}  // namespace torch_overlap
