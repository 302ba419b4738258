#include "torch_overlap/base/errors.h"
#include "torch_overlap/overlap/comm_overlap.h"
#include "torch_overlap/overlap/comm_overlap_layout.h"
#include "torch_overlap/overlap/execute.h"

namespace torch_overlap {
namespace {

constexpr int64_t kScaledRows = 128;  // tiled scales can be cut only at multiples of this

}  // namespace

// --- Collectives concurrent with GEMMs ----------------------------------------------------------

CommOverlapBase::CommOverlapBase(std::shared_ptr<OverlapGroup> group,
                                 const CommOverlapConfig& config)
    : CommOverlapCore(std::move(group), config, /*is_p2p=*/false) {}

bool CommOverlapBase::has_split(CommOverlapType type) const {
  return type == CommOverlapType::RS && config().method == CommOverlapMethod::PIPELINE;
}

void CommOverlapBase::do_bulk(const GemmArgs& args, CommOverlapType type, const Tensor& rs_output) {
  constexpr std::string_view kOp = "bulk_overlap";
  const bool gathers = type == CommOverlapType::AG;
  run_bulk_gemm(kOp, channel(),
                {.gemms = {with_margin(args)},
                 .rows = rows(),
                 .columns = config().buffer_shape[1],
                 .dtype = config().buffer_dtype,
                 .gathers = gathers,
                 .out = gathers               ? Tensor()
                        : rs_output.defined() ? rs_output
                                              : get_buffer(true),
                 .scale_inv = gathers ? Tensor() : scale_of_sum(kOp),
                 .blocks = config().num_comm_sm,
                 .cluster = config().comm_cga_size});
  set_path(kOp, describe(kOp, 1));
}

void CommOverlapBase::do_external_ag(CommOverlapCore& lender) {
  constexpr std::string_view kOp = "bulk_overlap_external_ag";
  run_bulk_gemm(kOp, channel(),
                {.rows = rows(),
                 .columns = config().buffer_shape[1],
                 .dtype = config().buffer_dtype,
                 .gathers = true,
                 .blocks = config().num_comm_sm,
                 .cluster = config().comm_cga_size,
                 .lender = &channel_of(lender)});
  set_path(kOp, describe(kOp, 0));
}

void CommOverlapBase::do_rs(std::string_view op, const GemmArgs& args, const Tensor& rs_output) {
  const GemmArgs product = partial_product(op, args, rs_output);
  const int products = run_split_gemm(op, channel(),
                                      {.gemm = product,
                                       .rows = rows(),
                                       .columns = config().buffer_shape[1],
                                       .dtype = config().buffer_dtype,
                                       .splits = config().num_splits,
                                       .overlap_first_gemm = config().rs_overlap_first_gemm,
                                       .out = rs_output,
                                       .scale_inv = scale_of_sum(op),
                                       .bias = args.epilogue.bias,
                                       .blocks = config().num_comm_sm,
                                       .cluster = config().comm_cga_size});
  set_path(op, describe(op, products));
}

// --- Point-to-point exchange of chunks ----------------------------------------------------------

CommOverlapP2PBase::CommOverlapP2PBase(std::shared_ptr<OverlapGroup> group,
                                       const CommOverlapConfig& config)
    : CommOverlapCore(std::move(group), config, /*is_p2p=*/true) {}

GatheredRows CommOverlapP2PBase::gathered_scales(std::string_view op, const GemmOperand& lhs,
                                                 const Tensor& own) const {
  const bool is_mx = lhs.scaling == ScalingMode::MXFP8_1D_SCALING;
  if (!is_mx && lhs.scaling != ScalingMode::BLOCK_1D_SCALING &&
      lhs.scaling != ScalingMode::ROW_SCALING) {
    return {};
  }
  const std::vector<int64_t> sizes{own.size(0), scales_per_row(lhs.scaling, own.size(1))};
  TORCH_OVERLAP_CHECK(own.element_size() == 1, kType, op, ": expected a buffer of 8-bit elements ",
                      "with ", to_string(lhs.scaling), ", got ", config().buffer_dtype,
                      ". Make a buffer of the dtype of lhs.");
  TORCH_OVERLAP_CHECK(
      lhs.scale_inv.defined() && lhs.scale_inv.sizes() == at::IntArrayRef(sizes) &&
          lhs.scale_inv.element_size() == (is_mx ? 1 : 4) && lhs.scale_inv.device() == own.device(),
      kValue, op, ": expected scale_inv of lhs of shape ", list_string(sizes), " on ", own.device(),
      " for ", to_string(lhs.scaling), ", got ",
      lhs.scale_inv.defined() ? concat(lhs.scale_inv.scalar_type(), " ", lhs.scale_inv.sizes(),
                                       " on ", lhs.scale_inv.device())
                              : "none (Missing inverse scaling factor)",
      "; pass what the quantization of this rank's rows gave");
  // MX scales are moved as bytes, because not every transport knows their type. Rows must be
  // contiguous.
  auto scales = is_mx ? lhs.scale_inv.view(at::kByte) : lhs.scale_inv;
  scales = scales.contiguous();
  return {.own = scales,
          .all = channel().data(scratch_offset(config()), {rows().rows, scales.size(1)},
                                scales.scalar_type())};
}

void CommOverlapP2PBase::check_rows_of_blocks(std::string_view op, const GemmOperand& lhs,
                                              int chunks) const {
  const int64_t length = rows().largest();
  TORCH_OVERLAP_CHECK(lhs.scaling != ScalingMode::BLOCK_1D_SCALING || config().tp_size == chunks ||
                          length * chunks % kBlockScaledMultiple == 0,
                      kValue, op, ": expected a multiple of ", kBlockScaledMultiple,
                      " tokens for each rank with ", to_string(lhs.scaling), ", got ", length,
                      " of ", rows().rows, ", which ", config().tp_size,
                      " ranks share. Pad the tokens with zeros.");
}

void CommOverlapP2PBase::do_ag(std::string_view op, const GemmArgs& args, const Tensor& gathered) {
  const auto buffer = get_buffer();
  const auto chunk = get_buffer(/*local_chunk=*/true);
  GemmArgs whole = args;
  TORCH_OVERLAP_CHECK(
      !args.lhs.transposed, kUnsupported, op,
      ": expected lhs as it is, [tokens, features], got it transposed. Each element "
      "of such a product sums over the tokens of all ranks, so no chunk of them is "
      "a product; use BULK, then a product of the gathered tokens.");
  TORCH_OVERLAP_CHECK(args.lhs.scaling != ScalingMode::BLOCK_2D_SCALING && !args.lhs.swizzled,
                      kUnsupported, op,
                      ": expected lhs whose scales have a row for each of its, got ",
                      args.lhs.swizzled ? "swizzled ones; use unswizzle_scales"
                                        : "blocks of 128 x 128; quantize it with BLOCK_1D_SCALING");
  Tensor own = chunk;
  if (args.lhs.data.defined()) {
    own = args.lhs.data;
    TORCH_OVERLAP_CHECK(own.sizes() == chunk.sizes() && own.is_contiguous() &&
                            own.element_size() == chunk.element_size(),
                        kValue, op, ": expected lhs to be this rank's rows, contiguous, ",
                        chunk.sizes(), " of ", config().buffer_dtype, ", got ", own.sizes(), " of ",
                        own.scalar_type(),
                        ". Pass get_buffer(local_chunk=True)'s shape and dtype.");
    TORCH_OVERLAP_CHECK(own.device() == chunk.device(), kType, op, ": expected lhs on ",
                        chunk.device(), ", got ", own.device(), ". Move it.");
    whole.lhs.data = buffer.view(own.scalar_type());
  } else {
    whole.lhs.data = buffer;
  }
  if (is_fp8_ubuf() && !whole.lhs.scale_inv.defined()) whole.lhs.scale_inv = ubuf_scale_inv();
  if (gathered.defined()) {
    TORCH_OVERLAP_CHECK(
        gathered.sizes() == buffer.sizes() && gathered.element_size() == buffer.element_size(),
        kValue, op, ": AG->GEMM overlap auxiliary buffer is sized incorrectly: expected ",
        buffer.sizes(), " of ", config().buffer_dtype, ", got ", gathered.sizes(), " of ",
        gathered.scalar_type(), ". Pass a tensor like the whole buffer.");
    TORCH_OVERLAP_CHECK(gathered.device() == buffer.device(), kType, op,
                        ": expected the auxiliary buffer on ", buffer.device(), ", got ",
                        gathered.device(), ". Move it.");
  }
  const GatheredRows scales = gathered_scales(op, args.lhs, own);
  if (scales.all.defined()) whole.lhs.scale_inv = scales.all;
  check_gemm(op, whole);
  check_rows_of_blocks(op, args.lhs, config().aggregate_ag ? 2 : 1);
  whole = with_margin(whole);
  run_gather_gemm(
      op, channel(),
      {.gemms = {whole},
       .rows = rows(),
       .data = {.own = own,
                .all = whole.lhs.data,
                .copy = gathered.defined() ? gathered.view(own.scalar_type()) : gathered},
       .scales = scales,
       .order = config().aggregate_ag ? GatherOrder::chunk_pairs
                : config().relay_ag   ? GatherOrder::ring
                                      : GatherOrder::all_pairs});
  set_path(op, describe(op, config().tp_size / (config().aggregate_ag ? 2 : 1)));
}

void CommOverlapP2PBase::do_rs(std::string_view op, const GemmArgs& args, const Tensor& rs_output) {
  const GemmArgs product = partial_product(op, args, rs_output);
  check_rows_of_blocks(op, args.lhs, 1);
  TORCH_OVERLAP_CHECK(
      (args.lhs.scaling != ScalingMode::BLOCK_2D_SCALING && !args.lhs.swizzled) ||
          config().tp_size == 1 || rows().largest() % kScaledRows == 0,
      kUnsupported, op, ": expected parts of a multiple of ", kScaledRows, " rows with ",
      args.lhs.swizzled ? "swizzled scales" : to_string(args.lhs.scaling), ", got parts of ",
      rows().largest(), "; use PIPELINE, or scales with a row for each of lhs");
  run_reduce_scatter_gemm(
      op, channel(),
      {.gemms = {product},
       .rows = rows(),
       .partial = get_buffer(),
       .received = channel().data(scratch_offset(config()),
                                  {config().tp_size * rows().largest(), get_buffer().size(1)},
                                  get_buffer().scalar_type()),
       .out = rs_output,
       .scale_inv = scale_of_sum(op),
       .factor = 1,
       .bias = args.epilogue.bias});
  set_path(op, describe(op, config().tp_size));
}

}  // namespace torch_overlap
