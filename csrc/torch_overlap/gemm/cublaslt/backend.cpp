#include "torch_overlap/gemm/backend.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/strings.h"
#include "torch_overlap/gemm/counters.h"
#include "torch_overlap/gemm/cublaslt/cache.h"
#include "torch_overlap/gemm/cublaslt/custom_kernel.h"
#include "torch_overlap/gemm/cublaslt/epilogue.h"
#include "torch_overlap/gemm/cublaslt/group_streams.h"
#include "torch_overlap/gemm/cublaslt/handle.h"
#include "torch_overlap/gemm/cublaslt/scales.h"
#include "torch_overlap/gemm/cublaslt/workspace.h"
#include "torch_overlap/gemm/cuda/quantize_host.h"
#include "torch_overlap/gemm/epilogue.h"
#include "torch_overlap/gemm/options.h"

namespace torch_overlap::cublaslt {
namespace {

at::Tensor op_of(const OperandView& operand) {
  return operand.transposed ? operand.data.t() : operand.data;
}

void run_dequantized(cublasLtHandle_t handle, const GemmProblem& problem);

// Runs one GEMM on the current stream.
class GemmRunner {
 public:
  GemmRunner(cublasLtHandle_t handle, const GemmProblem& problem)
      : problem_(problem),
        handle_(handle),
        stream_(c10::cuda::getCurrentCUDAStream()),
        workspace_(workspace_for(problem.args, stream_)) {}

  void run() {
    if (has_bias_grad_over_k(problem_)) {
      if (can_fuse_bias_grad_over_k(problem_) && fused(CUBLASLT_EPILOGUE_BGRADB)) return;
      count(gemm_counters().unfused);
      compute_unfused_bias_grad(problem_);
    }
    const auto epilogue = fused_epilogue(problem_);
    if (epilogue && fused(*epilogue)) return;
    run_unfused();
  }

 private:
  bool fused(cublasLtEpilogue_t epilogue) {
    // The library either sets amax, or raises the existing value.
    if (problem_.args.out_amax.defined()) problem_.args.out_amax.zero_();
    return matmul(epilogue, problem_.args.out);
  }

  // Computes the product in fp32, then the epilogue: rounded once, as in the fused case.
  void run_unfused() {
    if (!has_bias_grad_over_k(problem_)) count(gemm_counters().unfused);
    const auto [m, n, _] = problem_.shape;
    at::Tensor product = at::empty({m, n}, problem_.args.out.options().dtype(at::kFloat));
    if (!matmul(CUBLASLT_EPILOGUE_DEFAULT, product)) {
      if (problem_.lhs.scaled()) return run_dequantized(handle_, problem_);
      product = at::mm(op_of(problem_.lhs).to(at::kFloat), op_of(problem_.rhs).to(at::kFloat));
    }
    apply_unfused_epilogue(problem_, std::move(product));
  }

  bool matmul(cublasLtEpilogue_t epilogue, const at::Tensor& out) {
    const LtMatmulArgs call = make_matmul_args(problem_, epilogue, out, workspace_);
    return PlanCache::instance().plan_of(handle_, call)->run(handle_, call, workspace_, stream_);
  }

