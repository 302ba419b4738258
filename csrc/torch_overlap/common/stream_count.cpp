#include "torch_overlap/common/stream_count.h"

namespace torch_overlap {

std::atomic<int64_t>& num_streams_created() {
  static std::atomic<int64_t> count{0};
  return count;
}

}  // namespace torch_overlap
