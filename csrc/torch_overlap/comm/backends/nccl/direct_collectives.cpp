#include "torch_overlap/comm/backends/nccl/direct_collectives.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <future>
#include <thread>

#include "torch_overlap/comm/backends/nccl/aligned_parts.h"
#include "torch_overlap/comm/backends/nccl/config.h"
#include "torch_overlap/comm/backends/nccl/reduction.h"
#include "torch_overlap/comm/bootstrap.h"
#include "torch_overlap/comm/bounded.h"
#include "torch_overlap/comm/rms_norm.h"
#include "torch_overlap/comm/store_bootstrap.h"
#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap {
namespace {

using cuda::DirectLayout;
using cuda::DirectOp;
using cuda::DirectParams;
using cuda::DirectType;
using cuda::NormParams;

constexpr int kChannels = 2;  // of eager and of captured operations

struct DirectReduction {
  DirectType type;
  DirectOp op;
};

std::optional<DirectType> direct_type(ncclDataType_t type) {
  switch (type) {
    case ncclInt32:
      return DirectType::i32;
    case ncclInt64:
      return DirectType::i64;
    case ncclFloat16:
      return DirectType::f16;
    case ncclBfloat16:
      return DirectType::bf16;
    case ncclFloat32:
      return DirectType::f32;
    case ncclFloat64:
      return DirectType::f64;
    default:
      return std::nullopt;
  }
}

// Empty where NCCL or a composition does it.
std::optional<DirectReduction> direct_reduction(at::ScalarType dtype, const ReduceOp& op) {
  if (op.type() == RedOpType::PREMUL_SUM) return std::nullopt;
  const auto native = native_reduction(dtype, op);
  if (!native) return std::nullopt;
  const auto type = direct_type(native->dtype);
  if (!type) return std::nullopt;
  switch (native->op) {
    case ncclSum:
      return DirectReduction{*type, DirectOp::sum};
    case ncclProd:
      return DirectReduction{*type, DirectOp::product};
    case ncclMin:
      return DirectReduction{*type, DirectOp::min};
    case ncclMax:
      return DirectReduction{*type, DirectOp::max};
    case ncclAvg:
      if (*type == DirectType::i32 || *type == DirectType::i64) return std::nullopt;
      return DirectReduction{*type, DirectOp::average};
    default:
      return std::nullopt;
  }
}

bool is_reduction(Primitive primitive) {
  return primitive == Primitive::all_reduce || primitive == Primitive::reduce_scatter;
}

size_t line_data(DirectType type) {
  return type == DirectType::i64 || type == DirectType::f64 ? 8 : 12;
}

// Empty where the call has a form that is not done directly.
std::optional<DirectProblem> problem_of(const Call& call, int size) {
  DirectProblem problem{.primitive = call.primitive, .size = size, .bytes = 0, .line_data = 12};
  switch (call.name) {
    case OpName::all_reduce:
    case OpName::all_reduce_rms_norm:
    case OpName::reduce_scatter:
    case OpName::reduce_scatter_single: {
      const auto reduction = direct_reduction(call.tensor.scalar_type(), call.reduce_op);
      if (!reduction) return std::nullopt;
      problem.line_data = line_data(reduction->type);
      if (call.norm) problem.row_bytes = call.norm->weight.nbytes();
      problem.bytes = call.tensor.nbytes();
      return problem;
    }
    case OpName::all_gather:
    case OpName::all_gather_single:
    case OpName::broadcast:
      problem.bytes = call.tensor.nbytes();
      return problem;
    case OpName::all_to_all_single:
      problem.bytes = call.in.flat.nbytes() / size;
      return problem;
    case OpName::all_to_all:
    case OpName::all_to_all_v_single:
      problem.is_uniform = false;
      return problem;
    default:
      return std::nullopt;
  }
}

struct Part {
  char* data;
  size_t bytes;
};

// The part of `rank`: to read from, and to write to.
Part part_to_read(const Blocks& blocks, int rank, int size) {
  if (!blocks.parts.empty()) {
    const at::Tensor& part = blocks.parts[rank];
    return {static_cast<char*>(const_cast<void*>(part.const_data_ptr())), part.nbytes()};
  }
  const size_t bytes = blocks.flat.nbytes() / size;
  auto* data = static_cast<char*>(const_cast<void*>(blocks.flat.const_data_ptr()));
  return {data + rank * bytes, bytes};
}

Part part_to_write(const Blocks& blocks, int rank, int size) {
  if (!blocks.parts.empty()) {
    const at::Tensor& part = blocks.parts[rank];
    return {static_cast<char*>(part.mutable_data_ptr()), part.nbytes()};
  }
  const size_t bytes = blocks.flat.nbytes() / size;
  return {static_cast<char*>(blocks.flat.mutable_data_ptr()) + rank * bytes, bytes};
}

void send_to_all(DirectParams& params, const char* data, size_t bytes) {
  params.one_source = true;
  for (int r = 0; r < params.size; ++r) {
    params.send[r] = data;
    params.send_bytes[r] = bytes;
  }
}

void receive(DirectParams& params, int rank, Part part) {
  params.recv[rank] = part.data;
  params.recv_bytes[rank] = part.bytes;
}

// What goes where.
void set_parts(DirectParams& params, const Call& call) {
  const int size = params.size;
  switch (call.primitive) {
    case Primitive::all_reduce: {
      auto* data = static_cast<char*>(call.tensor.mutable_data_ptr());
      send_to_all(params, data, call.tensor.nbytes());
      return receive(params, 0, {data, call.tensor.nbytes()});
    }
    case Primitive::reduce_scatter:
      receive(params, 0,
              {static_cast<char*>(call.tensor.mutable_data_ptr()), call.tensor.nbytes()});
      for (int r = 0; r < size; ++r) {
        const Part part = part_to_read(call.in, r, size);
        params.send[r] = part.data;
        params.send_bytes[r] = part.bytes;
      }
      return;
    case Primitive::all_gather:
      send_to_all(params, static_cast<const char*>(call.tensor.const_data_ptr()),
                  call.tensor.nbytes());
      for (int r = 0; r < size; ++r) receive(params, r, part_to_write(call.out, r, size));
      return;
    case Primitive::all_to_all:
      for (int r = 0; r < size; ++r) {
        const Part part = part_to_read(call.in, r, size);
        params.send[r] = part.data;
        params.send_bytes[r] = part.bytes;
        receive(params, r, part_to_write(call.out, r, size));
      }
      return;
    default:  // broadcast
      if (params.rank == call.root) {
        return send_to_all(params, static_cast<const char*>(call.tensor.const_data_ptr()),
                           call.tensor.nbytes());
      }
      return receive(params, call.root,
                     {static_cast<char*>(call.tensor.mutable_data_ptr()), call.tensor.nbytes()});
  }
}

NormParams norm_params(const RmsNorm& norm) {
  const auto read = [](const at::Tensor& tensor) {
    return tensor.defined() ? static_cast<const char*>(tensor.const_data_ptr()) : nullptr;
  };
  return {.residual = read(norm.residual),
          .residual_out = static_cast<char*>(norm.residual_out.mutable_data_ptr()),
          .weight = read(norm.weight),
          .bias = read(norm.bias),
          .eps = static_cast<float>(norm.eps),
          .row_bytes = norm.weight.nbytes(),
          .row_blocks = 1};
}

// What the peers write to, or in a reduction read. Undefined where it is not one tensor.
const at::Tensor& shared_tensor(const Call& call) {
  switch (call.primitive) {
    case Primitive::all_gather:
    case Primitive::all_to_all:
      return call.out.flat;
    case Primitive::reduce_scatter:
      return call.in.flat;
    default:
      return call.tensor;
  }
}

// A vector of the one is a vector of the other.
bool is_aligned(const DirectParams& params) {
  uintptr_t bits = 0;
  for (int r = 0; r < params.size; ++r) {
    bits |= reinterpret_cast<uintptr_t>(params.send[r]);
    bits |= reinterpret_cast<uintptr_t>(params.recv[r]);
  }
  return bits % DirectGeometry::kVectorBytes == 0;
}

uint32_t chunks_of(size_t bytes, size_t unit, uint32_t chunk) {
  const size_t units = (bytes + unit - 1) / unit;
  return static_cast<uint32_t>((units + chunk - 1) / chunk);
}

// One for each unit of a chunk, in whole warps.
unsigned int threads_of(uint32_t chunk) {
  constexpr uint32_t kWarp = 32;
  return std::min<uint32_t>((chunk + kWarp - 1) / kWarp * kWarp, DirectGeometry::kThreads);
}

// In a reduction, and in an operation of slices, all ranks talk alike.
void set_chunks(DirectParams& params, const Call& call, bool has_slices, size_t unit) {
  if (has_slices) {
    const size_t even = (params.send_bytes[0] + params.size - 1) / params.size;
    params.send_bytes[1] = (even + unit - 1) / unit * unit;
  }
  const size_t alike = has_slices ? params.send_bytes[1] : params.send_bytes[0];
  for (int r = 0; r < params.size; ++r) {
    if (r == params.rank) continue;
    const size_t bytes =
        is_reduction(call.primitive) ? alike : std::max(params.send_bytes[r], params.recv_bytes[r]);
    params.chunks[r] = chunks_of(bytes, unit, params.chunk);
    params.most_chunks = std::max(params.most_chunks, params.chunks[r]);
  }
  // The own part is copied, in the same steps.
  if (call.primitive == Primitive::all_to_all) {
    params.most_chunks =
        std::max(params.most_chunks, chunks_of(params.recv_bytes[params.rank], unit, params.chunk));
  }
}

// On a thread of its own: abort() ends the wait for ranks that do not come, though not the thread,
// which goes on until its timeout, over a connection of its own.
std::shared_ptr<SymmetricMemory> rendezvous_unless_failed(const CommRuntime& runtime,
                                                          const BackendContext& context,
                                                          const SymmetricMemory::Request& request) {
  constexpr auto kNap = std::chrono::milliseconds(20);
  const auto stream = c10::cuda::getCurrentCUDAStream(context.device.index());
  std::packaged_task<std::shared_ptr<SymmetricMemory>()> task(
      [stream, store = own_connection(context.store, request.name, context.timeout()),
       rank = context.rank, size = context.size, timeout = context.timeout(), request] {
        const c10::cuda::CUDAStreamGuard guard(stream);
        const cuda::RelaxedCapture relaxed;
        StoreBootstrap bootstrap(store, request.name, rank, size, timeout);
        return SymmetricMemory::rendezvous(bootstrap, request);
      });
  auto memory = task.get_future();
  std::thread(std::move(task)).detach();
  while (memory.wait_for(kNap) != std::future_status::ready) runtime.failure.rethrow_if_set();
  return memory.get();
}

}  // namespace

