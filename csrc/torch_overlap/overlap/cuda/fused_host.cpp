#include "torch_overlap/overlap/cuda/fused_host.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/strings.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/common/views.h"
#include "torch_overlap/gemm/sm90/maps.h"
#include "torch_overlap/gemm/sm90/types.h"
#include "torch_overlap/overlap/cuda/fused.h"
#include "torch_overlap/overlap/cuda/fused_operands.h"

namespace torch_overlap::cuda {
namespace {

using sm90::VectorType;

constexpr int kHopper = 9;

// The smallest tile of a reduce-scatter.
constexpr int kLeastRows = 128;
constexpr int kLeastColumns = 128;

// What H200s take, for choosing: copies to peers, until the first byte of the first chunk is there,
// and then.
constexpr double kFirstByteNs = 6000;
constexpr double kCopyBytesPerNs = 386;

// If there is such a kernel.
void load(const KernelKey& key, Find find) {
  const KernelInfo* const kernel = find(key);
  if (kernel == nullptr) return;
  check(cudaFuncSetAttribute(kernel->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kernel->shared_bytes),
        "overlap: loading fused kernels");
}

}  // namespace

std::string fused_obstacle(const FusedShape& shape) {
  const auto* properties = at::cuda::getDeviceProperties(shape.device.index());
  if (properties->major != kHopper) {
    return concat("fused kernels are for sm_90, this is sm_", properties->major, properties->minor);
  }
  if (shape.rows.size > kMostFusedRanks) {
    return concat("fused kernels are for at most ", kMostFusedRanks, " ranks, there are ",
                  shape.rows.size);
  }
  const FusedTypes& types = shape.types;
  if (!sm90::multiplies(types.lhs, types.rhs, types.out)) {
    return concat("fused kernels multiply bfloat16 or float16, and 8-bit floats into one of them, ",
                  "not ", types.lhs, " with ", types.rhs, " into ", types.out);
  }
  if (types.scaling != ScalingMode::NO_SCALING && !has_fast_sums(types.scaling)) {
    return concat("fused kernels take one factor for each 8-bit operand or row, not ",
                  to_string(types.scaling));
  }
  if (types.use_split_accumulator) {
    return "fused kernels do not promote the sums of 8-bit operands on the way; pass "
           "use_split_accumulator=False";
  }
  if (shape.k == 0 || shape.n == 0 || shape.rows.rows == 0) return "there is nothing to compute";
  // Rows of copies of the operands, and of what is stored, also to other ranks.
  const auto per_row = [](at::ScalarType type) {
    return sm90::kCopyAlignment / static_cast<int64_t>(c10::elementSize(type));
  };
  if (shape.k % per_row(types.lhs) != 0 || shape.n % per_row(types.out) != 0) {
    return concat("fused kernels take k that is a multiple of ", per_row(types.lhs), " and n of ",
                  per_row(types.out), ", not ", shape.k, " and ", shape.n);
  }
  const int64_t tiles =
      ceil_div(shape.rows.largest(), kLeastRows) * ceil_div(shape.n, kLeastColumns);
  if (tiles > kMostTiles) {
    return concat("a chunk would have ", tiles, " tiles; there are words for ", kMostTiles);
  }
  return {};
}

const KernelInfo& choose_gather_kernel(const KernelKey& key, const GatherShape& shape, int sms) {
  const bool is_8_bit = key.lhs == sm90::OperandType::e4m3 || key.lhs == sm90::OperandType::e5m2;
  const double chunk_ns =
      static_cast<double>(shape.rows.largest() * shape.k * (is_8_bit ? 1 : 2)) / kCopyBytesPerNs;
  // Every block goes through its tiles in order, so a chunk holds up all that is behind it.
  return choose_kernel(
      find_fused_gather, key, [&](const TimedTile& tile, const KernelInfo& kernel) {
        const double tile_ns =
            static_cast<double>(ceil_div(shape.k, kernel.depth)) * kStageNs * tile.time();
        const int64_t side_by_side = sms / kernel.cluster;
        int64_t left = 0;
        double time = 0;
        for (int step = shape.rows.size - 1; step >= 0; --step) {
          left += units_of(kernel, shape.rows.length(shape.order.at(step)), shape.n);
          const double arrival = step == 0 ? 0 : kFirstByteNs + step * chunk_ns;
          const auto waves = static_cast<double>(ceil_div(left, side_by_side));
          time = std::max(time, arrival + waves * tile_ns);
        }
        return time;
      });
}

void run_fused(CudaTransport& transport, const FusedGather& problem) {
  TORCH_OVERLAP_CHECK(transport.uses_copy_engine(), kUnsupported,
                      "fused all-gather and product: expected copy engines to move the rows, got a "
                      "buffer with use_ce=False; kernels would find no SM free");
  const int rank = transport.words().rank;
  const RowShare& rows = problem.rows;
  const auto device = problem.own.device();
  const auto dtype = problem.gemm.out.scalar_type();
  const Operands operands = operands_of(problem.gemm, problem.own, dtype);
  const int64_t n = operands.rhs.size(operands.rhs_along_k ? 0 : 1);
  const int sms = sm_count(device);
  const KernelInfo& kernel = choose_gather_kernel(
      key_of(operands), {.rows = rows, .order = problem.order, .n = n, .k = problem.own.size(1)},
      sms);
  const at::Tensor out = mappable_out(problem.gemm.out);
  FusedGatherParams params{};
  if (operands.lhs.size(0) > 0) {
    params.gemm = gemm_params(problem.gemm, operands, kernel);
  } else {  // no rows of its own: nothing reads this map
    params.gemm =
        gemm_params(problem.gemm, operands_of(problem.gemm, problem.gathered, dtype), kernel);
  }
  params.gemm.row_group = kRowGroup / kernel.cluster;
  params.gathered = sm90::matrix_map(problem.gathered, kernel.rows);
  for (int chunk = 0; chunk < rows.size; ++chunk) {
    const int64_t begin = rows.begin(chunk);
    const int64_t length = rows.length(chunk);
    params.out[chunk] = rows_map(row_view(out, begin, length), sm90::kWarpRows);
    params.begin[chunk] = static_cast<int>(begin);
    params.rows[chunk] = static_cast<int>(length);
    if (operands.scaled_by_row) {
      params.lhs_scale[chunk] = chunk == rank
                                    ? problem.own_scales.const_data_ptr<float>()
                                    : problem.gathered_scales.const_data_ptr<float>() + begin;
    }
    params.flag[chunk] = transport.flag(rank, chunk);
    params.order[chunk] = problem.order.at(chunk);
  }
  params.words = transport.words();
  params.control = transport.control();
  const int64_t most = int64_t{sms} / kernel.cluster;
  const auto blocks = static_cast<int>(std::min(units_of(kernel, rows, n), most) * kernel.cluster);
  check(
      launch_fused_gather(kernel, params, blocks, c10::cuda::getCurrentCUDAStream(device.index())),
      "fused all-gather and product");
  if (!out.is_same(problem.gemm.out)) problem.gemm.out.copy_(out);
}

void load_fused_kernels() {
  if (at::cuda::getCurrentDeviceProperties()->major != kHopper) return;
  using enum sm90::OperandType;
  constexpr std::array kOperands{std::pair(bf16, bf16), std::pair(f16, f16), std::pair(e4m3, e4m3),
                                 std::pair(e4m3, e5m2), std::pair(e5m2, e4m3)};
  for (const Find find :
       {Find{find_fused_gather}, Find{find_fused_scatter}, Find{find_fused_sum}}) {
    for (const auto& [lhs, rhs] : kOperands) {
      for (const auto out : {VectorType::bf16, VectorType::f16}) {
        for (const bool along_k : {true, false}) {
          for (const TimedTile& tile : sm90::kTiles) {
            load({.lhs = lhs,
                  .rhs = rhs,
                  .out = out,
                  .rhs_along_k = along_k,
                  .rows = tile.rows,
                  .columns = tile.columns},
                 find);
          }
        }
      }
    }
  }
  load_fused_reduce_kernels();
}

}  // namespace torch_overlap::cuda
