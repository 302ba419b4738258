#include "torch_overlap/collectives/select.h"

#include <algorithm>
#include <iterator>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/strings.h"

namespace torch_overlap {
namespace {

using G = CollectiveGeometry;

constexpr size_t kKi = 1024;
constexpr size_t kMi = 1024 * kKi;

// The sizes (CollectiveProblem::bytes) for which each protocol is selected; 0 means never. The
// first row with a matching `kind` and `max_ranks` applies.
//
// The limits are the crossover points in CUDA graphs: two ranks on H100 (norms: H200), four on H100
// and H200. Those of five to eight ranks are conservative. NCCL runs everything larger. A broadcast
// to more than two ranks sends all bytes from one rank; NCCL, which forwards them, is faster for
// large messages.
struct Limits {
  CollectiveKind kind;
  int max_ranks;
  // LL128 is preferred if the links support it, above the sizes for which LL is faster.
  size_t min_ll128_bytes = 0;  // exclusive
  size_t max_ll128_bytes = 0;
  size_t max_ll_bytes = 0;
  size_t max_simple_bytes = 0;
  size_t max_two_shot_bytes = 0;
  size_t min_bulk_bytes = 0;        // bulk copies are as fast as Simple, on fewer SMs
  size_t max_norm_bytes = 0;        // all_reduce with an RMSNorm in the kernel
  size_t max_norm_ll128_bytes = 0;  // by LL128, if the links support it
  // By LL128, if rows are quantized with one scale per tensor or per row.
  size_t max_norm_ll128_one_scale_bytes = 0;
  size_t max_norm_ll_bytes = 0;  // by LL
  // In-place kernels over windows, if the communicator has any. Below this size the exchange of
  // addresses costs more than the copies that it saves.
  size_t min_zero_copy_bytes = 0;
};

constexpr Limits kLimits[] = {
    {.kind = CollectiveKind::all_reduce,
     .max_ranks = 2,
     .min_ll128_bytes = 8 * kKi,
     .max_ll128_bytes = 8 * kMi,
     .max_ll_bytes = 4 * kMi,
     .max_simple_bytes = 16 * kMi,
     .min_bulk_bytes = 4 * kMi,
     .max_norm_bytes = 2 * kMi,
     .max_norm_ll128_bytes = kMi,
     .max_norm_ll128_one_scale_bytes = 2 * kMi,
     .max_norm_ll_bytes = 192 * kKi},
    {.kind = CollectiveKind::all_reduce,
     .max_ranks = 4,
     .min_ll128_bytes = 64 * kKi,
     .max_ll128_bytes = 16 * kMi,
     .max_ll_bytes = 256 * kKi,
     .max_simple_bytes = 512 * kKi,
     .max_two_shot_bytes = 16 * kMi,
     .max_norm_bytes = 512 * kKi,
     .max_norm_ll128_bytes = 256 * kKi,
     .max_norm_ll128_one_scale_bytes = 256 * kKi,
     .max_norm_ll_bytes = 256 * kKi},
    {.kind = CollectiveKind::all_reduce,
     .max_ranks = 8,
     .max_ll_bytes = 128 * kKi,
     .max_simple_bytes = 256 * kKi,
     .max_two_shot_bytes = kMi,
     .max_norm_bytes = 256 * kKi,
     .max_norm_ll_bytes = 128 * kKi},
    {.kind = CollectiveKind::all_gather,
     .max_ranks = 2,
     .max_ll128_bytes = 8 * kMi,
     .max_ll_bytes = 4 * kMi,
     .max_simple_bytes = 16 * kMi,
     .min_bulk_bytes = 4 * kMi},
    {.kind = CollectiveKind::all_gather,
     .max_ranks = 4,
     .min_ll128_bytes = 16 * kKi,
     .max_ll128_bytes = 4 * kMi,
     .max_ll_bytes = 128 * kKi,
     .max_simple_bytes = 32 * kMi,
     .min_zero_copy_bytes = 8 * kMi},
    {.kind = CollectiveKind::all_gather,
     .max_ranks = 8,
     .max_ll_bytes = 64 * kKi,
     .max_simple_bytes = 256 * kKi},
    {.kind = CollectiveKind::reduce_scatter,
     .max_ranks = 2,
     .max_ll128_bytes = 8 * kMi,
     .max_ll_bytes = 4 * kMi,
     .max_simple_bytes = 16 * kMi,
     .min_bulk_bytes = 4 * kMi},
    {.kind = CollectiveKind::reduce_scatter,
     .max_ranks = 4,
     .min_ll128_bytes = 4 * kKi,
     .max_ll128_bytes = 16 * kMi,
     .max_ll_bytes = 256 * kKi,
     .max_simple_bytes = 32 * kMi},
    {.kind = CollectiveKind::reduce_scatter,
     .max_ranks = 8,
     .max_ll_bytes = 64 * kKi,
     .max_simple_bytes = 256 * kKi},
    {.kind = CollectiveKind::all_to_all,
     .max_ranks = 2,
     .max_ll128_bytes = 8 * kMi,
     .max_ll_bytes = 4 * kMi,
     .max_simple_bytes = 16 * kMi,
     .min_bulk_bytes = 4 * kMi},
    {.kind = CollectiveKind::all_to_all,
     .max_ranks = 4,
     .min_ll128_bytes = 4 * kKi,
     .max_ll128_bytes = 16 * kMi,
     .max_ll_bytes = 256 * kKi,
     .max_simple_bytes = 32 * kMi},
    {.kind = CollectiveKind::all_to_all,
     .max_ranks = 8,
     .max_ll_bytes = 64 * kKi,
     .max_simple_bytes = 256 * kKi},
    {.kind = CollectiveKind::broadcast,
     .max_ranks = 2,
     .min_ll128_bytes = 4 * kKi,
     .max_ll128_bytes = 8 * kMi,
     .max_ll_bytes = 4 * kMi,
     .max_simple_bytes = 16 * kMi,
     .min_bulk_bytes = 4 * kMi},
    {.kind = CollectiveKind::broadcast,
     .max_ranks = 4,
     .min_ll128_bytes = 64 * kKi,
     .max_ll128_bytes = 512 * kKi,
     .max_ll_bytes = 128 * kKi,
     .max_simple_bytes = 512 * kKi},
    {.kind = CollectiveKind::broadcast,
     .max_ranks = 8,
     .max_ll_bytes = 64 * kKi,
     .max_simple_bytes = 256 * kKi},
};

const Limits* limits_of(CollectiveKind kind, int size) {
  const auto* const found =
      std::find_if(std::begin(kLimits), std::end(kLimits),
                   [&](const Limits& row) { return row.kind == kind && size <= row.max_ranks; });
  return found == std::end(kLimits) ? nullptr : found;
}

// LL packets or vectors of a block above which another block helps: many small blocks hide each
// other's waits.
constexpr size_t kUnitsPerBlock = 128;
// Maximum number of blocks with an SM of their own: about the number of SMs of any GPU.
constexpr int kBlocksAlone = 128;

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

CollectivePlan plan_blocks(Protocol protocol, size_t units, size_t units_per_block, int max_blocks,
                           int max_units) {
  const auto blocks = std::clamp<size_t>(divide_up(units, units_per_block), 1, max_blocks);
  const auto chunk = std::clamp<size_t>(divide_up(units, blocks), 1, max_units);
  return {protocol, static_cast<int>(blocks), static_cast<uint32_t>(chunk)};
}

// Uses more than one block per SM only if a block would otherwise run several rounds.
int blocks_for(size_t units, int max_units, int max_blocks) {
  const bool has_rounds = units > size_t{kBlocksAlone} * max_units;
  return has_rounds ? max_blocks : std::min(max_blocks, kBlocksAlone);
}

CollectivePlan plan_ll(const CollectiveProblem& problem) {
  const size_t packets = divide_up(problem.bytes, problem.ll_data_bytes);
  return plan_blocks(Protocol::ll, packets, kUnitsPerBlock,
                     blocks_for(packets, G::kLLPackets, G::max_ll_blocks(problem.size)),
                     G::kLLPackets);
}

// Returns true if the two-shot algorithm is faster. It sends fewer bytes, but waits once more, for
// the time in which a link transfers about kBytesOfWait.
bool is_ll128_two_shot_faster(const CollectiveProblem& problem) {
  constexpr size_t kBytesOfWait = 600 * kKi;
  if (problem.kind != CollectiveKind::all_reduce || problem.size <= 2) return false;
  const size_t others = problem.size - 1;
  const size_t in_two_shots = 2 * others * divide_up(problem.bytes, problem.size);
  return others * problem.bytes > in_two_shots + kBytesOfWait;
}

// Plans one unit per warp, in rounds of equal size: a last round of few blocks would wait as long
// as the others.
CollectivePlan plan_ll128(const CollectiveProblem& problem) {
  if (!problem.has_ll128) return {};
  constexpr size_t kLL128UnitsPerBlock = 4;
  const bool is_two_shot = is_ll128_two_shot_faster(problem);
  const size_t part = is_two_shot ? divide_up(problem.bytes, problem.size) : problem.bytes;
  const size_t units = divide_up(part, G::kLL128UnitData);
  const int blocks = blocks_for(units, G::kLL128Units, G::max_ll128_blocks(problem.size));
  const auto max_blocks = static_cast<size_t>(blocks);
  const size_t rounds = divide_up(units, G::kLL128Units * max_blocks);
  const size_t max_units = rounds > 1 ? divide_up(units, rounds * max_blocks) : G::kLL128Units;
  CollectivePlan plan =
      plan_blocks(Protocol::ll128, units, kLL128UnitsPerBlock, blocks, static_cast<int>(max_units));
  plan.is_two_shot = is_two_shot;
  return plan;
}

CollectivePlan plan_simple(const CollectiveProblem& problem) {
  const size_t vectors = divide_up(problem.bytes, G::kVectorBytes);
  return plan_blocks(Protocol::simple, vectors, kUnitsPerBlock,
                     blocks_for(vectors, G::kVectors, max_simple_blocks(problem.size)),
                     G::kVectors);
}

size_t vectors_of_slice(const CollectiveProblem& problem) {
  return divide_up(divide_up(problem.bytes, problem.size), G::kVectorBytes);
}

// A slot holds a slice on its way to its owner, and its sum on the way back.
CollectivePlan plan_two_shot(const CollectiveProblem& problem) {
  CollectivePlan plan = plan_blocks(Protocol::two_shot, vectors_of_slice(problem), kUnitsPerBlock,
                                    max_simple_blocks(problem.size), G::kVectors / 2);
  plan.is_two_shot = true;
  return plan;
}

// Returns true for an all_reduce of more than two ranks. With two ranks both algorithms send the
// same number of bytes.
bool is_two_shot_possible(const CollectiveProblem& problem) {
  return problem.kind == CollectiveKind::all_reduce && problem.size > 2;
}

// Plans a cluster of blocks per row, with one chunk per block, of a multiple of `granularity`
// units. Returns an empty plan if a row does not fit. `is_even`: the chunks of a row must be equal.
CollectivePlan plan_row_blocks(Protocol protocol, size_t rows, size_t units, size_t granularity,
                               bool is_even, int max_blocks, int max_units) {
  size_t row_blocks = divide_up(units, max_units);
  while (is_even && row_blocks <= G::kMaxRowBlocks && units % row_blocks != 0) {
    ++row_blocks;
  }
  if (row_blocks > G::kMaxRowBlocks) return {};
  const size_t chunk = divide_up(divide_up(units, row_blocks), granularity) * granularity;
  row_blocks = divide_up(units, chunk);
  const auto clusters = std::min<size_t>(rows, max_blocks / row_blocks);
  return {.protocol = protocol,
          .blocks = static_cast<int>(clusters * row_blocks),
          .chunk = static_cast<uint32_t>(chunk),
          .row_blocks = static_cast<int>(row_blocks)};
}

// Units of chunks that end where a block of scales does, for elements of two bytes.
constexpr size_t kLLUnitsOfScales = 64;    // 384 elements, three blocks
constexpr size_t kLL128UnitsOfScales = 8;  // 1920 elements, fifteen blocks

// LL and LL128: the last unit of a row may be partly filled. Only these quantize. Simple: vectors
// do not cross rows, so a row is divided into equal chunks.
CollectivePlan plan_rows(const CollectiveProblem& problem, Protocol protocol) {
  const size_t rows = problem.bytes / problem.row_bytes;
  const bool has_blocks = problem.norm_scaling == NormScaling::block;
  if (protocol == Protocol::ll) {
    return plan_row_blocks(protocol, rows, divide_up(problem.row_bytes, problem.ll_data_bytes),
                           has_blocks ? kLLUnitsOfScales : 1, false,
                           std::min(G::max_ll_blocks(problem.size), kBlocksAlone), G::kLLPackets);
  }
  if (protocol == Protocol::ll128) {
    return plan_row_blocks(protocol, rows, divide_up(problem.row_bytes, G::kLL128UnitData),
                           has_blocks ? kLL128UnitsOfScales : 1, false,
                           G::max_ll128_blocks(problem.size), G::kLL128Units);
  }
  const bool is_quantized = problem.norm_scaling != NormScaling::none;
  if (is_quantized || problem.row_bytes % G::kVectorBytes != 0) return {};
  return plan_row_blocks(protocol, rows, problem.row_bytes / G::kVectorBytes, 1, true,
                         max_simple_blocks(problem.size), G::kVectors);
}

// Plans few blocks with large chunks.
CollectivePlan plan_bulk(const CollectiveProblem& problem) {
  if (problem.max_bulk_blocks == 0 || problem.bytes % G::kVectorBytes != 0) return {};
  constexpr size_t kVectorsPerBlock = 256;
  const bool is_two_shot = is_two_shot_possible(problem);
  const size_t vectors = is_two_shot ? vectors_of_slice(problem) : problem.bytes / G::kVectorBytes;
  CollectivePlan plan =
      plan_blocks(Protocol::bulk, vectors, kVectorsPerBlock,
                  std::min(problem.max_bulk_blocks, G::max_bulk_blocks(problem.size)),
                  static_cast<int>(G::bulk_bytes(problem.size)) / G::kVectorBytes);
  plan.is_two_shot = is_two_shot;
  return plan;
}

CollectivePlan plan_large(const CollectiveProblem& problem) {
  return is_two_shot_possible(problem) ? plan_two_shot(problem) : plan_simple(problem);
}

// Requires whole vectors, since any of them may be at the end of a tensor.
CollectivePlan plan_zero_copy(const CollectiveProblem& problem) {
  if (!problem.has_windows || problem.bytes % G::kVectorBytes != 0) return {};
  CollectivePlan plan = plan_large(problem);
  plan.zero_copy = true;
  return plan;
}

// Runs the norm in the kernel up to the size at which a separate kernel is faster.
CollectivePlan plan_norm(const CollectiveProblem& problem, CollectiveMode mode,
                         const Limits& limits) {
  if (problem.ll_data_bytes != 12) return {};
  if (mode == CollectiveMode::ll) return plan_rows(problem, Protocol::ll);
  if (mode == CollectiveMode::ll128 && problem.has_ll128) {
    return plan_rows(problem, Protocol::ll128);
  }
  if (mode == CollectiveMode::simple) return plan_rows(problem, Protocol::simple);
  const bool is_chosen = mode == CollectiveMode::automatic || mode == CollectiveMode::always;
  if (!is_chosen || problem.bytes > limits.max_norm_bytes) return {};
  const bool has_one_scale =
      problem.norm_scaling == NormScaling::tensor || problem.norm_scaling == NormScaling::row;
  if (problem.has_ll128 && problem.bytes <= (has_one_scale ? limits.max_norm_ll128_one_scale_bytes
                                                           : limits.max_norm_ll128_bytes)) {
    if (const auto plan = plan_rows(problem, Protocol::ll128)) return plan;
  }
  if (problem.bytes <= limits.max_norm_ll_bytes) {
    if (const auto plan = plan_rows(problem, Protocol::ll)) return plan;
  }
  return plan_rows(problem, Protocol::simple);
}

// The largest size that two ranks exchange is unknown, so the plan uses all blocks and whole
// chunks.
CollectivePlan plan_unequal(const CollectiveProblem& problem, CollectiveMode mode) {
  if (mode == CollectiveMode::ll) {
    return {Protocol::ll, G::max_ll_blocks(problem.size), G::kLLPackets};
  }
  if (mode == CollectiveMode::ll128 && problem.has_ll128) {
    return {Protocol::ll128, G::max_ll128_blocks(problem.size), G::kLL128Units};
  }
  if (mode == CollectiveMode::always || mode == CollectiveMode::simple) {
    return {Protocol::simple, max_simple_blocks(problem.size), G::kVectors};
  }
  return {};
}

constexpr std::string_view kModeNames[] = {"off",    "auto",     "always", "ll",       "ll128",
                                           "simple", "two_shot", "bulk",   "zero_copy"};
constexpr std::string_view kProtocolNames[] = {"nccl", "ll", "ll128", "simple", "two_shot", "bulk"};

}  // namespace

std::string_view to_string(CollectiveMode mode) { return kModeNames[static_cast<size_t>(mode)]; }

CollectiveMode parse_collective_mode(std::string_view text, std::string_view what) {
  const std::string name = to_lower(text);
  const auto* const found = std::find(std::begin(kModeNames), std::end(kModeNames), name);
  TORCH_OVERLAP_CHECK(
      found != std::end(kModeNames), kValue, what,
      ": expected off, auto, always, ll, ll128, simple, two_shot, bulk or zero_copy, got '", text,
      "'");
  return static_cast<CollectiveMode>(found - std::begin(kModeNames));
}

std::string_view to_string(Protocol protocol) {
  return kProtocolNames[static_cast<size_t>(protocol)];
}

std::string_view to_string(const CollectivePlan& plan) {
  return plan.zero_copy ? "zero_copy" : to_string(plan.protocol);
}

int max_simple_blocks(int size) {
  if (size <= 2) return G::kMaxSimpleBlocksOf2;
  return size <= 4 ? G::kMaxSimpleBlocksOf4 : G::kMaxSimpleBlocksOf8;
}

bool is_supported_collective(CollectiveKind kind, int size) {
  return size >= 2 && limits_of(kind, size) != nullptr;
}

CollectivePlan plan_collective(const CollectiveProblem& problem, CollectiveMode mode) {
  const Limits* const limits = limits_of(problem.kind, problem.size);
  if (problem.size < 2 || limits == nullptr) return {};
  if (!problem.is_uniform) return plan_unequal(problem, mode);
  if (problem.bytes == 0) return {};
  if (problem.row_bytes > 0) {
    if (const auto plan = plan_norm(problem, mode, *limits)) return plan;
  }
  switch (mode) {
    case CollectiveMode::off:
      return {};
    case CollectiveMode::ll:
      return plan_ll(problem);
    case CollectiveMode::ll128:
      return plan_ll128(problem);
    case CollectiveMode::simple:
      return plan_simple(problem);
    case CollectiveMode::two_shot:
      return problem.kind == CollectiveKind::all_reduce ? plan_two_shot(problem) : CollectivePlan{};
    case CollectiveMode::bulk:
      return plan_bulk(problem);
    case CollectiveMode::zero_copy:
      return plan_zero_copy(problem);
    case CollectiveMode::automatic:
    case CollectiveMode::always:
      break;
  }
  const bool is_bulk = limits->min_bulk_bytes > 0 && problem.bytes >= limits->min_bulk_bytes;
  if (is_bulk && problem.has_few_blocks) {
    if (const auto plan = plan_bulk(problem)) return plan;
  }
  if (limits->min_zero_copy_bytes > 0 && problem.bytes >= limits->min_zero_copy_bytes) {
    if (const auto plan = plan_zero_copy(problem)) return plan;
  }
  // The limits assume LL packets with 12 bytes of data. With 8 bytes, the same number of packets
  // carries less.
  const auto is_within_ll_limit = [&](size_t limit) {
    return problem.bytes * 12 <= limit * problem.ll_data_bytes;
  };
  if (!is_within_ll_limit(limits->min_ll128_bytes) && problem.bytes <= limits->max_ll128_bytes) {
    if (const auto plan = plan_ll128(problem)) return plan;
  }
  if (is_within_ll_limit(limits->max_ll_bytes)) return plan_ll(problem);
  const bool is_always = mode == CollectiveMode::always;
  if (is_always) {
    if (const auto plan = plan_zero_copy(problem)) return plan;
  }
  if (is_bulk) {
    if (const auto plan = plan_bulk(problem)) return plan;
  }
  if (problem.bytes <= limits->max_simple_bytes) return plan_simple(problem);
  if (problem.bytes <= limits->max_two_shot_bytes) return plan_two_shot(problem);
  if (is_always) {
    if (const auto plan = plan_bulk(problem)) return plan;
  }
  return is_always ? plan_large(problem) : CollectivePlan{};
}

}  // namespace torch_overlap