struct DirectCollectives::Memory {
  std::shared_ptr<SymmetricMemory> symmetric;
  std::shared_ptr<CommRuntime> runtime;  // the words of the waits
  size_t channel_bytes = 0;
  cuda::WaitControl control{};
};

DirectCollectives::DirectCollectives(const BackendContext& context,
                                     std::shared_ptr<CommRuntime> runtime)
    : context_(context), runtime_(std::move(runtime)) {
  try {
    load_norm();
    if (!is_direct_possible(Primitive::all_reduce, context.size)) return;
    ask_device();
    if (context.options.direct != DirectMode::off) load();
  } catch (...) {
    fault_ = Fault::current();
  }
}

// Also behind what NCCL does.
void DirectCollectives::load_norm() const {
  const c10::cuda::CUDAGuard device(context_.device);
  const cuda::RelaxedCapture relaxed;
  cuda::check(cuda::load_norm_alone(), "all_reduce_rms_norm: loading kernels");
}

// What plans go by, also those of a communicator that is off: an operation's hint may differ.
void DirectCollectives::ask_device() {
  const c10::cuda::CUDAGuard device(context_.device);
  const cuda::RelaxedCapture relaxed;
  cuda::check(cuda::has_hopper_code(&has_hopper_code_), "direct collectives: loading kernels");
  if (!has_hopper_code_) return;
  const auto* properties = at::cuda::getDeviceProperties(context_.device.index());
  const int half = std::max(properties->multiProcessorCount / 2, 1);
  const int asked_for = most_ctas(context_.options.hints);
  most_bulk_blocks_ = asked_for > 0 ? std::min(asked_for, half) : half;
}

