#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/gemm/operand.h"
#include "torch_overlap/gemm/quantize.h"

namespace torch_overlap {
namespace {

template <typename Int>
Int whole_tiles(const Int& size, int64_t tile) {
  return (size + (tile - 1)) / tile * tile;
}

void check_scales(std::string_view op, const at::Tensor& scales) {
  TORCH_OVERLAP_CHECK(
      scales.scalar_type() == at::kFloat8_e8m0fnu || scales.scalar_type() == at::kByte, kType, op,
      ": expected scales of dtype float8_e8m0fnu or uint8, got ", scales.scalar_type(),
      ". Only those of MXFP8 are swizzled.");
  TORCH_OVERLAP_CHECK(scales.dim() == 2, kValue, op, ": expected scales [rows, blocks], got shape ",
                      scales.sym_sizes());
}

}  // namespace

at::Tensor empty_swizzled(std::string_view op, const at::Tensor& scales) {
  check_scales(op, scales);
  return at::empty_symint({whole_tiles(scales.sym_size(0), kMxTileRows),
                           whole_tiles(scales.sym_size(1), kMxTileBlocks)},
                          scales.options());
}

at::Tensor swizzle_scales(std::string_view op, const at::Tensor& scales) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check_scales(op, scales);
  const int64_t rows = whole_tiles(scales.size(0), kMxTileRows);
  const int64_t blocks = whole_tiles(scales.size(1), kMxTileBlocks);
  return at::constant_pad_nd(scales.view(at::kByte),
                             {0, blocks - scales.size(1), 0, rows - scales.size(0)})
      .view({rows / kMxTileRows, 4, 32, blocks / kMxTileBlocks, kMxTileBlocks})
      .permute({0, 3, 2, 1, 4})
      .contiguous()
      .view({rows, blocks})
      .view(scales.scalar_type());
}

at::Tensor unswizzle_scales(std::string_view op, const at::Tensor& scales, int64_t rows,
                            int64_t blocks) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  check_scales(op, scales);
  const int64_t height = whole_tiles(rows, kMxTileRows);
  const int64_t width = whole_tiles(blocks, kMxTileBlocks);
  TORCH_OVERLAP_CHECK(
      rows >= 0 && blocks >= 0 && scales.size(0) == height && scales.size(1) == width, kValue, op,
      ": expected swizzled scales [", height, ", ", width, "] of ", rows, " rows and ", blocks,
      " blocks, got shape ", scales.sizes());
  return scales.view(at::kByte)
      .contiguous()
      .view({height / kMxTileRows, width / kMxTileBlocks, 32, 4, kMxTileBlocks})
      .permute({0, 3, 2, 1, 4})
      .reshape({height, width})
      .narrow(0, 0, rows)
      .narrow(1, 0, blocks)
      .contiguous()
      .view(scales.scalar_type());
}

}  // namespace torch_overlap
