#include "torch_overlap/overlap/comm_overlap.h"

#include <algorithm>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/gemm/operand.h"
#include "torch_overlap/overlap/comm_overlap_layout.h"

namespace torch_overlap {
namespace {

constexpr std::string_view kCreate = "CommOverlap";

// A wrong class, like an invalid parameter, is an error on all ranks.
void check_class(const CommOverlapConfig& config, bool is_p2p) {
  const bool is_ring = config.method == CommOverlapMethod::RING_EXCHANGE;
  TORCH_OVERLAP_CHECK(is_p2p || !is_ring, kValue,
                      "CommOverlapBase: expected method BULK or PIPELINE, got RING_EXCHANGE; use "
                      "CommOverlapP2PBase");
  TORCH_OVERLAP_CHECK(!is_p2p || is_ring, kValue,
                      "CommOverlapP2PBase: expected method RING_EXCHANGE, got ",
                      to_string(config.method), "; use CommOverlapBase");
}

OverlapChannel::Request channel_request(const OverlapGroup& group, const CommOverlapConfig& config,
                                        bool is_p2p) {
  OverlapChannel::Request request{
      .op = kCreate, .name = concat("overlap buffer"), .digest = config.text()};
  try {
    config.validate(kCreate);
    check_class(config, is_p2p);
    TORCH_OVERLAP_CHECK(config.tp_size == group.size(), kValue, kCreate,
                        ": expected tp_size to be the size of the group, ", group.size(), ", got ",
                        config.tp_size, "; split the communicator first");
  } catch (...) {
    request.fault = Fault::current();
    return request;
  }
  request.bytes = scratch_offset(config) + scratch_bytes(config);
  const bool is_ring = config.method == CommOverlapMethod::RING_EXCHANGE;
  request.flags = config.tp_size * (is_ring ? 2 : config.num_splits + 1);
  const int products = config.method == CommOverlapMethod::BULK ? 1
                       : is_ring ? config.tp_size / (config.aggregate_ag ? 2 : 1)
                                 : config.num_splits;
  request.streams = {.num_compute_streams = std::max(1, std::min(config.num_max_streams, products)),
                     .compute_priority = config.gemm_priority,
                     .comm_priority = config.comm_priority};
  request.use_ce = config.use_ce;
  request.blocks = config.num_comm_sm;
  request.cluster = config.comm_cga_size;
  return request;
}

}  // namespace

std::shared_ptr<CommOverlapCore> CommOverlapCore::create(std::shared_ptr<OverlapGroup> group,
                                                         const CommOverlapConfig& config) {
  if (config.method == CommOverlapMethod::RING_EXCHANGE) {
    return std::make_shared<CommOverlapP2PBase>(std::move(group), config);
  }
  return std::make_shared<CommOverlapBase>(std::move(group), config);
}

CommOverlapCore::CommOverlapCore(std::shared_ptr<OverlapGroup> group,
                                 const CommOverlapConfig& config, bool is_p2p)
    : config_(config),
      comm_(group->comm()),
      tokens_(config.buffer_shape.empty() ? 0 : config.buffer_shape[0]) {
  const auto request = channel_request(*group, config, is_p2p);
  channel_ = OverlapChannel::create(std::move(group), request);
  data_ = channel_->data(0, {config_.numel()}, config_.buffer_dtype);
}

std::string CommOverlapCore::last_path() const {
  const std::lock_guard lock(path_mutex_);
  return path_;
}

void CommOverlapCore::set_path(std::string_view op, const std::string& how) {
  const std::lock_guard lock(path_mutex_);
  path_ = concat(op, ": ", how);
}

std::string CommOverlapCore::describe(std::string_view op, size_t products) const {
  const std::string& unsupported_reason = channel_->unsupported_reason();
  const int streams = std::min<int>(static_cast<int>(products), config_.num_max_streams);
  // cuBLASLt has no tile counters since CUDA 13: flags signal GEMMs of chunks instead.
  const bool is_atomic = op.starts_with("atomic");
  return concat(channel_->transport().name(), ", ", products, " products on ", streams, " streams",
                !is_atomic                   ? ""
                : unsupported_reason.empty() ? ", flags in place of counters"
                                             : ", as the split method",
                unsupported_reason.empty() ? "" : concat(" (", unsupported_reason, ")"));
}

GemmArgs CommOverlapCore::with_margin(GemmArgs args) const {
  const int sms = channel_->device().sm_count(group().device());
  if (config_.set_sm_margin && args.sm_target == 0 && sms > config_.num_comm_sm) {
    args.sm_target = sms - config_.num_comm_sm;
  }
  return args;
}

// --- The buffer ---------------------------------------------------------------------------------

void CommOverlapCore::set_active_tokens(int64_t tokens) {
  TORCH_OVERLAP_CHECK(tokens >= 0 && tokens <= config_.buffer_shape[0], kValue,
                      "set_active_tokens: expected at most the ", config_.buffer_shape[0],
                      " tokens of the buffer, got ", tokens, ". Make a larger buffer.");
  const auto lock = channel_->lock();
  tokens_ = tokens;
}

at::Tensor CommOverlapCore::get_buffer(bool local_chunk) const {
  const auto lock = channel_->lock();
  const auto active = data_.narrow(0, 0, tokens_ * config_.buffer_shape[1])
                          .view({tokens_, config_.buffer_shape[1]});
  return local_chunk ? active.narrow(0, rows().begin(rank()), rows().length(rank())) : active;
}

at::Tensor CommOverlapCore::get_buffer_chunk_by_id(int chunk_id) const {
  TORCH_OVERLAP_CHECK(chunk_id >= 0 && chunk_id < config_.tp_size, kValue,
                      "get_buffer_chunk_by_id: expected a chunk in [0, ", config_.tp_size,
                      "), got ", chunk_id, ". Pass a rank of the group.");
  const auto lock = channel_->lock();
  return get_buffer().narrow(0, rows().begin(chunk_id), rows().length(chunk_id));
}

void CommOverlapCore::copy_into_buffer(const Tensor& input, bool local_chunk) {
  const auto lock = channel_->lock();
  const auto target = get_buffer(local_chunk);
  TORCH_OVERLAP_CHECK(input.defined() && input.element_size() == target.element_size(), kType,
                      "copy_into_buffer: expected elements of ", target.element_size(),
                      " bytes, as the buffer's, got ",
                      input.defined() ? concat(input.scalar_type()) : "no tensor", ". Convert it.");
  TORCH_OVERLAP_CHECK(input.sizes() == target.sizes(), kValue,
                      "copy_into_buffer: expected a tensor of shape ", target.sizes(), " for ",
                      local_chunk ? "the rows of this rank" : "the whole buffer", ", got ",
                      input.sizes(), ". local_chunk selects which of them is copied.");
  TORCH_OVERLAP_CHECK(input.device() == target.device(), kType,
                      "copy_into_buffer: expected a tensor on ", target.device(), ", got ",
                      input.device(), ". Move it.");
  const OverlapChannel::Use use(*channel_);
  target.copy_(input.scalar_type() == target.scalar_type() ? input
                                                           : input.view(target.scalar_type()));
}

void CommOverlapCore::set_ubuf_scale_inv(const Tensor& scale_inv) {
  TORCH_OVERLAP_CHECK(is_fp8_ubuf(), kType,
                      "set_ubuf_scale_inv: expected a buffer of 8-bit "
                      "elements, got one of ",
                      config_.buffer_dtype, ". A buffer of another dtype has no scale.");
  TORCH_OVERLAP_CHECK(
      scale_inv.defined() && scale_inv.scalar_type() == at::kFloat && scale_inv.numel() == 1 &&
          scale_inv.device() == group().device(),
      kType, "set_ubuf_scale_inv: expected one float32 on ", group().device(), ", got ",
      scale_inv.defined()
          ? concat(scale_inv.sizes(), " ", scale_inv.scalar_type(), " on ", scale_inv.device())
          : "no tensor",
      ". Pass the inverse of the scale that the buffer's elements were multiplied by.");
  const auto lock = channel_->lock();
  scale_inv_ = scale_inv;
}

at::Tensor CommOverlapCore::ubuf_scale_inv() const {
  const auto lock = channel_->lock();
  return scale_inv_;
}

at::Tensor CommOverlapCore::scale_of_sum(std::string_view op) const {
  if (!is_fp8_ubuf()) return {};
  TORCH_OVERLAP_CHECK(scale_inv_.defined(), kState, op,
                      ": Missing inverse scaling factor: expected set_ubuf_scale_inv() before the "
                      "sum of an 8-bit buffer, got none. Call it first.");
  return scale_inv_;
}

void CommOverlapCore::check_rs_output(std::string_view op, std::string_view what,
                                      const Tensor& rs_output, int64_t columns) const {
  const std::vector<int64_t> expected{rows().length(rank()), columns};
  TORCH_OVERLAP_CHECK(rs_output.defined() && rs_output.sizes() == at::IntArrayRef(expected) &&
                          has_contiguous_rows(rs_output),
                      kValue, op, ": ", what, " is sized incorrectly: expected ",
                      list_string(expected), " with contiguous rows, got ",
                      rs_output.defined()
                          ? concat(rs_output.sizes(), " of strides ", rs_output.strides())
                          : "no tensor",
                      ". Pass a contiguous tensor for this rank's rows.");
  TORCH_OVERLAP_CHECK(rs_output.device() == group().device(), kType, op, ": expected rs_output on ",
                      group().device(), ", got ", rs_output.device(), ". Move it.");
  const bool fits = is_fp8_ubuf() ? c10::isReducedFloatingType(rs_output.scalar_type()) ||
                                        rs_output.scalar_type() == at::kFloat
                                  : rs_output.scalar_type() == config_.buffer_dtype;
  TORCH_OVERLAP_CHECK(fits && !(is_fp8_ubuf() && rs_output.element_size() == 1), kType, op,
                      ": expected rs_output of ",
                      is_fp8_ubuf() ? "float32, float16 or bfloat16" : concat(config_.buffer_dtype),
                      ", got ", rs_output.scalar_type(), ". Convert the sum afterwards.");
}

void CommOverlapCore::check_bias_of_sum(std::string_view op, const Tensor& bias,
                                        const Tensor& rs_output) const {
  if (!bias.defined()) return;
  const int64_t columns = rs_output.size(1);
  TORCH_OVERLAP_CHECK(bias.dim() == 1 && bias.size(0) == columns && bias.is_contiguous(), kValue,
                      op, ": expected bias of shape [", columns, "], contiguous, got ",
                      bias.sizes(), " of strides ", bias.strides(),
                      ". Pass one element for each feature.");
  TORCH_OVERLAP_CHECK(
      bias.scalar_type() == rs_output.scalar_type() && bias.device() == rs_output.device(), kType,
      op, ": expected bias of ", rs_output.scalar_type(), " on ", rs_output.device(),
      ", as rs_output, got ", bias.scalar_type(), " on ", bias.device(), ". Convert one of them.");
}

// --- GEMMs --------------------------------------------------------------------------------------

void CommOverlapCore::require_bulk(std::string_view op) const {
  TORCH_OVERLAP_CHECK(
      has_bulk(), kUnsupported, op,
      ": Operation not supported. Expected a buffer of method BULK or PIPELINE, got ",
      to_string(config_.method), ". Use split_overlap_ag or split_overlap_rs.");
}

void CommOverlapCore::require_split(std::string_view op, CommOverlapType type, bool atomic) const {
  TORCH_OVERLAP_CHECK(has_split(type), kUnsupported, op,
                      ": Operation not supported. Expected a buffer of ",
                      type == CommOverlapType::AG ? "method RING_EXCHANGE and type AG"
                                                  : "method PIPELINE or RING_EXCHANGE and type RS",
                      ", got ", to_string(config_.method), " and ", to_string(config_.comm_type),
                      ". Make a buffer of that kind.");
  TORCH_OVERLAP_CHECK(!atomic || config_.atomic_gemm, kState, op,
                      ": expected a buffer made with atomic_gemm, got one without; use ",
                      type == CommOverlapType::AG ? "split_overlap_ag" : "split_overlap_rs");
}

void CommOverlapCore::check_bulk(CommOverlapType type, const Tensor& rs_output) const {
  constexpr std::string_view kOp = "bulk_overlap";
  require_bulk(kOp);
  TORCH_OVERLAP_CHECK(type == CommOverlapType::AG || type == CommOverlapType::RS, kValue, kOp,
                      ": invalid collective type: expected AG or RS, got ", to_string(type),
                      ". Use gemm without a buffer.");
  TORCH_OVERLAP_CHECK(config_.comm_type == CommOverlapType::NONE || config_.comm_type == type,
                      kValue, kOp, ": invalid collective type: expected that of the buffer, ",
                      to_string(config_.comm_type), ", got ", to_string(type),
                      ". A buffer of type NONE takes both.");
  const auto lock = channel_->lock();
  const bool gathers = type == CommOverlapType::AG;
  TORCH_OVERLAP_CHECK(
      gathers || config_.buffer_dtype != at::kByte, kType, kOp,
      ": expected a floating-point buffer for RS, got uint8, which has no sums. Make "
      "one of buffer_dtype float8_e4m3fn.");
  if (!gathers && rs_output.defined()) {
    check_rs_output(kOp, "bulk RS overlap auxiliary output", rs_output, config_.buffer_shape[1]);
  }
  TORCH_OVERLAP_CHECK(gathers || rs_output.defined() || !is_fp8_ubuf(), kValue, kOp,
                      ": expected rs_output for the sum of an 8-bit buffer, got none. Sums are "
                      "float32, float16 or bfloat16.");
  TORCH_OVERLAP_CHECK(!gathers || !rs_output.defined(), kValue, kOp,
                      ": expected no rs_output with AG, got one. The gathered rows are in the "
                      "buffer.");
  if (!gathers) (void)scale_of_sum(kOp);
}

void CommOverlapCore::bulk_overlap(const GemmArgs& args, CommOverlapType type,
                                   const Tensor& rs_output) {
  const auto lock = channel_->lock();
  check_bulk(type, rs_output);
  do_bulk(args, type, rs_output);
}

void CommOverlapCore::bulk_overlap_external_ag(CommOverlapCore& lender) {
  constexpr std::string_view kOp = "bulk_overlap_external_ag";
  TORCH_OVERLAP_CHECK(has_bulk() && config_.comm_type != CommOverlapType::RS, kUnsupported, kOp,
                      ": Operation not supported. Expected a buffer of method BULK and type AG or "
                      "NONE, got ",
                      to_string(config_.method), " and ", to_string(config_.comm_type),
                      ". Make a buffer of that kind.");
  TORCH_OVERLAP_CHECK(lender.group().device() == group().device(), kType, kOp,
                      ": expected a lender on ", group().device(), ", got one on ",
                      lender.group().device(), ". Pass a buffer of the same group.");
  do_external_ag(lender);
}

void CommOverlapCore::split_overlap_ag(const GemmArgs& args, const Tensor& gathered) {
  constexpr std::string_view kOp = "split_overlap_ag";
  require_split(kOp, CommOverlapType::AG, /*atomic=*/false);
  const auto lock = channel_->lock();
  do_ag(kOp, args, gathered);
}

void CommOverlapCore::split_overlap_rs(const GemmArgs& args, const Tensor& rs_output) {
  constexpr std::string_view kOp = "split_overlap_rs";
  require_split(kOp, CommOverlapType::RS, /*atomic=*/false);
  const auto lock = channel_->lock();
  do_rs(kOp, args, rs_output);
}

void CommOverlapCore::atomic_gemm_overlap_ag(const GemmArgs& args, const Tensor& gathered) {
  constexpr std::string_view kOp = "atomic_gemm_overlap_ag";
  require_split(kOp, CommOverlapType::AG, /*atomic=*/true);
  const auto lock = channel_->lock();
  do_ag(kOp, args, gathered);
}

void CommOverlapCore::atomic_gemm_overlap_rs(const GemmArgs& args, const Tensor& rs_output) {
  constexpr std::string_view kOp = "atomic_gemm_overlap_rs";
  require_split(kOp, CommOverlapType::RS, /*atomic=*/true);
  const auto lock = channel_->lock();
  do_rs(kOp, args, rs_output);
}

GemmArgs CommOverlapCore::partial_product(std::string_view op, const GemmArgs& args,
                                          const Tensor& rs_output) const {
  const GemmEpilogue& epilogue = args.epilogue;
  TORCH_OVERLAP_CHECK(!args.accumulate && !epilogue.residual.defined(), kUnsupported, op,
                      ": expected accumulate=False and no residual with a reduce-scatter, got one. "
                      "Partial products replace what the buffer holds; add to rs_output.");
  TORCH_OVERLAP_CHECK(
      !epilogue.gelu && !epilogue.gelu_input.defined() && !epilogue.bias_grad.defined(),
      kUnsupported, op,
      ": expected no GELU and no bias gradient with a reduce-scatter, got one. GELU is not linear, "
      "and a rank has only its part of either; apply them to rs_output.");
  GemmArgs product = args;
  product.epilogue = {};
  product.out = get_buffer();  // only for the check; the executor slices it
  const auto [m, n, k] = gemm_shape(product);
  TORCH_OVERLAP_CHECK(m == tokens_, kValue, op, ": expected a product of the ", tokens_.load(),
                      " tokens that are active, got ", m, " rows; call set_active_tokens() first");
  TORCH_OVERLAP_CHECK(n == config_.buffer_shape[1], kValue, op, ": expected a product of the ",
                      config_.buffer_shape[1], " features of the buffer, got ", n,
                      " columns. Make a buffer of that shape.");
  check_rs_output(op, "GEMM->RS overlap output buffer", rs_output, n);
  check_bias_of_sum(op, epilogue.bias, rs_output);
  (void)scale_of_sum(op);
  check_gemm(op, product);
  return with_margin(product);
}

}  // namespace torch_overlap