void DirectCollectives::load() {
  const c10::cuda::CUDAGuard device(context_.device);
  const cuda::RelaxedCapture relaxed;
  const auto* properties = at::cuda::getDeviceProperties(context_.device.index());
  TORCH_OVERLAP_CHECK(properties->major >= 8, kUnsupported, kDirectHint,
                      ": expected a GPU of compute capability 8.0 or more, got ", properties->major,
                      ".", properties->minor);
  cuda::check(cuda::load_line_kernels(), "direct collectives: loading kernels");
  cuda::check(cuda::load_push_kernels(), "direct collectives: loading kernels");
  cuda::check(cuda::load_two_shot_kernels(), "direct collectives: loading kernels");
  if (has_hopper_code_) {
    cuda::check(cuda::load_bulk_kernels(), "direct collectives: loading kernels");
  }
  cuda::check(cuda::load_norm_kernels(), "direct collectives: loading kernels");
  cuda::check(cuda::load_zero_copy_kernels(), "direct collectives: loading kernels");
  runtime_->waits();
}

DirectPlan DirectCollectives::plan(const Call& call, bool is_capturing) {
  if (call.direct == DirectMode::off || state_ == State::refused) return {};
  if (!is_direct_possible(call.primitive, context_.size)) return {};
  auto problem = problem_of(call, context_.size);
  if (!problem) return {};
  if (!has_hopper_code_) problem->row_bytes = 0;  // no clusters
  problem->most_bulk_blocks = most_bulk_blocks_;
  problem->has_windows = has_windows_;
  const DirectPlan plan = plan_direct(*problem, call.direct);
  if (!plan) return {};
  if (state_ == State::untried && !is_capturing) prepare();
  return state_ == State::ready ? plan : DirectPlan{};
}

