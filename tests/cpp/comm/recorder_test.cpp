#include "torch_overlap/comm/recorder.h"

#include <atomic>
#include <cstdio>
#include <fstream>
#include <thread>

#include "comm/local_ranks.h"
#include "torch_overlap/comm/call_log.h"
#include "torch_overlap/comm/health.h"
#include "torch_overlap/comm/torch_comm.h"

namespace torch_overlap {
namespace {

using testing::Comm;
using testing::contains;
using testing::error_of;

Comm fake_comm(int size, int rank, const std::string& name) {
  return TorchComm::create("fake", c10::kCPU, name, {}, RankAndSize{rank, size});
}

// Returns the records of a communicator, in any recorder.
std::vector<CallRecordPtr> records_of(
    const std::string& comm, const FlightRecorder& recorder = FlightRecorder::of_process()) {
  std::vector<CallRecordPtr> found;
  for (auto& record : recorder.records()) {
    if (record->comm->name == comm) found.push_back(std::move(record));
  }
  return found;
}

std::shared_ptr<CallRecord> make_record(const std::shared_ptr<CommRecord>& comm) {
  Call call;
  call.name = OpName::all_reduce;
  call.primitive = Primitive::all_reduce;
  call.tensor = at::ones({2, 3});
  call.sequence = comm->next_sequence_number(call.primitive);
  return std::make_shared<CallRecord>(call, comm);
}

TEST(FlightRecorder, KeepsTheLastRecordsInOrder) {
  const auto comm = make_comm_record("ring", "fake", 0, {0});
  FlightRecorder recorder(3);
  std::vector<std::shared_ptr<CallRecord>> all;
  for (int i = 0; i < 5; ++i) {
    all.push_back(make_record(comm));
    recorder.add(all.back());
  }
  const auto kept = recorder.records();
  ASSERT_EQ(kept.size(), 3U);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(kept[i], all[i + 2]);
    EXPECT_EQ(recorder.record_id(*kept[i]), i + 2U);
  }
  recorder.reset();
  EXPECT_EQ(recorder.size(), 0U);
  recorder.add(make_record(comm));
  EXPECT_EQ(recorder.record_id(*recorder.records().front()), 0U);
}

TEST(FlightRecorder, OfNoCapacityKeepsNothing) {
  FlightRecorder recorder(0);
  EXPECT_FALSE(recorder.is_enabled());
  recorder.add(make_record(make_comm_record("none", "fake", 0, {0})));
  EXPECT_EQ(recorder.size(), 0U);
}

TEST(FlightRecorder, ThreadsMayAddReadAndResetAtOnce) {
  const auto comm = make_comm_record("threads", "fake", 0, {0});
  FlightRecorder recorder(16);
  std::atomic<bool> done{false};
  std::thread reader([&] {
    while (!done) {
      for (const auto& record : recorder.records()) EXPECT_EQ(record->comm, comm);
      recorder.reset();
    }
  });
  std::vector<std::thread> writers;
  for (int t = 0; t < 3; ++t) {
    writers.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) {
        const auto record = make_record(comm);
        recorder.add(record);
        record->started();
        record->ended(nullptr);
      }
    });
  }
  for (auto& writer : writers) writer.join();
  done = true;
  reader.join();
  EXPECT_EQ(comm->collectives, 6000U);
}

TEST(CallRecord, OnlyTheFirstEndCounts) {
  const auto record = make_record(make_comm_record("end", "fake", 0, {0}));
  EXPECT_EQ(record->state(), CallState::kScheduled);
  EXPECT_TRUE(record->is_pending());
  EXPECT_FALSE(record->ended_ns());
  record->ended(std::make_exception_ptr(Error(ErrorKind::kTimeout, "too late")));
  record->ended(nullptr);
  record->started();
  EXPECT_EQ(record->state(), CallState::kFailed);
  EXPECT_EQ(record->error(), "too late");
  EXPECT_FALSE(record->started_ns());
  EXPECT_GE(record->ended_ns(), record->created_ns);
}

