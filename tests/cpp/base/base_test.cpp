#include <gtest/gtest.h>

#include <cstdlib>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "torch_overlap/base/env.h"
#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/strings.h"

namespace torch_overlap {
namespace {

// Every variable that Env reads: a test sees only those that it sets itself.
constexpr const char* kVariables[] = {"TORCHCOMM_ABORT_ON_ERROR",
                                      "TORCHCOMM_TIMEOUT_SECONDS",
                                      "TORCH_OVERLAP_CHECK_MISMATCH",
                                      "TORCHCOMM_HEALTH_CHECK_WAIT_MS",
                                      "TORCHCOMM_RANK",
                                      "TORCHCOMM_SIZE",
                                      "TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD",
                                      "LOCAL_RANK",
                                      "RANK",
                                      "WORLD_SIZE",
                                      "OMPI_COMM_WORLD_RANK",
                                      "OMPI_COMM_WORLD_SIZE",
                                      "OMPI_COMM_WORLD_LOCAL_RANK",
                                      "MV2_COMM_WORLD_RANK",
                                      "MV2_COMM_WORLD_SIZE",
                                      "PMI_RANK",
                                      "PMI_SIZE",
                                      "MPI_LOCALRANKID",
                                      "PALS_RANKID",
                                      "PALS_SIZE",
                                      "SLURM_PROCID",
                                      "SLURM_NTASKS",
                                      "SLURM_LOCALID",
                                      "MASTER_ADDR",
                                      "MASTER_PORT",
                                      "SLURM_STEP_NODELIST",
                                      "SLURM_JOB_NODELIST",
                                      "TORCHELASTIC_USE_AGENT_STORE",
                                      "TORCHELASTIC_RUN_ID",
                                      "TORCHELASTIC_RESTART_COUNT",
                                      "TORCHCOMM_GLOO_HOSTNAME",
                                      "TORCHCOMM_GLOO_INTERFACE",
                                      "TORCHCOMM_NCCL_BOOTSTRAP_UNIQUEID_EXCHANGE_METHOD",
                                      "TORCHCOMMS_SERIALIZATION",
                                      "TORCH_OVERLAP_TUNE_CACHE",
                                      "XDG_CACHE_HOME",
                                      "HOME"};

class EnvTest : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : kVariables) {
      const char* value = std::getenv(name);
      if (value != nullptr) before_.emplace_back(name, value);
      unsetenv(name);
    }
  }
  void TearDown() override {
    for (const char* name : kVariables) unsetenv(name);
    for (const auto& [name, value] : before_) setenv(name.c_str(), value.c_str(), 1);
  }
  static Env read(std::initializer_list<std::pair<const char*, const char*>> variables) {
    for (const auto& [name, value] : variables) setenv(name, value, 1);
    return Env::read();
  }

 private:
  std::vector<std::pair<std::string, std::string>> before_;
};

template <typename Body>
Error error_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "expected an Error";
  return {ErrorKind::kRuntime, ""};
}

TEST(Strings, ConcatAndListsReadAsWritten) {
  EXPECT_EQ(concat("rank ", 3, " of ", 4.5), "rank 3 of 4.5");
  EXPECT_EQ(list_string(std::vector<int>{1, 2, 3}), "[1, 2, 3]");
  EXPECT_EQ(list_string(std::vector<int>{}), "[]");
  EXPECT_EQ(to_lower("NcCl-2"), "nccl-2");
  EXPECT_EQ(split_string("a,,b", ','), (std::vector<std::string>{"a", "", "b"}));
  EXPECT_EQ(split_string("", ','), (std::vector<std::string>{""}));
}

TEST(Strings, ParsersTakeWholeValuesOnly) {
  for (const char* yes : {"1", "true", "Yes", "y", "ON"}) EXPECT_TRUE(parse_bool(yes, "x")) << yes;
  for (const char* no : {"0", "False", "no", "n", "off"}) EXPECT_FALSE(parse_bool(no, "x")) << no;
  EXPECT_EQ(parse_int("-12", "x"), -12);
  EXPECT_EQ(parse_double("1.5", "x"), 1.5);
  for (const char* bad : {"", "1x", " 1", "1.5", "99999999999999999999"}) {
    const Error error = error_of([&] { parse_int(bad, "ranks"); });
    EXPECT_EQ(error.kind(), ErrorKind::kValue);
    EXPECT_EQ(error.what(), concat("ranks: expected an integer, got '", bad, "'"));
  }
  EXPECT_THROW(parse_bool("maybe", "x"), Error);
  EXPECT_THROW(parse_double("inf", "x"), Error);
}

TEST(Errors, CheckBuildsItsMessageOnlyWhenItFails) {
  int built = 0;
  const auto part = [&built] { return ++built; };
  TORCH_OVERLAP_CHECK(true, kValue, "never", part());
  EXPECT_EQ(built, 0);
  const Error error = error_of([&] { TORCH_OVERLAP_CHECK(false, kState, "op: got ", part()); });
  EXPECT_EQ(error.kind(), ErrorKind::kState);
  EXPECT_STREQ(error.what(), "op: got 1");
}

TEST_F(EnvTest, DefaultsAreTheDocumentedOnes) {
  EXPECT_TRUE(Env::abort_on_error());
  EXPECT_FALSE(Env::check_mismatch());
  EXPECT_TRUE(read({{"TORCH_OVERLAP_CHECK_MISMATCH", "yes"}}).check_mismatch());
  EXPECT_EQ(Env::timeout(), std::chrono::seconds(600));
  EXPECT_EQ(Env::health_check_wait(), std::chrono::milliseconds(0));
  EXPECT_EQ(read({{"TORCHCOMM_HEALTH_CHECK_WAIT_MS", "15000"}}).health_check_wait(),
            std::chrono::seconds(15));
  EXPECT_FALSE(Env::launcher() || Env::master_addr());
  EXPECT_EQ(Env::master_port(), 29500);
  EXPECT_EQ(Env::restart_count(), "0");
  EXPECT_EQ(Env::serialization(), "torch_save");
}

