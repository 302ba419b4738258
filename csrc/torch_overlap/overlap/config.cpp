#include "torch_overlap/overlap/config.h"

#include <array>
#include <limits>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

constexpr std::array<std::string_view, 3> kTypes{"NONE", "RS", "AG"};
constexpr std::array<std::string_view, 4> kMethods{"NONE", "BULK", "PIPELINE", "RING_EXCHANGE"};
constexpr std::array<std::string_view, 10> kAlgos{
    "NO_OVERLAP",         "BULK_OVERLAP_AG",         "BULK_OVERLAP_RS", "SPLIT_PIPELINED_AG_P2P",
    "SPLIT_PIPELINED_RS", "SPLIT_PIPELINED_RS_P2P",  "ATOMIC_GEMM_RS",  "ATOMIC_GEMM_AG_P2P",
    "ATOMIC_GEMM_RS_P2P", "EXTERNAL_BULK_OVERLAP_AG"};

template <size_t n, typename Enum>
std::string_view name_in(const std::array<std::string_view, n>& names, Enum value) {
  const auto index = static_cast<size_t>(value);
  return index < n ? names[index] : "unknown";
}

void check_range(std::string_view op, std::string_view what, int value, int least, int most) {
  TORCH_OVERLAP_CHECK(value >= least && value <= most, kValue, op, ": expected ", what, " in [",
                      least, ", ", most, "], got ", value, ". Pass a value of that range.");
}

bool is_communicable(c10::ScalarType dtype) {
  using enum c10::ScalarType;
  switch (dtype) {
    case Float:
    case Double:
    case Half:
    case BFloat16:
    case Float8_e4m3fn:
    case Float8_e5m2:
    case Byte:
      return true;
    default:
      return false;
  }
}

}  // namespace

std::string_view to_string(CommOverlapType type) { return name_in(kTypes, type); }
std::string_view to_string(CommOverlapMethod method) { return name_in(kMethods, method); }
std::string_view to_string(CommOverlapAlgo algo) { return name_in(kAlgos, algo); }

CommOverlapConfig CommOverlapConfig::defaults(CommOverlapType type, CommOverlapMethod method,
                                              int tp_size, std::optional<bool> use_ce) {
  CommOverlapConfig config{
      .comm_type = type, .method = method, .buffer_shape = {}, .tp_size = tp_size};
  if (method == CommOverlapMethod::RING_EXCHANGE) {
    config.num_splits = tp_size;
    config.comm_cga_size = 1;
    config.num_comm_sm = 1;
    config.set_sm_margin = false;
    config.use_ce = true;
  }
  config.use_ce = use_ce.value_or(config.use_ce);
  if (config.uses_only_copy_engines()) config.comm_cga_size = 1;
  return config;
}

bool CommOverlapConfig::uses_only_copy_engines() const {
  return use_ce && (method == CommOverlapMethod::RING_EXCHANGE ||
                    (method == CommOverlapMethod::BULK && comm_type == CommOverlapType::AG));
}

int64_t CommOverlapConfig::numel() const {
  int64_t product = 1;
  for (const int64_t size : buffer_shape) product *= size;
  return product;
}

