#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/index_range.h"
#include "torch_overlap/common/views.h"
#include "torch_overlap/gemm/checked_gemm.h"

namespace torch_overlap {
namespace {

at::Tensor part_of(const at::Tensor& tensor, int64_t dim, IndexRange range) {
  if (!tensor.defined()) return {};
  return dim == 0 ? row_view(tensor, range.begin, range.length)
                  : tensor.narrow(dim, range.begin, range.length);
}

void check_range(std::string_view op, std::string_view what, int64_t size, IndexRange range) {
  TORCH_OVERLAP_CHECK(range.begin >= 0 && range.length >= 0 && range.length <= size - range.begin,
                      kValue, op, ": expected ", what, " within [0, ", size, "), got [",
                      range.begin, ", ", range.begin + range.length, "); cut inside the result");
}

// Slices dimension `dim` of out. Tensors that are not cut are shared with the whole.
GemmArgs sliced(std::string_view op, const GemmArgs& args, int64_t dim, IndexRange range) {
  TORCH_OVERLAP_CHECK(!args.out_amax.defined(), kUnsupported, op,
                      ": expected no out_amax in a product that is cut, got one, which every piece "
                      "would overwrite; give each piece its own after the cut");
  GemmArgs piece = args;
  piece.out = part_of(args.out, dim, range);
  piece.epilogue.pre_gelu_out = part_of(args.epilogue.pre_gelu_out, dim, range);
  piece.epilogue.gelu_input = part_of(args.epilogue.gelu_input, dim, range);
  piece.epilogue.residual = part_of(args.epilogue.residual, dim, range);
  return piece;
}

}  // namespace

at::Tensor workspace_part(const at::Tensor& workspace, int64_t part, int64_t parts) {
  if (!workspace.defined() || parts <= 1) return workspace;
  const int64_t length = workspace.numel() / parts;
  return workspace.flatten().narrow(0, part * length, length);
}

GemmArgs CheckedGemm::rows(int64_t begin, int64_t length) const {
  const IndexRange range{begin, length};
  check_range(op_, "rows", shape_.m, range);
  if (length == shape_.m) return args_;
  TORCH_OVERLAP_CHECK(!args_.epilogue.bias_grad.defined() || !args_.epilogue.gelu_input.defined(),
                      kUnsupported, op_,
                      ": expected no bias_grad with gelu_input in a product that is cut in rows, "
                      "got one, of which every piece has only a part; sum the rows of out");
  GemmArgs piece = sliced(op_, args_, 0, range);
  piece.lhs = cut(op_, Side::kLhs, lhs_, begin, length);
  piece.epilogue.bias_grad = part_of(args_.epilogue.bias_grad, 0, range);
  return piece;
}

GemmArgs CheckedGemm::columns(int64_t begin, int64_t length) const {
  const IndexRange range{begin, length};
  check_range(op_, "columns", shape_.n, range);
  if (length == shape_.n) return args_;
  GemmArgs piece = sliced(op_, args_, 1, range);
  piece.rhs = cut(op_, Side::kRhs, rhs_, begin, length);
  piece.epilogue.bias = part_of(args_.epilogue.bias, 0, range);
  if (args_.epilogue.gelu_input.defined()) {
    piece.epilogue.bias_grad = part_of(args_.epilogue.bias_grad, 0, range);
  } else if (begin != 0) {
    piece.epilogue.bias_grad = at::Tensor();  // equal for all columns: the first piece has it
  }
  return piece;
}

GemmArgs gemm_rows(std::string_view op, const GemmArgs& args, int64_t begin, int64_t length) {
  return CheckedGemm(op, args).rows(begin, length);
}

GemmArgs gemm_columns(std::string_view op, const GemmArgs& args, int64_t begin, int64_t length) {
  return CheckedGemm(op, args).columns(begin, length);
}

}  // namespace torch_overlap