void DirectCollectives::prepare() {
  const cuda::RelaxedCapture relaxed;
  auto memory = std::make_shared<Memory>();
  memory->runtime = runtime_;
  memory->channel_bytes = DirectLayout::bytes(context_.size, most_push_blocks(context_.size));
  SymmetricMemory::Request request{.op = kDirectHint,
                                   .name = concat("direct collectives of '", context_.name, "'"),
                                   .tensor = {},
                                   .digest = concat("channels of ", memory->channel_bytes,
                                                    " bytes, clusters: ", has_hopper_code_,
                                                    ", most blocks: ", most_bulk_blocks_),
                                   .fault = fault_};
  try {
    if (!fault_) load();
    request.tensor = symmetric_empty({static_cast<int64_t>(kChannels * memory->channel_bytes)},
                                     at::kByte, context_.device);
  } catch (...) {
    request.fault = Fault::current();
  }
  state_ = State::refused;
  try {
    memory->symmetric = rendezvous_unless_failed(*runtime_, context_, request);
  } catch (const Error& error) {
    runtime_->failure.rethrow_if_set();
    if (error.kind() == ErrorKind::kTimeout) {
      runtime_->failure.set(WorkStatus::TIMEDOUT, std::current_exception());
      throw;
    }
    if (error.kind() != ErrorKind::kUnsupported) TORCH_WARN(error.what(), "; NCCL does it all");
    return;
  }
  memory->control = runtime_->waits().control(memory->symmetric->id(), request.name, {});
  memory_ = std::move(memory);
  state_ = State::ready;
}

void DirectCollectives::add_window(uint64_t number,
                                   const std::shared_ptr<SymmetricMemory>& memory) {
  std::erase_if(windows_, [&](const Window& window) {
    return window.memory.expired() || window.key == memory.get();
  });
  windows_.push_back({.number = static_cast<uint32_t>(number) + 1,
                      .memory = memory,
                      .key = memory.get(),
                      .begin = static_cast<const char*>(memory->pointer(context_.rank)),
                      .bytes = memory->bytes()});
}

void DirectCollectives::remove_window(const SymmetricMemory& memory) {
  std::erase_if(windows_, [&](const Window& window) { return window.key == &memory; });
}

std::shared_ptr<SymmetricMemory> DirectCollectives::window_of(const Call& call) const {
  if (windows_.empty() || call.direct == DirectMode::off) return nullptr;
  if (!is_direct_possible(call.primitive, context_.size)) return nullptr;
  const at::Tensor& tensor = shared_tensor(call);
  if (!tensor.defined() || tensor.numel() == 0) return nullptr;
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  for (const Window& window : windows_) {
    if (begin < window.begin || begin + tensor.nbytes() > window.begin + window.bytes) continue;
    if (auto memory = window.memory.lock()) return memory;
  }
  return nullptr;
}

cuda::DirectWindow DirectCollectives::window_params(const Call& call,
                                                    const DirectParams& params) const {
  cuda::DirectWindow out{};
  const auto found = std::find_if(windows_.begin(), windows_.end(), [&](const Window& window) {
    return window.key == call.window.get();
  });
  if (found == windows_.end() || !is_aligned(params)) return out;
  for (int r = 0; r < params.size; ++r) out.base[r] = static_cast<char*>(call.window->pointer(r));
  const auto* tensor = static_cast<const char*>(shared_tensor(call).const_data_ptr());
  out.offset = tensor - found->begin;
  const bool has_parts = &shared_tensor(call) != &call.tensor;
  out.place = has_parts ? params.rank * params.send_bytes[params.rank] : 0;
  out.number = found->number;
  return out;
}