void CommOverlapConfig::validate(std::string_view op) const {
  using Type = CommOverlapType;
  using Method = CommOverlapMethod;
  TORCH_OVERLAP_CHECK(comm_type == Type::NONE || comm_type == Type::RS || comm_type == Type::AG,
                      kValue, op,
                      ": invalid collective type: expected NONE (0), RS (1) or AG (2), "
                      "got ",
                      static_cast<int64_t>(comm_type), ". Pass a CommOverlapType.");
  TORCH_OVERLAP_CHECK(
      method == Method::BULK || method == Method::PIPELINE || method == Method::RING_EXCHANGE,
      kValue, op, ": invalid method: expected BULK (1), PIPELINE (2) or RING_EXCHANGE (3), got ",
      static_cast<int64_t>(method), ". Pass a CommOverlapMethod.");
  TORCH_OVERLAP_CHECK(comm_type != Type::NONE || method == Method::BULK, kValue, op,
                      ": invalid collective type: expected RS or AG for ", to_string(method),
                      ", got NONE. Only BULK serves both.");
  TORCH_OVERLAP_CHECK(!(method == Method::PIPELINE && comm_type == Type::AG), kUnsupported, op,
                      ": expected RS for PIPELINE, got AG. It reduces one piece of a product while "
                      "the next is computed, and what is gathered comes before the product; use "
                      "RING_EXCHANGE or BULK for AG.");
  TORCH_OVERLAP_CHECK(buffer_shape.size() == 2, kValue, op,
                      ": expected buffer_shape to be [tokens, features], got ",
                      list_string(buffer_shape), ". Collapse the dimensions of tokens.");
  for (const int64_t size : buffer_shape) {
    TORCH_OVERLAP_CHECK(size > 0 && size <= std::numeric_limits<int32_t>::max(), kValue, op,
                        ": expected sizes in [1, 2^31) in buffer_shape, got ",
                        list_string(buffer_shape), ". Split the tokens over several buffers.");
  }
  TORCH_OVERLAP_CHECK(is_communicable(buffer_dtype), kType, op,
                      ": expected buffer_dtype to be one of float64, float32, float16, bfloat16, "
                      "float8_e4m3fn, float8_e5m2, uint8, got ",
                      buffer_dtype, ". Convert the operand.");
  constexpr int64_t kMaxBytes = int64_t{1} << 47;  // size of the virtual address space
  const auto element = static_cast<int64_t>(c10::elementSize(buffer_dtype));
  TORCH_OVERLAP_CHECK(buffer_shape[0] <= kMaxBytes / buffer_shape[1] / element, kValue, op,
                      ": expected a buffer of at most 2^47 bytes, got buffer_shape ",
                      list_string(buffer_shape), " of ", buffer_dtype, ". Make a smaller one.");
  TORCH_OVERLAP_CHECK(!(buffer_dtype == c10::ScalarType::Byte && comm_type == Type::RS), kType, op,
                      ": expected a floating-point buffer_dtype for RS, got uint8, which has no "
                      "sums. Use float8_e4m3fn.");
  check_range(op, "tp_size", tp_size, 1, 1 << 16);
  check_range(op, "num_splits", num_splits, 1, 64);
  check_range(op, "num_max_streams", num_max_streams, 1, 32);
  check_range(op, "comm_cga_size", comm_cga_size, 1, 8);
  check_range(op, "num_comm_sm", num_comm_sm, 1, 1024);
  TORCH_OVERLAP_CHECK(num_comm_sm % comm_cga_size == 0, kValue, op,
                      ": expected num_comm_sm to be a multiple of comm_cga_size ", comm_cga_size,
                      ", got ", num_comm_sm, ". Clusters are whole.");
  TORCH_OVERLAP_CHECK(!uses_only_copy_engines() || comm_cga_size == 1, kUnsupported, op,
                      ": expected comm_cga_size 1 where copy engines carry the data, got ",
                      comm_cga_size, "; use_ce=False moves it with kernels");
  TORCH_OVERLAP_CHECK(
      !aggregate_ag || (method == Method::RING_EXCHANGE && comm_type == Type::AG), kValue, op,
      ": expected RING_EXCHANGE and AG with aggregate_ag, got ", to_string(method), " and ",
      to_string(comm_type),
      ". It multiplies two ranks' chunks at once, and others have no chunks that are "
      "multiplied; pass aggregate_ag=False.");
  TORCH_OVERLAP_CHECK(!aggregate_ag || tp_size % 2 == 0, kValue, op,
                      ": expected an even tp_size with aggregate_ag, got ", tp_size,
                      ". It multiplies pairs of chunks; pass aggregate_ag=False.");
  TORCH_OVERLAP_CHECK(!relay_ag || (method == Method::RING_EXCHANGE && comm_type == Type::AG),
                      kValue, op, ": expected RING_EXCHANGE and AG with relay_ag, got ",
                      to_string(method), " and ", to_string(comm_type),
                      ". It sends chunks round a ring, and others send none; pass relay_ag=False.");
  TORCH_OVERLAP_CHECK(!relay_ag || !aggregate_ag, kUnsupported, op,
                      ": expected aggregate_ag or relay_ag, got both; products of two chunks wait "
                      "for their owners. Pass one of them.");
  TORCH_OVERLAP_CHECK(
      !atomic_gemm || method != Method::BULK, kValue, op,
      ": expected PIPELINE or RING_EXCHANGE with atomic_gemm, got BULK. Its "
      "collective has nothing to do with the product, which has nothing to wait for "
      "or to tell; pass atomic_gemm=False.");
}

std::string CommOverlapConfig::text() const {
  return concat("comm_type=", to_string(comm_type), " method=", to_string(method),
                " buffer_shape=", list_string(buffer_shape), " buffer_dtype=", buffer_dtype,
                " tp_size=", tp_size, " num_splits=", num_splits,
                " num_max_streams=", num_max_streams, " comm_cga_size=", comm_cga_size,
                " gemm_priority=", gemm_priority, " comm_priority=", comm_priority,
                " num_comm_sm=", num_comm_sm, " set_sm_margin=", set_sm_margin, " use_ce=", use_ce,
                " atomic_gemm=", atomic_gemm, " rs_overlap_first_gemm=", rs_overlap_first_gemm,
                " aggregate_ag=", aggregate_ag, " relay_ag=", relay_ag);
}

}  // namespace torch_overlap
