#include "torch_overlap/overlap/cuda/last_op_event.h"

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

LastOpEvent::LastOpEvent() {
  eager_.event = make_event();
  captured_.event = make_event();
}

LastOpEvent::~LastOpEvent() {
  const RelaxedCapture relaxed;
  (void)cudaEventDestroy(captured_.event);
}

void LastOpEvent::make_stream_wait(cudaStream_t stream) const {
  const Capture capture = capture_of(stream);
  const Record& end = capture ? captured_ : eager_;
  if (!end.is_recorded || end.capture != capture.id || end.stream == stream) return;
  check(cudaStreamWaitEvent(stream, end.event), "cudaStreamWaitEvent");
}

void LastOpEvent::record(cudaStream_t stream) {
  const Capture capture = capture_of(stream);
  Record& end = capture ? captured_ : eager_;
  end.is_recorded = false;
  check(cudaEventRecord(end.event, stream), "cudaEventRecord");
  end.is_recorded = true;
  end.stream = stream;
  end.capture = capture.id;
}

}  // namespace torch_overlap::cuda
