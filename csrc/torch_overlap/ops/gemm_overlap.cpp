#include <ATen/ops/empty.h>

#include <exception>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/ops/checks.h"
#include "torch_overlap/ops/gemm_op.h"
#include "torch_overlap/overlap/registry.h"

// The operator gemm over a registered overlap buffer.
namespace torch_overlap::ops {
namespace {

constexpr std::string_view kGemm = "gemm";
constexpr size_t kAuxOut = 3;  // its number among the results

using Buffer = std::shared_ptr<CommOverlapCore>;

// Returns `sizes` with the first dimension multiplied by the number of ranks.
std::vector<c10::SymInt> gathered_sizes(c10::SymIntArrayRef sizes, const Buffer& buffer) {
  auto all = sizes.vec();
  all[0] = all[0] * buffer->get_tp_size();
  return all;
}

// Returns `sizes` of `rows` rows with this rank's part of the first dimension: equal parts, rounded
// up, as the buffer splits rows (RowPartition).
std::vector<c10::SymInt> local_sizes(c10::SymIntArrayRef sizes, const c10::SymInt& rows,
                                     const Buffer& buffer, std::string_view wrong) {
  auto own = sizes.vec();
  const int64_t tp = buffer->get_tp_size();
  const c10::SymInt first = own[0];
  if ((first % tp).sym_eq(0).guard_bool(__FILE__, __LINE__)) {
    own[0] = first / tp;
    return own;
  }
  const c10::SymInt most = (first + (tp - 1)) / tp;
  const c10::SymInt inner = rows / first;
  TORCH_OVERLAP_CHECK(((rows + (tp - 1)) / tp).sym_eq(most * inner).expect_true(__FILE__, __LINE__),
                      kValue, kGemm, ": ", wrong, ", got ", first, " of ", inner,
                      " rows, which a part rounded up cuts. Pad it.");
  own[0] = (first - most * buffer->rank()).max(0).min(most);
  return own;
}

// Sets the active tokens for a call, and restores the previous number if it throws.
class ActiveTokensGuard {
 public:
  ActiveTokensGuard(CommOverlapCore& buffer, int64_t tokens)
      : buffer_(buffer), before_(buffer.active_tokens()), throwing_(std::uncaught_exceptions()) {
    buffer_.set_active_tokens(tokens);
  }
  ~ActiveTokensGuard() {
    if (std::uncaught_exceptions() > throwing_) buffer_.set_active_tokens(before_);
  }
  ActiveTokensGuard(const ActiveTokensGuard&) = delete;
  ActiveTokensGuard& operator=(const ActiveTokensGuard&) = delete;

