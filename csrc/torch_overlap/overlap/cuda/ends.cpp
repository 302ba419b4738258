#include "torch_overlap/overlap/cuda/ends.h"

#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap::cuda {
namespace {

cudaEvent_t make_event() {
  const RelaxedCapture relaxed;
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  return event;
}

}  // namespace

Ends::Ends() {
  eager_.event = make_event();
  captured_.event = make_event();
}

Ends::~Ends() {
  const RelaxedCapture relaxed;
  (void)cudaEventDestroy(captured_.event);
}

void Ends::put_behind(cudaStream_t stream) const {
  const Capture capture = capture_of(stream);
  const End& end = capture ? captured_ : eager_;
  if (!end.is_recorded || end.capture != capture.id || end.stream == stream) return;
  check(cudaStreamWaitEvent(stream, end.event), "cudaStreamWaitEvent");
}

void Ends::record(cudaStream_t stream) {
  const Capture capture = capture_of(stream);
  End& end = capture ? captured_ : eager_;
  end.is_recorded = false;
  check(cudaEventRecord(end.event, stream), "cudaEventRecord");
  end.is_recorded = true;
  end.stream = stream;
  end.capture = capture.id;
}

}  // namespace torch_overlap::cuda