  const GemmProblem& problem_;
  const cublasLtHandle_t handle_;
  const c10::cuda::CUDAStream stream_;
  const Workspace workspace_;
};

void run_double(const GemmProblem& problem) {
  compute_unfused_bias_grad(problem);
  apply_unfused_epilogue(problem, at::mm(op_of(problem.lhs), op_of(problem.rhs)));
}

// Fallback for operands that the tensor cores of this device do not support, or sizes that the
// kernels do not. Dequantized MXFP8 values are exact in bf16, except the smallest. With fp32 scales
// they are rounded, by far less than the quantization error.
void run_dequantized(cublasLtHandle_t handle, const GemmProblem& problem) {
  const auto plain = [&](const OperandView& operand) {
    return OperandView{.data = dequantize(problem.op, operand, at::kBFloat16),
                       .transposed = operand.transposed};
  };
  const GemmProblem unscaled{.op = problem.op,
                             .args = problem.args,
                             .shape = problem.shape,
                             .lhs = plain(problem.lhs),
                             .rhs = plain(problem.rhs)};
  GemmRunner(handle, unscaled).run();
}

// `call` receives owners of memory that the result refers to.
std::optional<sm90::Problem> custom_kernel_problem_of(const GemmProblem& problem,
                                                      LtMatmulArgs& call) {
  const auto epilogue = fused_epilogue(problem);
  if (!epilogue || problem.lhs.data.scalar_type() == at::kDouble) return std::nullopt;
  call = make_matmul_args(problem, *epilogue, problem.args.out, {});
  return custom_kernel_problem(call, call.d);
}

// True if the scales of an operand are read in place, at `address`.
bool reads_scales_in_place(const OperandView& operand, const void* address) {
  return !operand.scaled() || operand.scale_inv.const_data_ptr() == address;
}

// Calls sm90::load_small_m() or sm90::run_small_m(). Returns false if there is no kernel for it, or
// if scales would be copied by a kernel between the last one and it.
template <typename Function>
bool with_early_kernel(const GemmProblem& problem, const Function& function) {
  const EarlyStart start = problem.args.early_start;
  const bool has_block_scales =
      problem.lhs.scaled() && !supports_fast_accumulation(problem.lhs.scaling);
  if (start == EarlyStart::none || has_bias_grad_over_k(problem) || has_block_scales) return false;
  LtMatmulArgs call;
  const auto product = custom_kernel_problem_of(problem, call);
  return product && reads_scales_in_place(problem.rhs, call.scale_a) &&
         reads_scales_in_place(problem.lhs, call.scale_b) && function(*product, start);
}

void run_problem(cublasLtHandle_t handle, const GemmProblem& problem) {
  if (with_early_kernel(problem, sm90::run_small_m)) return;
  if (problem.lhs.data.scalar_type() == at::kDouble) return run_double(problem);
  const auto* device = at::cuda::getCurrentDeviceProperties();
  const auto mode = problem.lhs.scaling;
  if (supports_scaling_mode(mode, device->major, device->minor))
    return GemmRunner(handle, problem).run();
  run_dequantized(handle, problem);
}

class CublasLtGemm final : public GemmBackend {
 public:
  void check(const GemmProblem& problem) const override {
    const auto mode = problem.lhs.scaling;
    if (mode != ScalingMode::MXFP8_1D_SCALING || gemm_mxfp8() != Mxfp8Path::kNative) return;
    const auto* device = at::cuda::getDeviceProperties(problem.lhs.data.device().index());
    TORCH_OVERLAP_CHECK(
        supports_scaling_mode(mode, device->major, device->minor), kUnsupported, problem.op,
        ": expected a GPU whose tensor cores read MXFP8 (sm_100 or sm_110), got sm_", device->major,
        device->minor, "; call set_gemm_mxfp8(\"dequantize\") to multiply in bfloat16");
  }

  void run(const GemmProblem& problem) override { run_problem(current_handle(), problem); }

  bool load_early(const GemmProblem& problem) override {
    const auto [m, n, k] = problem.shape;
    if (m == 0 || n == 0 || k == 0) return false;
    const c10::cuda::CUDAGuard guard(problem.args.out.device());
    return with_early_kernel(problem, sm90::load_small_m);
  }

  std::vector<std::string> custom_kernels(const GemmProblem& problem) override {
    std::vector<std::string> names;
    LtMatmulArgs call;
    const auto product = custom_kernel_problem_of(problem, call);
    if (!product) return names;
    for (const sm90::TileShape& tile_shape : sm90::supported_tile_shapes(*product)) {
      names.push_back(concat(tile_shape.rows, "x", tile_shape.columns));
    }
    return names;
  }

  void run_custom(const GemmProblem& problem, size_t index) override {
    LtMatmulArgs call;
    const auto product = custom_kernel_problem_of(problem, call);
    sm90::run(*product, sm90::supported_tile_shapes(*product).at(index));
  }

  std::optional<std::pair<Quantized, at::Tensor>> quantize(const QuantizeArgs& args) override {
    return cuda::quantize_cuda(args);
  }

  std::optional<at::Tensor> dequantize(const DequantizeArgs& args) override {
    return cuda::dequantize_cuda(args);
  }

  bool update_scale(const ScaleUpdate& update) override { return cuda::update_scale_cuda(update); }

  void run_group(const std::vector<GemmProblem>& problems) override {
    if (problems.size() < 2) return GemmBackend::run_group(problems);
    const auto handle = current_handle();
    const auto current = c10::cuda::getCurrentCUDAStream();
    GroupStreams side(current, std::min(problems.size() - 1, GroupStreams::kMaxStreams));
    const size_t streams = side.count() + 1;
    for (size_t i = 0; i < problems.size(); ++i) {
      const size_t stream = i % streams;
      const c10::cuda::CUDAStreamGuard guard(stream == 0 ? current : side[stream - 1]);
      GemmArgs args = problems[i].args;
      args.workspace = workspace_part(args.workspace, static_cast<int64_t>(stream),
                                      static_cast<int64_t>(streams));
      run_problem(handle, {.op = problems[i].op,
                           .args = args,
                           .shape = problems[i].shape,
                           .lhs = problems[i].lhs,
                           .rhs = problems[i].rhs});
    }
    side.join();
  }
};

const GemmBackendRegistration cublaslt_gemm(c10::DeviceType::CUDA,
                                            std::make_shared<CublasLtGemm>());

}  // namespace
}  // namespace torch_overlap::cublaslt