void DirectCollectives::launch(const Call& call, const DirectPlan& plan, bool is_capturing,
                               cudaStream_t stream, bool& has_begun) {
  const Memory& memory = *memory_;
  DirectParams params{};
  params.rank = context_.rank;
  params.size = context_.size;
  params.vectors_at = DirectLayout::vectors(params.size);
  params.bulk_at = DirectLayout::bulk(params.size, most_push_blocks(params.size));
  const size_t channel = is_capturing ? memory.channel_bytes : 0;
  for (int r = 0; r < params.size; ++r) {
    params.base[r] = static_cast<char*>(memory.symmetric->pointer(r)) + channel;
  }
  params.chunk = plan.chunk;
  params.control = memory.control;
  params.control.timeout_ns =
      static_cast<uint64_t>(std::chrono::nanoseconds(bounded_timeout(call.timeout)).count());
  params.window = memory.symmetric->id();
  set_parts(params, call);

  const cuda::DirectLaunch launch{.blocks = static_cast<unsigned int>(plan.blocks),
                                  .threads = threads_of(plan.chunk),
                                  .dependent = has_hopper_code_,
                                  .stream = stream,
                                  .cluster = static_cast<unsigned int>(plan.row_blocks)};
  const bool has_lines = plan.protocol == DirectProtocol::ll;
  DirectReduction reduction{};
  size_t unit = has_lines ? 12 : DirectGeometry::kVectorBytes;
  if (is_reduction(call.primitive)) {
    reduction = *direct_reduction(call.tensor.scalar_type(), call.reduce_op);
    params.op = reduction.op;
    if (has_lines) unit = line_data(reduction.type);
  }
  std::optional<AlignedParts> aligned;
  if (plan.protocol == DirectProtocol::bulk) aligned.emplace(params, stream);
  set_chunks(params, call, plan.has_slices, unit);

  cudaError_t status = cudaSuccess;
  if (plan.row_blocks > 0) {
    NormParams norm = norm_params(*call.norm);
    norm.row_blocks = plan.row_blocks;
    params.most_chunks = call.tensor.nbytes() / norm.row_bytes * norm.row_blocks;
    std::fill_n(params.chunks, params.size, params.most_chunks);
    status = has_lines ? launch_line_norm(reduction.type, params, norm, launch)
                       : launch_push_norm(reduction.type, params, norm, launch);
  } else if (plan.zero_copy) {
    const cuda::DirectWindow window = window_params(call, params);
    if (!is_reduction(call.primitive)) {
      status = launch_zero_copy(params, window, launch);
    } else if (call.primitive == Primitive::reduce_scatter) {
      status = launch_zero_copy_reduce(reduction.type, params, window, launch);
    } else {
      status = launch_zero_copy_all_reduce(reduction.type, params, window, launch);
    }
  } else if (plan.protocol == DirectProtocol::bulk) {
    if (!is_reduction(call.primitive)) {
      status = launch_bulk_copy(params, launch);
    } else {
      status = plan.has_slices ? launch_bulk_two_shot(reduction.type, params, launch)
                               : launch_bulk_reduce(reduction.type, params, launch);
    }
  } else if (!is_reduction(call.primitive)) {
    status = has_lines ? launch_line_copy(params, launch) : launch_push_copy(params, launch);
  } else if (plan.protocol == DirectProtocol::two_shot) {
    status = launch_two_shot(reduction.type, params, launch);
  } else {
    status = has_lines ? launch_line_reduce(reduction.type, params, launch)
                       : launch_push_reduce(reduction.type, params, launch);
  }
  cuda::check(status, call.describe());
  has_begun = true;
  if (aligned) aligned->copy_back();
}

void launch_rms_norm(const Call& call, cudaStream_t stream) {
  const RmsNorm& norm = *call.norm;
  if (call.tensor.numel() == 0) return;
  const NormParams params = norm_params(norm);
  const auto reduction = direct_reduction(call.tensor.scalar_type(), call.reduce_op);
  auto* rows = static_cast<char*>(call.tensor.mutable_data_ptr());
  if (!reduction || !cuda::is_norm_possible(reduction->type, params.row_bytes)) {
    return add_rms_norm(call.tensor, norm);
  }
  const auto count = static_cast<uint32_t>(call.tensor.numel() / norm.weight.numel());
  cuda::check(cuda::launch_norm(reduction->type, rows, count, params, stream), call.describe());
}

}  // namespace torch_overlap
