// Assignment of ranks when the members of a communicator change.

#include "torch_overlap/comm/regroup_rendezvous.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/local_ranks.h"

namespace torch_overlap {
namespace {

using namespace testing;  // NOLINT

std::vector<std::string> ordered(std::vector<Candidate> candidates) {
  sort_candidates(candidates);
  std::vector<std::string> handles;
  for (const auto& one : candidates) handles.push_back(one.handle);
  return handles;
}

TEST(RegroupRendezvous, ThoseOfOneGenerationKeepTheirOrderAndNewOnesComeAfter) {
  const Candidate a{.handle = "z", .generation = 2, .old_rank = 0, .old_size = 3, .formation = "f"};
  const Candidate b{.handle = "a", .generation = 2, .old_rank = 2, .old_size = 3, .formation = "f"};
  const Candidate alone{.handle = "m", .generation = 0, .old_size = 1, .formation = "m"};
  const Candidate also{.handle = "b", .generation = 0, .old_size = 1, .formation = "b"};
  const std::vector<std::string> expected{"z", "a", "b", "m"};
  EXPECT_EQ(ordered({alone, b, also, a}), expected);
  EXPECT_EQ(ordered({b, a, alone, also}), expected);
}

TEST(RegroupRendezvous, AYoungerGenerationComesBeforeALargerOne) {
  const Candidate late{
      .handle = "l", .generation = 1, .old_rank = 0, .old_size = 8, .formation = "1"};
  const Candidate now{
      .handle = "n", .generation = 2, .old_rank = 5, .old_size = 7, .formation = "2"};
  EXPECT_EQ(ordered({late, now}), (std::vector<std::string>{"n", "l"}));
}

RegroupRendezvousRequest request(int64_t uuid, std::vector<std::string> handles,
                                 const std::string& mine, const std::string& formation) {
  RegroupRendezvousRequest wish;
  wish.name = "tp";
  wish.uuid = uuid;
  wish.handles = std::move(handles);
  wish.me.handle = mine;
  wish.me.formation = formation;
  return wish;
}

TEST(RegroupRendezvous, MembersOfOneGenerationLearnTheirOldRanksAndOthersDoNot) {
  for (const bool together : {true, false}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const auto come = [&](const std::string& mine, const std::string& formation, int old_rank) {
      auto wish = request(1, {"b", "a"}, mine, formation);
      wish.me.old_rank = old_rank;
      return rendezvous_members(store, wish, milliseconds(20'000), [] {});
    };
    RegroupRendezvous b;
    std::thread other([&] { b = come("b", "f", 4); });
    const RegroupRendezvous a = come("a", together ? "f" : "g", 2);
    other.join();
    EXPECT_EQ(a.rank, 1);
    EXPECT_EQ(b.rank, 0);
    EXPECT_EQ(a.handles, (std::vector<std::string>{"b", "a"}));
    EXPECT_EQ(a.generation, 1U);
    EXPECT_EQ(a.old_ranks, together ? (std::vector<int>{4, 2}) : std::vector<int>{});
  }
}

TEST(RegroupRendezvous, WhoDoesNotComeIsNamedAndCannotMeetThoseWhoHaveLeft) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (const char* mine : {"a", "b"}) {
    const Error error = error_of([&] {
      rendezvous_members(store, request(1, {"a", "b"}, mine, "f"), milliseconds(50), [] {});
    });
    EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
    EXPECT_TRUE(contains(error.what(), mine[0] == 'a' ? "got none of [b]" : "got none of [a]"))
        << error.what();
  }
}

TEST(RegroupRendezvous, NobodyWaitsInTheStoreForWhatAMemberHasTakenBack) {
  // The key of "a" is deleted as soon as somebody has checked that it exists.
  struct TakesBack final : c10d::HashStore {
    bool check(const std::vector<std::string>& keys) override {
      const bool is_there = HashStore::check(keys);
      if (is_there && keys[0].ends_with("/a")) HashStore::deleteKey(keys[0]);
      return is_there;
    }
  };
  const auto store = c10::make_intrusive<TakesBack>();
  store->setTimeout(milliseconds(5'000));
  std::vector<std::thread> members;
  for (const char* mine : {"a", "b"}) {
    members.emplace_back([&, mine] {
      try {
        const auto met = rendezvous_members(store, request(1, {"a", "b"}, mine, "f"),
                                            milliseconds(20'000), [] {});
        EXPECT_EQ(met.rank, mine[0] == 'a' ? 0 : 1);
      } catch (const Error& error) {
        ADD_FAILURE() << error.what();
      }
    });
  }
  for (auto& member : members) member.join();
}

TEST(RegroupRendezvous, AnotherLifeOfTheNameAndAnotherRestartHavePlacesOfTheirOwn) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto meet_alone = [&](const std::string& handle) {
    return rendezvous_members(store, request(1, {handle}, handle, "f"), milliseconds(20'000), [] {})
        .store;
  };
  meet_alone("first life")->set("address", std::string("of the first life"));
  EXPECT_FALSE(meet_alone("second life")->check({"address"}));
  // The handle is the same, which shows that the restart is part of the key.
  ASSERT_EQ(setenv("TORCHELASTIC_RESTART_COUNT", "1", /*overwrite=*/1), 0);
  EXPECT_FALSE(meet_alone("first life")->check({"address"}));
  unsetenv("TORCHELASTIC_RESTART_COUNT");
  EXPECT_TRUE(meet_alone("first life")->check({"address"}));
}

TEST(RegroupRendezvous, AHandleIsTextWithoutLineEndsAndOneOfAKind) {
  const std::string one = make_handle(3);
  EXPECT_NE(one, make_handle(3));
  EXPECT_FALSE(contains(one, "\n"));
  EXPECT_TRUE(contains(one, "/rank3/"));
}

}  // namespace
}  // namespace torch_overlap
