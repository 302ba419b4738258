#include "torch_overlap/overlap/cuda/fused_host.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <limits>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/strings.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/common/views.h"
#include "torch_overlap/gemm/sm90/maps.h"
#include "torch_overlap/gemm/sm90/tile_times.h"
#include "torch_overlap/gemm/sm90/types.h"
#include "torch_overlap/overlap/cuda/fused.h"

namespace torch_overlap::cuda {
namespace {

using sm90::KernelInfo;
using sm90::KernelKey;
using sm90::TimedTile;
using sm90::VectorType;

constexpr int kHopper = 9;
constexpr int kPieceRows = 64;  // of outputs that the reduce-scatter stores and loads at a time

// The smallest tile of a reduce-scatter.
constexpr int kLeastRows = 128;
constexpr int kLeastColumns = 128;

// What H200s take, for choosing: a stage of a tile of 128 x 256; copies to peers, until the first
// byte of the first chunk is there, and then.
constexpr double kStageNs = 600;
constexpr double kFirstByteNs = 6000;
constexpr double kCopyBytesPerNs = 386;

// So many rows of tiles are computed before the next columns.
constexpr int kRowGroup = 16;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// As a tensor copy reads it; copied where it lies otherwise.
at::Tensor mappable(const at::Tensor& matrix) {
  return sm90::is_mappable(matrix) ? matrix : matrix.clone(at::MemoryFormat::Contiguous);
}

// Where such a matrix may be written; copied to where it belongs afterwards.
at::Tensor mappable_out(const at::Tensor& matrix) {
  return sm90::is_storable(matrix) ? matrix : at::empty(matrix.sizes(), matrix.options());
}

at::Tensor contiguous(const at::Tensor& scales) {
  return scales.defined() ? scales.contiguous() : scales;
}

struct Operands {
  at::Tensor lhs;  // [m, k]
  at::Tensor rhs;  // [n, k] along k, else [k, n]
  bool rhs_along_k;
  at::ScalarType out;
  // Of 8 bits: one factor, or one for each row of lhs and column of the product.
  at::Tensor lhs_scale;
  at::Tensor rhs_scale;
  bool scaled_by_row;
};

Operands operands_of(const GemmArgs& args, const at::Tensor& lhs, at::ScalarType out) {
  return {.lhs = mappable(lhs),
          .rhs = mappable(args.rhs.data),
          .rhs_along_k = args.rhs.transposed,
          .out = out,
          .lhs_scale = contiguous(args.lhs.scale_inv),
          .rhs_scale = contiguous(args.rhs.scale_inv),
          .scaled_by_row = args.rhs.scaling == ScalingMode::ROW_SCALING};
}

at::Tensor plain_lhs(const GemmOperand& lhs) {
  return lhs.transposed ? lhs.data.t().contiguous() : lhs.data;
}

int sm_count(c10::Device device) {
  return at::cuda::getDeviceProperties(device.index())->multiProcessorCount;
}

using Find = const KernelInfo* (*)(const KernelKey&);

// Without a tile.
KernelKey key_of(const Operands& operands) {
  return {.lhs = sm90::operand_type(operands.lhs.scalar_type()),
          .rhs = sm90::operand_type(operands.rhs.scalar_type()),
          .out = sm90::vector_type(operands.out),
          .rhs_along_k = operands.rhs_along_k,
          .rows = 0,
          .columns = 0};
}

const KernelInfo* kernel_of(Find find, KernelKey key, const TimedTile& tile) {
  key.rows = tile.rows;
  key.columns = tile.columns;
  return find(key);
}

// The one with the least `time(tile, kernel)`.
template <typename Time>
const KernelInfo& choose_kernel(Find find, const KernelKey& key, const Time& time) {
  const auto* const best = sm90::quickest_tile([&](const TimedTile& tile) -> std::optional<double> {
    const KernelInfo* const kernel = kernel_of(find, key, tile);
    if (kernel == nullptr) return std::nullopt;
    return time(tile, *kernel);
  });
  TORCH_OVERLAP_CHECK(best != nullptr, kRuntime, "fused: expected a kernel, got none");
  return *kernel_of(find, key, *best);
}

// Of all blocks of a cluster together.
int64_t units_of(const KernelInfo& kernel, int64_t rows, int64_t n) {
  return ceil_div(rows, int64_t{kernel.rows} * kernel.cluster) * ceil_div(n, kernel.columns);
}

int64_t units_of(const KernelInfo& kernel, const RowShare& rows, int64_t n) {
  int64_t count = 0;
  for (int chunk = 0; chunk < rows.size; ++chunk) {
    count += units_of(kernel, rows.length(chunk), n);
  }
  return count;
}

// What both kinds of kernels have alike.
sm90::GemmParams gemm_params(const GemmArgs& args, const Operands& operands,
                             const KernelInfo& kernel) {
  sm90::GemmParams params{};
  params.lhs = sm90::matrix_map(operands.lhs, kernel.rows);
  params.rhs = operands.rhs_along_k
                   ? sm90::matrix_map(operands.rhs, kernel.columns / kernel.cluster)
                   : sm90::matrix_map(operands.rhs, kernel.depth, kernel.rhs_box_bytes);
  params.m = std::numeric_limits<int>::max();  // rows are looked after by the maps of the outputs
  params.k = static_cast<int>(operands.lhs.size(1));
  params.n = static_cast<int>(operands.rhs.size(operands.rhs_along_k ? 0 : 1));
  if (sm90::is_8_bit(operands.lhs.scalar_type())) {
    params.epilogue.lhs_scale = operands.lhs_scale.const_data_ptr<float>();
    params.epilogue.rhs_scale = operands.rhs_scale.const_data_ptr<float>();
    params.epilogue.scaled_by_row = operands.scaled_by_row;
  }
  const auto& bias = args.epilogue.bias;
  params.plain = !bias.defined();
  params.epilogue.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  params.epilogue.bias_type =
      bias.defined() ? sm90::vector_type(bias.scalar_type()) : VectorType::none;
  return params;
}

// The stores of a tile are spread over the larger part of the time that the next one takes, which
// is not known: kStageNs is what H200s take at the best. Measured as the best of 0, 0.5, 0.7 and
// 0.9 of that.
uint32_t pace_of(int64_t stages, const KernelInfo& kernel) {
  constexpr double kPart = 0.9;
  const double tile =
      static_cast<double>(stages) * kStageNs * kernel.rows * kernel.columns / (128 * 256);
  const double parts = static_cast<double>(kernel.rows) * kernel.columns / (kPacedRows * 64);
  return static_cast<uint32_t>(kPart * tile / parts);
}

// If there is such a kernel.
void load(const KernelKey& key, Find find) {
  const KernelInfo* const kernel = find(key);
  if (kernel == nullptr) return;
  check(cudaFuncSetAttribute(kernel->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kernel->shared_bytes),
        "overlap: loading fused kernels");
}

// Of nothing, if there are no rows.
CUtensorMap rows_map(const at::Tensor& rows, int box) {
  if (rows.size(0) == 0) return {};
  return sm90::matrix_map(rows, box);
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

void run_fused(CudaTransport& transport, const FusedScatter& problem) {
  const int rank = transport.words().rank;
  const RowShare& rows = problem.rows;
  const auto device = problem.out.device();
  const auto dtype = problem.out.scalar_type();
  const Operands operands = operands_of(problem.gemm, plain_lhs(problem.gemm.lhs), dtype);
  const int64_t n = operands.rhs.size(operands.rhs_along_k ? 0 : 1);
  const int sms = sm_count(device);
  const auto tiles_of_chunk = [&](const KernelInfo& kernel) {
    return ceil_div(rows.largest(), kernel.rows) * ceil_div(n, kernel.columns);
  };
  const auto units = [&](const KernelInfo& kernel) { return rows.size * tiles_of_chunk(kernel); };
  const KernelInfo& kernel = choose_kernel(
      find_fused_scatter, key_of(operands), [&](const TimedTile& tile, const KernelInfo& found) {
        return static_cast<double>(ceil_div(units(found), sms)) * tile.time();
      });
  FusedScatterParams params{};
  params.gemm = gemm_params(problem.gemm, operands, kernel);
  params.gemm.row_group = kRowGroup;
  const at::Tensor out = mappable_out(problem.out);
  const int64_t slot = rows.largest() * n * static_cast<int64_t>(out.element_size());
  for (int chunk = 0; chunk < rows.size; ++chunk) {
    const int64_t length = rows.length(chunk);
    params.begin[chunk] = static_cast<int>(rows.begin(chunk));
    params.rows[chunk] = static_cast<int>(length);
    params.tell[chunk] = transport.tile_word(chunk, rank);
    params.told[chunk] = transport.tile_word(rank, chunk);
    if (chunk == rank) {
      params.out = rows_map(out, kPieceRows);
      continue;
    }
    params.to[chunk] = transport.data(chunk, problem.at + rank * slot);
    if (rows.length(rank) == 0) continue;
    params.from[chunk] = sm90::matrix_map(transport.data(rank, problem.at + chunk * slot), dtype,
                                          rows.length(rank), n, n, kPieceRows);
  }
  params.most_row_tiles = static_cast<int>(ceil_div(rows.largest(), kernel.rows));
  params.adds_between = tiles_of_chunk(kernel) >= sms;
  params.pace_ns = pace_of(ceil_div(params.gemm.k, kernel.depth), kernel);
  params.factor = static_cast<float>(problem.factor);
  params.words = transport.words();
  params.control = transport.control();
  const auto blocks = static_cast<int>(std::min<int64_t>(units(kernel), sms));
  check(
      launch_fused_scatter(kernel, params, blocks, c10::cuda::getCurrentCUDAStream(device.index())),
      "fused product and reduce-scatter");
  if (!out.is_same(problem.out)) problem.out.copy_(out);
}

void load_fused_kernels() {
  if (at::cuda::getCurrentDeviceProperties()->major != kHopper) return;
  using enum sm90::OperandType;
  constexpr std::array kOperands{std::pair(bf16, bf16), std::pair(f16, f16), std::pair(e4m3, e4m3),
                                 std::pair(e4m3, e5m2), std::pair(e5m2, e4m3)};
  for (const Find find : {Find{find_fused_gather}, Find{find_fused_scatter}}) {
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
}

}  // namespace torch_overlap::cuda