TEST(CallRecord, SaysWhatTheCallIs) {
  const Comm comm = fake_comm(4, 1, "recorded");
  const at::Tensor x = at::ones({2, 3}, at::kInt);
  comm->all_gather(std::vector<at::Tensor>(4, at::empty({2, 3}, at::kInt)), x, false);
  comm->gather({}, x, 2, true);
  comm->reduce(x, 0, RedOpType::MAX, false);
  comm->batch_send_recv({{P2POp::Type::SEND, x, 3}, {P2POp::Type::RECV, x.clone(), 0}}, true);
  comm->barrier(false);
  const auto records = records_of("recorded");
  ASSERT_EQ(records.size(), 5U);
  EXPECT_EQ(records[0]->input, (CallRecord::Sizes{2, 3}));
  EXPECT_EQ(records[0]->output, CallRecord::Sizes{24});
  EXPECT_EQ(records[0]->dtype, at::kInt);
  EXPECT_EQ(records[1]->root, 2);
  EXPECT_TRUE(records[1]->async_op);
  EXPECT_FALSE(records[1]->output);
  EXPECT_EQ(records[2]->reduce_op, RedOpType::MAX);
  ASSERT_EQ(records[3]->messages.size(), 2U);
  EXPECT_TRUE(records[3]->messages[0].is_send);
  EXPECT_EQ(records[3]->messages[1].peer, 0);
  EXPECT_FALSE(records[4]->dtype);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(records[i]->state(), CallState::kCompleted) << i;
  EXPECT_EQ(records[4]->collective_seq, 4U);
  EXPECT_EQ(records[4]->p2p_seq, 1U);
  comm->finalize();
}

TEST(CallRecord, FollowsAnOperationThatNobodyAnswers) {
  std::atomic<bool> is_over{false};
  const auto body = [&](const Comm& comm) {
    while (comm->rank() == 1 && !is_over) std::this_thread::yield();
    if (comm->rank() == 1) return comm->abort();
    const auto work = comm->recv(at::empty({1}), 1, true);
    EXPECT_TRUE(records_of(comm->name()).back()->is_pending());
    EXPECT_EQ(error_of([&] { work->wait(); }).kind(), ErrorKind::kTimeout);
    const auto record = records_of(comm->name()).back();
    EXPECT_EQ(record->state(), CallState::kFailed);
    EXPECT_TRUE(record->started_ns());
    EXPECT_TRUE(contains(record->error().value_or(""), "did not"));
    EXPECT_TRUE(record->comm->failure());
    comm->abort();
    is_over = true;
  };
  run_local_ranks(2, body, testing::with_timeout(std::chrono::milliseconds(300)));
}

TEST(CallLog, WritesALineForEachEvent) {
  const std::string path = ::testing::TempDir() + "call_log_test.jsonl";
  std::remove(path.c_str());
  const Comm comm = fake_comm(2, 0, "logged");
  {
    const auto log = CallLog::open(path, {"Q", "E"}, {"buffers"});
    const uint64_t id = log->attach(*comm);
    comm->all_reduce(at::ones({2}), RedOpType::SUM, false);
    log->flush();
    EXPECT_TRUE(comm->hooks().record.remove(id));
    comm->barrier(false);
  }
  comm->finalize();
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_TRUE(contains(lines[0], R"("event": "Q")")) << lines[0];
  EXPECT_TRUE(contains(lines[0], R"("buffers": [)")) << lines[0];
  EXPECT_TRUE(contains(lines[1], R"("state": "completed")")) << lines[1];
  EXPECT_EQ(error_of([&] { CallLog::open(path, {"X"}); }).kind(), ErrorKind::kValue);
  EXPECT_EQ(error_of([] { CallLog::open("/nowhere/x", {"Q"}); }).kind(), ErrorKind::kRuntime);
}

TEST(Health, ListsCommunicatorsUntilTheyAreFinalized) {
  const auto of = [](const std::string& name) -> std::optional<CommHealth> {
    for (const auto& one : health()) {
      if (one.comm->name == name) return one;
    }
    return std::nullopt;
  };
  const Comm comm = fake_comm(2, 0, "healthy");
  EXPECT_TRUE(of("healthy")->is_healthy());
  EXPECT_EQ(of("healthy")->pending, 0U);
  comm->finalize();
  EXPECT_FALSE(of("healthy"));
  const Comm other = fake_comm(2, 0, "aborted");
  other->abort();
  EXPECT_EQ(of("aborted")->state, "aborted");
}

}  // namespace
}  // namespace torch_overlap
