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
#include "torch_overlap/gemm/cublaslt/epilogue.h"
#include "torch_overlap/gemm/cublaslt/group_streams.h"
#include "torch_overlap/gemm/cublaslt/handle.h"
#include "torch_overlap/gemm/cublaslt/own.h"
#include "torch_overlap/gemm/cublaslt/scales.h"
#include "torch_overlap/gemm/cublaslt/workspace.h"
#include "torch_overlap/gemm/cuda/quantize_host.h"
#include "torch_overlap/gemm/epilogue.h"
#include "torch_overlap/gemm/options.h"

namespace torch_overlap::cublaslt {
namespace {

at::Tensor oriented(const OperandView& operand) {
  return operand.transposed ? operand.data.t() : operand.data;
}

void run_dequantized(cublasLtHandle_t handle, const GemmProblem& problem);

// One product on the current stream.
class Runner {
 public:
  Runner(cublasLtHandle_t handle, const GemmProblem& problem)
      : problem_(problem),
        handle_(handle),
        stream_(c10::cuda::getCurrentCUDAStream()),
        workspace_(workspace_for(problem.args, stream_)) {}

  void run() {
    if (sums_over_k(problem_)) {
      if (may_fuse_sum_over_k(problem_) && fused(CUBLASLT_EPILOGUE_BGRADB)) return;
      count(gemm_counters().composed);
      compose_bias_grad(problem_);
    }
    const auto epilogue = fused_epilogue(problem_);
    if (epilogue && fused(*epilogue)) return;
    composed();
  }

 private:
  bool fused(cublasLtEpilogue_t epilogue) {
    // The library sets the largest value or raises what is there.
    if (problem_.args.out_amax.defined()) problem_.args.out_amax.zero_();
    return matmul(epilogue, problem_.args.out);
  }

  // The product in fp32, then the epilogue: one rounding, as where they are fused.
  void composed() {
    if (!sums_over_k(problem_)) count(gemm_counters().composed);
    const auto [m, n, _] = problem_.shape;
    at::Tensor product = at::empty({m, n}, problem_.args.out.options().dtype(at::kFloat));
    if (!matmul(CUBLASLT_EPILOGUE_DEFAULT, product)) {
      if (problem_.lhs.scaled()) return run_dequantized(handle_, problem_);
      product =
          at::mm(oriented(problem_.lhs).to(at::kFloat), oriented(problem_.rhs).to(at::kFloat));
    }
    compose_epilogue(problem_, std::move(product));
  }

  bool matmul(cublasLtEpilogue_t epilogue, const at::Tensor& out) {
    const LtCall call = make_call(problem_, epilogue, out, workspace_);
    return PlanCache::instance().plan_of(handle_, call)->run(handle_, call, workspace_, stream_);
  }

  const GemmProblem& problem_;
  const cublasLtHandle_t handle_;
  const c10::cuda::CUDAStream stream_;
  const Workspace workspace_;
};

void run_double(const GemmProblem& problem) {
  compose_bias_grad(problem);
  compose_epilogue(problem, at::mm(oriented(problem.lhs), oriented(problem.rhs)));
}

// Operands that the tensor cores of this device do not read, or sizes that they do not take.
// Dequantized values of MXFP8 are those of bf16, but for the smallest; with fp32 factors they are
// rounded, by far less than the quantization did.
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
  Runner(handle, unscaled).run();
}

void run_problem(cublasLtHandle_t handle, const GemmProblem& problem) {
  if (problem.lhs.data.scalar_type() == at::kDouble) return run_double(problem);
  const auto* device = at::cuda::getCurrentDeviceProperties();
  const auto mode = problem.lhs.scaling;
  if (reads_scaling(mode, device->major, device->minor)) return Runner(handle, problem).run();
  run_dequantized(handle, problem);
}

std::optional<sm90::Product> own_product_of(const GemmProblem& problem) {
  const auto epilogue = fused_epilogue(problem);
  if (!epilogue || problem.lhs.data.scalar_type() == at::kDouble) return std::nullopt;
  const LtCall call = make_call(problem, *epilogue, problem.args.out, {});
  return own_product(call, call.d);
}

class CublasLtGemm final : public GemmBackend {
 public:
  void check(const GemmProblem& problem) const override {
    const auto mode = problem.lhs.scaling;
    if (mode != ScalingMode::MXFP8_1D_SCALING || gemm_mxfp8() != Mxfp8Path::kNative) return;
    const auto* device = at::cuda::getDeviceProperties(problem.lhs.data.device().index());
    TORCH_OVERLAP_CHECK(
        reads_scaling(mode, device->major, device->minor), kUnsupported, problem.op,
        ": expected a GPU whose tensor cores read MXFP8 (sm_100 or sm_110), got sm_", device->major,
        device->minor, "; call set_gemm_mxfp8(\"dequantize\") to multiply in bfloat16");
  }

  void run(const GemmProblem& problem) override { run_problem(current_handle(), problem); }

  std::vector<std::string> own_kernels(const GemmProblem& problem) override {
    std::vector<std::string> names;
    const auto product = own_product_of(problem);
    if (!product) return names;
    for (const sm90::Choice& choice : sm90::choices(*product)) {
      names.push_back(concat(choice.rows, "x", choice.columns));
    }
    return names;
  }

  void run_own(const GemmProblem& problem, size_t index) override {
    const auto product = own_product_of(problem);
    sm90::run(*product, sm90::choices(*product).at(index));
  }

  std::optional<std::pair<Quantized, at::Tensor>> quantize(const QuantizeCall& call) override {
    return cuda::quantize_by_kernels(call);
  }

  std::optional<at::Tensor> dequantize(const DequantizeCall& call) override {
    return cuda::dequantize_by_kernels(call);
  }

  bool update_scale(const ScaleUpdate& update) override {
    return cuda::update_scale_by_kernels(update);
  }

  void run_group(const std::vector<GemmProblem>& problems) override {
    if (problems.size() < 2) return GemmBackend::run_group(problems);
    const auto handle = current_handle();
    const auto current = c10::cuda::getCurrentCUDAStream();
    GroupStreams side(current, std::min(problems.size() - 1, GroupStreams::kMost));
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
