#include "torch_overlap/base/errors.h"
#include "torch_overlap/gemm/validate.h"

namespace torch_overlap {
namespace {

struct Range {
  int64_t begin;
  int64_t length;
};

at::Tensor part_of(const at::Tensor& tensor, int64_t dim, Range range) {
  return tensor.defined() ? tensor.narrow(dim, range.begin, range.length) : at::Tensor();
}

void check_range(std::string_view op, std::string_view what, int64_t size, Range range) {
  TORCH_OVERLAP_CHECK(range.begin >= 0 && range.length >= 0 && range.length <= size - range.begin,
                      kValue, op, ": expected ", what, " within [0, ", size, "), got [",
                      range.begin, ", ", range.begin + range.length, "); cut inside the result");
}

// `dim`: of out. What is not cut is shared with the whole.
GemmArgs sliced(std::string_view op, const GemmArgs& args, int64_t dim, Range range) {
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

GemmArgs gemm_rows(std::string_view op, const GemmArgs& args, int64_t begin, int64_t length) {
  const auto shape = checked_problem(op, args).shape;
  const Range range{begin, length};
  check_range(op, "rows", shape.m, range);
  if (length == shape.m) return args;
  TORCH_OVERLAP_CHECK(!args.epilogue.bias_grad.defined() || !args.epilogue.gelu_input.defined(),
                      kUnsupported, op,
                      ": expected no bias_grad with gelu_input in a product that is cut in rows, "
                      "got one, of which every piece has only a part; sum the rows of out");
  GemmArgs piece = sliced(op, args, 0, range);
  piece.lhs = cut(op, Side::kLhs, args.lhs, begin, length);
  piece.epilogue.bias_grad = part_of(args.epilogue.bias_grad, 0, range);
  return piece;
}

GemmArgs gemm_columns(std::string_view op, const GemmArgs& args, int64_t begin, int64_t length) {
  const auto shape = checked_problem(op, args).shape;
  const Range range{begin, length};
  check_range(op, "columns", shape.n, range);
  if (length == shape.n) return args;
  GemmArgs piece = sliced(op, args, 1, range);
  piece.rhs = cut(op, Side::kRhs, args.rhs, begin, length);
  piece.epilogue.bias = part_of(args.epilogue.bias, 0, range);
  if (args.epilogue.gelu_input.defined()) {
    piece.epilogue.bias_grad = part_of(args.epilogue.bias_grad, 0, range);
  } else if (begin != 0) {
    piece.epilogue.bias_grad = at::Tensor();  // the same for all columns: the first piece has it
  }
  return piece;
}

}  // namespace torch_overlap