 private:
  CommOverlapCore& buffer_;
  const int64_t before_;
  const int throwing_;
};

void check_tokens(std::string_view what, int64_t tokens, const Buffer& buffer) {
  const int64_t most = buffer->config().buffer_shape[0];
  TORCH_OVERLAP_CHECK(tokens <= most, kValue, kGemm, ": expected at most the ", most,
                      " tokens of the buffer for ", what, ", got ", tokens,
                      ". Call with fewer rows, or make a larger buffer.");
}

at::Tensor as_matrix(const at::Tensor& tensor, int64_t columns) {
  return tensor.reshape({-1, columns});
}

// Runs a product concurrently with the collective of aux_in.
GemmResults run_bulk(const GemmOp& call, const Buffer& buffer, CommOverlapType type) {
  const auto made_for = buffer->config().comm_type;
  TORCH_OVERLAP_CHECK(made_for == type || made_for == CommOverlapType::NONE, kValue, kGemm,
                      ": invalid collective type: expected comm_type to be that of buffer ",
                      call.comm_overlap_id, ", ", to_string(made_for), ", got ", to_string(type),
                      ". A buffer of type NONE takes both.");
  TORCH_OVERLAP_CHECK(call.aux_in, kValue, kGemm,
                      ": expected aux_in, which the collective of method BULK takes, got none. "
                      "Pass this rank's rows to gather, or all rows to reduce.");
  const at::Tensor& aux = *call.aux_in;
  const int64_t tp = buffer->get_tp_size();
  const bool gathers = type == CommOverlapType::AG;
  const auto matrix = collapse(kGemm, "aux", aux, call.aux_axis_boundary);
  TORCH_OVERLAP_CHECK(matrix.boundary > 0, kValue, kGemm,
                      ": expected aux_axis_boundary to leave a dimension of rows, got ",
                      call.aux_axis_boundary, " for shape ", aux.sym_sizes(),
                      ". Use -1, or a number > 0.");
  const auto sizes =
      gathers
          ? gathered_sizes(aux.sym_sizes(), buffer)
          : local_sizes(aux.sym_sizes(), matrix.rows, buffer,
                        concat("bulk RS overlap auxiliary output is sized incorrectly: expected "
                               "a first dimension of aux_in that ",
                               tp, " ranks can share"));
  auto results = empty_gemm_results(call);
  auto& aux_out = std::get<kAuxOut>(results);
  const bool widens = !gathers && aux.element_size() == 1;  // sum of 8-bit values
  aux_out =
      gemm_result(call, kAuxOut, sizes,
                  widens ? aux.options().dtype(std::get<0>(results).scalar_type()) : aux.options());
  if (aux.is_meta()) return results;
  const int64_t rows = matrix.rows.expect_int();
  const int64_t columns = matrix.cols.expect_int();
  const CommOverlapConfig& config = buffer->config();
  const int64_t most = gathers ? config.buffer_shape[0] / tp : config.buffer_shape[0];
  const auto bytes = static_cast<int64_t>(c10::elementSize(config.buffer_dtype));
  TORCH_OVERLAP_CHECK(
      rows <= most && columns == config.buffer_shape[1] && aux.element_size() == bytes, kValue,
      kGemm, ": bulk ", to_string(type),
      " overlap auxiliary output is sized incorrectly: expected aux_in of at most ", most,
      " rows of ", config.buffer_shape[1], " features of ", bytes,
      " bytes, as the buffer has, got ", rows, " of ", columns, " of ", aux.element_size(),
      ". Make a buffer of that shape and dtype.");
  auto args = gemm_args(call, results);
  check_gemm(kGemm, args);
  const auto use = buffer->use();
  const ActiveTokensGuard active(*buffer, gathers ? rows * tp : rows);
  const auto target = as_matrix(aux_out, columns);
  buffer->check_bulk(type, gathers ? at::Tensor() : target);  // before the buffer is written
  buffer->copy_into_buffer(aux.reshape({rows, columns}), /*local_chunk=*/gathers);
  swizzle_operands(call, args);
  buffer->bulk_overlap(args, type, gathers ? at::Tensor() : target);
  if (gathers) target.copy_(buffer->get_buffer().view(target.scalar_type()));
  return results;
}

// Computes a product of the gathered lhs; aux_out becomes the gathered lhs.
GemmResults run_gather(const GemmOp& call, const Buffer& buffer) {
  TORCH_OVERLAP_CHECK(!call.lhs_transposed, kUnsupported, kGemm,
                      ": expected lhs as it is with comm_type AG, got lhs_transposed. Each element "
                      "of such a product sums over the rows of all ranks, so no rank's rows are a "
                      "product by themselves; gather lhs as aux_in of a BULK buffer, then multiply "
                      "aux_out.");
  TORCH_OVERLAP_CHECK(!call.aux_in, kValue, kGemm,
                      ": expected no aux_in for AG with method RING_EXCHANGE, got one. lhs is what "
                      "is gathered; aux_in is for BULK.");
  const auto matrix = collapse(kGemm, "lhs", call.lhs, call.lhs_axis_boundary);
  const auto sizes = gathered_sizes(call.lhs.sym_sizes(), buffer);
  GemmOp whole = call;
  if (call.lhs.is_meta()) {
    whole.lhs = at::empty_symint(sizes, call.lhs.options());
    auto results = empty_gemm_results(whole);
    std::get<kAuxOut>(results) = at::empty_symint(sizes, call.lhs.options());
    return results;
  }
  const int64_t rows = matrix.rows.expect_int();
  const int64_t columns = matrix.cols.expect_int();
  check_tokens("all ranks' rows of lhs", rows * buffer->get_tp_size(), buffer);
  const auto use = buffer->use();
  const ActiveTokensGuard active(*buffer, rows * buffer->get_tp_size());
  const auto gathered = buffer->get_buffer();
  TORCH_OVERLAP_CHECK(
      gathered.size(1) == columns && gathered.element_size() == call.lhs.element_size(), kValue,
      kGemm, ": expected lhs of ", gathered.size(1), " features of ", gathered.element_size(),
      " bytes, as the buffer has, got ", columns, " of ", call.lhs.element_size(),
      ". Make a buffer of that shape and dtype.");
  whole.lhs = gathered.view(call.lhs.scalar_type()).view_symint(sizes);
  auto results = empty_gemm_results(whole);
  auto& aux_out = std::get<kAuxOut>(results);
  aux_out = gemm_result(call, kAuxOut, sizes, call.lhs.options());
  auto args = gemm_args(whole, results);
  swizzle_operands(call, args);
  args.lhs.data = call.lhs.reshape({rows, columns}).contiguous();
  const auto copy = as_matrix(aux_out, columns);
  buffer->is_atomic_gemm() ? buffer->atomic_gemm_overlap_ag(args, copy)
                           : buffer->split_overlap_ag(args, copy);
  return results;
}

// Returns this rank's rows of the sum of all ranks' products.
GemmResults run_reduce_scatter(const GemmOp& call, const Buffer& buffer) {
  TORCH_OVERLAP_CHECK(!call.aux_in, kValue, kGemm,
                      ": expected no aux_in for RS with a method other than BULK, got one. The "
                      "product is what is reduced; aux_in is for BULK.");
  TORCH_OVERLAP_CHECK(
      !call.fuse_gelu, kUnsupported, kGemm,
      ": expected no fuse_gelu with comm_type RS, got it. GELU is not linear, so it "
      "is not that of the ranks' terms of a sum; apply it, or its derivative, to "
      "the output.");
  TORCH_OVERLAP_CHECK(!(call.fuse_bias && call.grad), kUnsupported, kGemm,
                      ": expected no bias gradient with comm_type RS, got it. Each rank has only "
                      "its part of that sum over k, which no rank's rows of the output complete; "
                      "sum lhs over k and all-reduce that.");
  const auto shape = gemm_result_shape(call);
  const auto sizes =
      local_sizes(shape.sizes, shape.m, buffer,
                  concat("GEMM->RS overlap output buffer is sized incorrectly: expected a first "
                         "dimension that ",
                         buffer->get_tp_size(), " ranks can share"));
  const auto options = call.lhs.options().dtype(shape.dtype);
  const auto none = [&] { return at::empty({0}, options.dtype(shape.saved_dtype)); };
  GemmResults results{gemm_result(call, 0, sizes, options), none(), none(), none()};
  if (call.lhs.is_meta()) return results;
  TORCH_OVERLAP_CHECK(shape.n == buffer->config().buffer_shape[1], kValue, kGemm,
                      ": expected an output of ", buffer->config().buffer_shape[1],
                      " features, as the buffer has, got ", shape.n,
                      ". Make a buffer of that shape.");
  check_tokens("the rows of the product", shape.m.expect_int(), buffer);
  const auto use = buffer->use();
  const ActiveTokensGuard active(*buffer, shape.m.expect_int());
  const auto output = as_matrix(std::get<0>(results), shape.n.expect_int());
  GemmResults partial = results;
  std::get<0>(partial) = buffer->get_buffer();
  auto args = gemm_args(call, partial);
  if (call.lhs_swizzle || call.rhs_swizzle) check_gemm(kGemm, args);
  swizzle_operands(call, args);
  buffer->is_atomic_gemm() ? buffer->atomic_gemm_overlap_rs(args, output)
                           : buffer->split_overlap_rs(args, output);
  return results;
}

}  // namespace

GemmResults run_overlapped(const GemmOp& call) {
  TORCH_OVERLAP_CHECK(call.comm_type == 1 || call.comm_type == 2, kValue, kGemm,
                      ": expected comm_type to be NONE (0), RS (1) or AG (2), got ", call.comm_type,
                      ", an invalid collective type. Use a CommOverlapType.");
  const auto type = static_cast<CommOverlapType>(call.comm_type);
  const auto buffer = find_comm_overlap_buffer(kGemm, call.comm_overlap_id);
  const auto method = buffer->config().method;
  TORCH_OVERLAP_CHECK(call.comm_overlap_method == static_cast<int64_t>(method), kValue, kGemm,
                      ": expected comm_overlap_method to be that of buffer ", call.comm_overlap_id,
                      ", ", to_string(method), " (", static_cast<int64_t>(method), "), got ",
                      call.comm_overlap_method, ". Pass that method.");
  if (method == CommOverlapMethod::BULK) return run_bulk(call, buffer, type);
  TORCH_OVERLAP_CHECK(buffer->config().comm_type == type, kUnsupported, kGemm,
                      ": Operation not supported. Expected comm_type to be that of buffer ",
                      call.comm_overlap_id, ", ", to_string(buffer->config().comm_type), ", got ",
                      to_string(type), ". Make a buffer of the other type.");
  return type == CommOverlapType::AG ? run_gather(call, buffer) : run_reduce_scatter(call, buffer);
}

}  // namespace torch_overlap::ops
