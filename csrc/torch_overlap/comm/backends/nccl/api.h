#pragma once

#include <nccl.h>

#include <string>
#include <string_view>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/export.h"

namespace torch_overlap {

// A function newer than the NCCL header of this build. Copies `count` elements to the window of
// `peer`, from byte `offset` of it on, and increments one of NCCL's own signals there. The source
// is in a window of the communicator; `signal`, `context` and `flags` are 0.
using NcclPutSignal = ncclResult_t (*)(const void* source, size_t count, ncclDataType_t type,
                                       int peer, ncclWindow_t window, size_t offset, int signal,
                                       int context, unsigned int flags, ncclComm_t comm,
                                       cudaStream_t stream);

// Table of the NCCL functions that the backend calls. Tests replace functions to inject faults.
// loaded() is the libnccl of the process, which is torch's.
struct TORCH_OVERLAP_API NcclApi {
  decltype(&ncclGetVersion) get_version = ncclGetVersion;
  decltype(&ncclGetErrorString) error_string = ncclGetErrorString;
  decltype(&ncclGetLastError) last_error = ncclGetLastError;
  decltype(&ncclGetUniqueId) get_unique_id = ncclGetUniqueId;
  decltype(&ncclCommInitRankConfig) comm_init = ncclCommInitRankConfig;
  decltype(&ncclCommSplit) comm_split = ncclCommSplit;
  decltype(&ncclCommFinalize) comm_finalize = ncclCommFinalize;
  decltype(&ncclCommDestroy) comm_destroy = ncclCommDestroy;
  decltype(&ncclCommAbort) comm_abort = ncclCommAbort;
  decltype(&ncclCommGetAsyncError) comm_async_error = ncclCommGetAsyncError;
  decltype(&ncclCommUserRank) comm_user_rank = ncclCommUserRank;
  decltype(&ncclGroupStart) group_start = ncclGroupStart;
  decltype(&ncclGroupEnd) group_end = ncclGroupEnd;
  decltype(&ncclCommRegister) comm_register = ncclCommRegister;
  decltype(&ncclCommDeregister) comm_deregister = ncclCommDeregister;
  decltype(&ncclRedOpCreatePreMulSum) red_op_create_premul_sum = ncclRedOpCreatePreMulSum;
  decltype(&ncclRedOpDestroy) red_op_destroy = ncclRedOpDestroy;
  decltype(&ncclAllReduce) all_reduce = ncclAllReduce;
  decltype(&ncclReduce) reduce = ncclReduce;
  decltype(&ncclBroadcast) broadcast = ncclBroadcast;
  decltype(&ncclAllGather) all_gather = ncclAllGather;
  decltype(&ncclReduceScatter) reduce_scatter = ncclReduceScatter;
  decltype(&ncclSend) send = ncclSend;
  decltype(&ncclRecv) recv = ncclRecv;
  // Null before NCCL 2.28, 2.27, 2.27 and 2.29, respectively.
  decltype(&ncclCommRevoke) comm_revoke;
  decltype(&ncclCommShrink) comm_shrink;
  decltype(&ncclCommWindowRegister) comm_window_register;
  NcclPutSignal put_signal;
  // True if NCCL may create NVLink multicast objects. Both flags are read with the table, before
  // the first communicator: NCCL does not read its environment again.
  bool is_nvls_enabled;
  bool is_graph_register_enabled;  // in captures NCCL maps memory into the peers

  NcclApi();
  static const NcclApi& loaded();

  // Returns NCCL's version code: 22809 is 2.28.9.
  int version() const;
};

// Formats a version code, for example as "2.28.9".
TORCH_OVERLAP_API std::string nccl_version_string(int version);

// Throws kUnsupported with both versions if the loaded NCCL is older than `needed`. `what` is the
// feature.
TORCH_OVERLAP_API void require_nccl(const NcclApi& api, int needed, std::string_view what);

// Error of an NCCL call.
class TORCH_OVERLAP_API NcclError : public Error {
 public:
  NcclError(ncclResult_t result, const std::string& message)
      : Error(ErrorKind::kRuntime, message), result_(result) {}
  // True if the communicator cannot be used any more. A rejected argument leaves it usable.
  bool is_fatal() const { return result_ != ncclInvalidArgument && result_ != ncclInvalidUsage; }
  // True if NCCL does not support this system or these arguments; false if it broke.
  bool is_refusal() const { return !is_fatal() || result_ == ncclSystemError; }

 private:
  ncclResult_t result_;
};

[[noreturn]] TORCH_OVERLAP_API void throw_nccl_error(const NcclApi& api, ncclResult_t result,
                                                     std::string_view what);

inline void nccl_check(const NcclApi& api, ncclResult_t result, std::string_view what) {
  if (__builtin_expect(result == ncclSuccess, 1)) return;
  throw_nccl_error(api, result, what);
}

// Makes the calls between its constructor and end() one operation of NCCL, in which none waits for
// another. A group never stays open: if an exception passes, the destructor closes it, and NCCL
// drops what a failed call left in it. Only NCCL calls may be made inside.
class NcclGroup {
 public:
  explicit NcclGroup(const NcclApi& api) : api_(api) {
    nccl_check(api_, api_.group_start(), "ncclGroupStart");
  }
  ~NcclGroup() {
    if (open_) (void)api_.group_end();
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  void end() {
    open_ = false;
    nccl_check(api_, api_.group_end(), "ncclGroupEnd");
  }

 private:
  const NcclApi& api_;
  bool open_ = true;
};

}  // namespace torch_overlap
