#pragma once

#include <string>
#include <vector>

#include "torch_overlap/comm/backends/nccl/api.h"

namespace torch_overlap::testing {

// NCCL functions that only log their calls, and fail on demand. There is one log per process: tests
// call reset() first.
struct FakeNccl {
  std::vector<std::string> log;
  std::vector<const void*> sent;  // buffer that the n-th send reads, and the n-th receive writes
  std::vector<void*> received;
  int depth = 0;     // nesting depth of open groups
  int fail_at = -1;  // number of the call that fails; -1: none
  ncclResult_t failure = ncclInternalError;
  int version = NCCL_VERSION_CODE;

  static FakeNccl& instance() {
    static FakeNccl fake;
    return fake;
  }
  static void reset() { instance() = FakeNccl(); }

  ncclResult_t note(std::string what) {
    const bool fails = static_cast<int>(log.size()) == fail_at;
    log.push_back(std::move(what));
    return fails ? failure : ncclSuccess;
  }

  static NcclApi api() {
    NcclApi api;
    api.get_version = [](int* version) {
      *version = instance().version;
      return ncclSuccess;
    };
    api.last_error = [](ncclComm_t) { return "what NCCL said"; };
    api.group_start = [] {
      ++instance().depth;
      return instance().note("start");
    };
    api.group_end = [] {
      --instance().depth;
      return instance().note("end");
    };
    api.send = [](const void* data, size_t count, ncclDataType_t, int peer, ncclComm_t,
                  cudaStream_t) {
      instance().sent.push_back(data);
      return instance().note(concat("send ", count, " to ", peer));
    };
    api.recv = [](void* data, size_t count, ncclDataType_t, int peer, ncclComm_t, cudaStream_t) {
      instance().received.push_back(data);
      return instance().note(concat("recv ", count, " from ", peer));
    };
    api.broadcast = [](const void*, void*, size_t count, ncclDataType_t, int root, ncclComm_t,
                       cudaStream_t) {
      return instance().note(concat("broadcast ", count, " from ", root));
    };
    api.reduce = [](const void*, void*, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                    ncclComm_t, cudaStream_t) {
      return instance().note(concat("reduce ", count, " type ", type, " op ", op, " to ", root));
    };
    api.all_reduce = [](const void*, void*, size_t count, ncclDataType_t type, ncclRedOp_t op,
                        ncclComm_t, cudaStream_t) {
      return instance().note(concat("all_reduce ", count, " type ", type, " op ", op));
    };
    api.all_gather = [](const void*, void*, size_t count, ncclDataType_t, ncclComm_t,
                        cudaStream_t) { return instance().note(concat("all_gather ", count)); };
    api.reduce_scatter = [](const void*, void*, size_t count, ncclDataType_t type, ncclRedOp_t op,
                            ncclComm_t, cudaStream_t) {
      return instance().note(concat("reduce_scatter ", count, " type ", type, " op ", op));
    };
    api.red_op_create_premul_sum = [](ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t) {
      *op = static_cast<ncclRedOp_t>(100);
      const auto bits = *static_cast<const uint16_t*>(scalar);
      return instance().note(
          concat("premul type ", type,
                 residence == ncclScalarDevice ? " on device" : concat(" low bits ", bits)));
    };
    api.red_op_destroy = [](ncclRedOp_t op, ncclComm_t) {
      return instance().note(concat("drop op ", op));
    };
    return api;
  }
};

}  // namespace torch_overlap::testing