TEST_F(EnvTest, MeasuredAlgorithmsAreInTheCacheFolderOfTheUser) {
  EXPECT_EQ(Env::tune_cache(), std::nullopt);
  setenv("HOME", "/home/me", 1);
  EXPECT_EQ(Env::tune_cache(), "/home/me/.cache/torch_overlap/tune.json");
  setenv("XDG_CACHE_HOME", "relative", 1);
  EXPECT_EQ(Env::tune_cache(), "/home/me/.cache/torch_overlap/tune.json");
  setenv("XDG_CACHE_HOME", "/cache", 1);
  EXPECT_EQ(Env::tune_cache(), "/cache/torch_overlap/tune.json");
  setenv("TORCH_OVERLAP_TUNE_CACHE", "mine.json", 1);
  EXPECT_EQ(Env::tune_cache(), "mine.json");
  setenv("TORCH_OVERLAP_TUNE_CACHE", "", 1);
  EXPECT_EQ(Env::tune_cache(), std::nullopt);
}

TEST_F(EnvTest, TimeoutTakesFractionsAndRefusesNonsense) {
  EXPECT_EQ(read({{"TORCHCOMM_TIMEOUT_SECONDS", "0.25"}}).timeout(),
            std::chrono::milliseconds(250));
  for (const char* bad : {"0", "-1", "soon"}) {
    setenv("TORCHCOMM_TIMEOUT_SECONDS", bad, 1);
    const Error error = error_of([] { (void)Env::timeout(); });
    EXPECT_NE(std::string(error.what()).find("environment variable TORCHCOMM_TIMEOUT_SECONDS: "),
              std::string::npos)
        << error.what();
  }
}

TEST_F(EnvTest, AValueThatIsNotAskedForIsNotParsed) {
  for (const char* name : kVariables) setenv(name, "nonsense", 1);
  EXPECT_EQ(Env::run_id(), "nonsense");
  EXPECT_EQ(Env::master_addr(), "nonsense");
  EXPECT_FALSE(Env::launcher_if_valid());
  EXPECT_THROW((void)Env::launcher(), Error);
}

std::string text_of(const std::optional<Launcher>& launcher) {
  if (!launcher) return "none";
  return concat(launcher->family, " ", launcher->rank, " of ", launcher->size, " local ",
                launcher->local_rank ? concat(*launcher->local_rank) : "?");
}

TEST_F(EnvTest, TheNearestLauncherNamesTheRank) {
  Env env = read({{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "6"}, {"SLURM_LOCALID", "1"}});
  EXPECT_EQ(text_of(env.launcher()), "slurm 5 of 6 local 1");
  env = read({{"RANK", "2"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "0"}});
  EXPECT_EQ(text_of(env.launcher()), "torchrun 2 of 4 local 0");
  env = read({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}});
  EXPECT_EQ(text_of(env.launcher()), "mpi 1 of 2 local ?");
  env = read({{"TORCHCOMM_RANK", "7"}, {"TORCHCOMM_SIZE", "8"}});
  EXPECT_EQ(text_of(env.launcher()), "torchcomm 7 of 8 local 0");
}

TEST_F(EnvTest, TheQueryMethodPicksOneLauncher) {
  const Env env = read({{"RANK", "2"},
                        {"WORLD_SIZE", "4"},
                        {"PMI_RANK", "1"},
                        {"PMI_SIZE", "3"},
                        {"TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD", "torchrun"}});
  EXPECT_EQ(env.launcher()->rank, 2);
  setenv("TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD", "guess", 1);
  EXPECT_THROW((void)Env::launcher(), Error);
}

TEST_F(EnvTest, HalfARankOrARankOutOfRangeIsAnErrorThatNamesTheVariables) {
  const Error half = error_of([] { (void)read({{"WORLD_SIZE", "2"}}).launcher(); });
  EXPECT_STREQ(half.what(),
               "new_comm: expected both RANK and WORLD_SIZE in the environment, got only "
               "WORLD_SIZE=2; set the other one, or pass rank= and size=");
  EXPECT_FALSE(Env::launcher_if_valid());
  EXPECT_THROW((void)read({{"RANK", "4"}, {"WORLD_SIZE", "4"}}).launcher(), Error);
}

TEST_F(EnvTest, TheFirstSlurmHostIsTheMaster) {
  EXPECT_EQ(read({{"SLURM_JOB_NODELIST", "gpu[003-007,9],cpu1"}}).master_addr(), "gpu003");
  EXPECT_EQ(read({{"SLURM_JOB_NODELIST", "alpha,beta"}}).master_addr(), "alpha");
  EXPECT_EQ(read({{"SLURM_JOB_NODELIST", "alpha"}}).master_addr(), "alpha");
  EXPECT_EQ(read({{"SLURM_STEP_NODELIST", "n[2]"}}).master_addr(), "n2");
  EXPECT_EQ(read({{"SLURM_STEP_NODELIST", "n[2,5]-ib,m"}}).master_addr(), "n2-ib");
  EXPECT_EQ(read({{"SLURM_STEP_NODELIST", "rack[0-1]n[07-12]"}}).master_addr(), "rack0n07");
  EXPECT_EQ(read({{"SLURM_STEP_NODELIST", "n[3"}}).master_addr(), "n3");
  EXPECT_EQ(read({{"MASTER_ADDR", "1.2.3.4"}}).master_addr(), "1.2.3.4");
}

}  // namespace
}  // namespace torch_overlap
