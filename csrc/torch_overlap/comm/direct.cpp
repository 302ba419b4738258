#include "torch_overlap/comm/direct.h"

#include <algorithm>
#include <iterator>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/strings.h"

namespace torch_overlap {
namespace {

using G = DirectGeometry;

constexpr size_t kKi = 1024;
constexpr size_t kMi = 1024 * kKi;

// Up to how many bytes (DirectProblem::bytes) each protocol is taken, and bulk copies from how many
// on; 0: never. Lines of 128 bytes, where links carry them, come before all others but for the few
// bytes that short ones are quicker for; bulk copies have what they do as quickly, in fewer SMs.
// The row of two ranks: where the protocols cross on H100s in a graph. Of four: on H200s and H100s
// (docs/results.md has the times of what is chosen); push is quicker than NCCL up to the largest
// size measured, 128 MiB in all, with a block on nearly every SM. Of more: below where prototypes
// did. NCCL has what is larger. Of a broadcast of more than two ranks all bytes leave one of them:
// NCCL, which hands them on, is ahead from 1 MiB on.
struct Limits {
  Primitive primitive;
  int most_ranks;  // the first row that fits counts
  size_t few;      // by lines, whatever links carry
  size_t ll128;    // where it can be done
  size_t ll;
  size_t push;
  size_t two_shot;
  size_t bulk;         // before push and two_shot, where it can be done
  size_t norm = 0;     // of all_reduce, with an RMSNorm in the kernel
  size_t norm_ll = 0;  // the same by lines
  // From so many on without copies, where the communicator has windows: there NCCL's own kernels
  // over such memory are quicker than any way from elsewhere. For less the round in which ranks
  // tell each other where their tensors lie costs more than it saves
  // (benchmarks/results/bench_gather_windows-h100-80gb-hbm3-tp4-2026-11-26.json).
  size_t zero_copy = 0;
};

constexpr Limits kLimits[] = {
    {Primitive::all_reduce, 2, 8 * kKi, 8 * kMi, 4 * kMi, 16 * kMi, 0, 4 * kMi, kMi, 192 * kKi},
    {Primitive::all_reduce, 4, 64 * kKi, 16 * kMi, 256 * kKi, 512 * kKi, 16 * kMi, 0, kMi,
     256 * kKi},
    {Primitive::all_reduce, 8, 0, 0, 128 * kKi, 256 * kKi, kMi, 0, 256 * kKi, 128 * kKi},
    {Primitive::all_gather, 2, 0, 8 * kMi, 4 * kMi, 16 * kMi, 0, 4 * kMi},
    {Primitive::all_gather, 4, 16 * kKi, 4 * kMi, 128 * kKi, 32 * kMi, 0, 0, 0, 0, 8 * kMi},
    {Primitive::all_gather, 8, 0, 0, 64 * kKi, 256 * kKi, 0, 0},
    {Primitive::reduce_scatter, 2, 0, 8 * kMi, 4 * kMi, 16 * kMi, 0, 4 * kMi},
    {Primitive::reduce_scatter, 4, 4 * kKi, 16 * kMi, 256 * kKi, 32 * kMi, 0, 0},
    {Primitive::reduce_scatter, 8, 0, 0, 64 * kKi, 256 * kKi, 0, 0},
    {Primitive::all_to_all, 2, 0, 8 * kMi, 4 * kMi, 16 * kMi, 0, 4 * kMi},
    {Primitive::all_to_all, 4, 4 * kKi, 16 * kMi, 256 * kKi, 32 * kMi, 0, 0},
    {Primitive::all_to_all, 8, 0, 0, 64 * kKi, 256 * kKi, 0, 0},
    {Primitive::broadcast, 2, 4 * kKi, 8 * kMi, 4 * kMi, 16 * kMi, 0, 4 * kMi},
    {Primitive::broadcast, 4, 64 * kKi, 512 * kKi, 128 * kKi, 512 * kKi, 0, 0},
    {Primitive::broadcast, 8, 0, 0, 64 * kKi, 256 * kKi, 0, 0},
};

const Limits* limits_of(Primitive primitive, int size) {
  const auto* const found = std::find_if(
      std::begin(kLimits), std::end(kLimits),
      [&](const Limits& row) { return row.primitive == primitive && size <= row.most_ranks; });
  return found == std::end(kLimits) ? nullptr : found;
}

// Lines or vectors, before another block helps: many small blocks hide each other's waits.
constexpr size_t kUnitsOfBlock = 128;
// About as many as any GPU has SMs.
constexpr int kBlocksAlone = 128;

size_t divide_up(size_t a, size_t b) { return (a + b - 1) / b; }

DirectPlan share_out(DirectProtocol protocol, size_t units, size_t units_for_a_block,
                     int most_blocks, int most_units) {
  const auto blocks = std::clamp<size_t>(divide_up(units, units_for_a_block), 1, most_blocks);
  const auto chunk = std::clamp<size_t>(divide_up(units, blocks), 1, most_units);
  return {protocol, static_cast<int>(blocks), static_cast<uint32_t>(chunk)};
}

// More than one block on an SM only where there would be rounds.
int blocks_for(size_t units, int most_units, int most_blocks) {
  const bool has_rounds = units > size_t{kBlocksAlone} * most_units;
  return has_rounds ? most_blocks : std::min(most_blocks, kBlocksAlone);
}

DirectPlan plan_lines(const DirectProblem& problem) {
  const size_t lines = divide_up(problem.bytes, problem.line_data);
  return share_out(DirectProtocol::ll, lines, kUnitsOfBlock,
                   blocks_for(lines, G::kLines, G::most_line_blocks(problem.size)), G::kLines);
}

// Two shots send less, and wait once more: for the time in which a link takes about so many bytes.
bool pays_in_wide_slices(const DirectProblem& problem) {
  constexpr size_t kBytesOfWait = 600 * kKi;
  if (problem.primitive != Primitive::all_reduce || problem.size <= 2) return false;
  const size_t others = problem.size - 1;
  const size_t in_two_shots = 2 * others * divide_up(problem.bytes, problem.size);
  return others * problem.bytes > in_two_shots + kBytesOfWait;
}

// A unit for each warp, of rounds that are alike: a last one of few blocks waits as long as others.
DirectPlan plan_ll128(const DirectProblem& problem) {
  if (!problem.has_ll128) return {};
  constexpr size_t kWideUnitsOfBlock = 4;
  const bool has_slices = pays_in_wide_slices(problem);
  const size_t part = has_slices ? divide_up(problem.bytes, problem.size) : problem.bytes;
  const size_t units = divide_up(part, G::kWideUnitData);
  const int blocks = blocks_for(units, G::kWideUnits, G::most_wide_blocks(problem.size));
  const auto most_blocks = static_cast<size_t>(blocks);
  const size_t rounds = divide_up(units, G::kWideUnits * most_blocks);
  const size_t most_units = rounds > 1 ? divide_up(units, rounds * most_blocks) : G::kWideUnits;
  DirectPlan plan = share_out(DirectProtocol::ll128, units, kWideUnitsOfBlock, blocks,
                              static_cast<int>(most_units));
  plan.has_slices = has_slices;
  return plan;
}

DirectPlan plan_push(const DirectProblem& problem) {
  const size_t vectors = divide_up(problem.bytes, G::kVectorBytes);
  return share_out(DirectProtocol::push, vectors, kUnitsOfBlock,
                   blocks_for(vectors, G::kVectors, most_push_blocks(problem.size)), G::kVectors);
}

size_t vectors_of_slice(const DirectProblem& problem) {
  return divide_up(divide_up(problem.bytes, problem.size), G::kVectorBytes);
}

// A slot holds a slice on its way to its owner, and its sum on the way back.
DirectPlan plan_two_shot(const DirectProblem& problem) {
  DirectPlan plan = share_out(DirectProtocol::two_shot, vectors_of_slice(problem), kUnitsOfBlock,
                              most_push_blocks(problem.size), G::kVectors / 2);
  plan.has_slices = true;
  return plan;
}

// Of two ranks both ways send as much.
bool pays_in_slices(const DirectProblem& problem) {
  return problem.primitive == Primitive::all_reduce && problem.size > 2;
}

// Rows, a cluster of blocks each, of which every block has one chunk. Empty where they do not fit.
DirectPlan share_out_rows(DirectProtocol protocol, size_t rows, size_t units, bool is_even,
                          int most_blocks, int most_units) {
  size_t row_blocks = divide_up(units, most_units);
  while (is_even && row_blocks <= G::kMostRowBlocks && units % row_blocks != 0) ++row_blocks;
  if (row_blocks > G::kMostRowBlocks) return {};
  const auto clusters = std::min<size_t>(rows, most_blocks / row_blocks);
  return {.protocol = protocol,
          .blocks = static_cast<int>(clusters * row_blocks),
          .chunk = static_cast<uint32_t>(divide_up(units, row_blocks)),
          .row_blocks = static_cast<int>(row_blocks)};
}

// As lines a row ends with one that is not full. Vectors lie in a row: it has whole chunks.
DirectPlan plan_rows(const DirectProblem& problem, DirectProtocol protocol) {
  const size_t rows = problem.bytes / problem.row_bytes;
  if (protocol == DirectProtocol::ll) {
    return share_out_rows(protocol, rows, divide_up(problem.row_bytes, problem.line_data), false,
                          std::min(G::most_line_blocks(problem.size), kBlocksAlone), G::kLines);
  }
  if (problem.row_bytes % G::kVectorBytes != 0) return {};
  return share_out_rows(protocol, rows, problem.row_bytes / G::kVectorBytes, true,
                        most_push_blocks(problem.size), G::kVectors);
}

// Large chunks in few blocks.
DirectPlan plan_bulk(const DirectProblem& problem) {
  if (problem.most_bulk_blocks == 0 || problem.bytes % G::kVectorBytes != 0) return {};
  constexpr size_t kVectorsOfBlock = 256;
  const bool has_slices = pays_in_slices(problem);
  const size_t vectors = has_slices ? vectors_of_slice(problem) : problem.bytes / G::kVectorBytes;
  DirectPlan plan = share_out(DirectProtocol::bulk, vectors, kVectorsOfBlock,
                              std::min(problem.most_bulk_blocks, G::most_bulk_blocks(problem.size)),
                              static_cast<int>(G::bulk_bytes(problem.size)) / G::kVectorBytes);
  plan.has_slices = has_slices;
  return plan;
}

DirectPlan plan_large(const DirectProblem& problem) {
  return pays_in_slices(problem) ? plan_two_shot(problem) : plan_push(problem);
}

// Whole vectors only: of them any may lie at the end of a tensor.
DirectPlan plan_zero_copy(const DirectProblem& problem) {
  if (!problem.has_windows || problem.bytes % G::kVectorBytes != 0) return {};
  DirectPlan plan = plan_large(problem);
  plan.zero_copy = true;
  return plan;
}

// Up to where a norm in the kernel is quicker than one behind it.
DirectPlan plan_norm(const DirectProblem& problem, DirectMode mode, const Limits& limits) {
  if (problem.line_data != 12) return {};
  if (mode == DirectMode::ll) return plan_rows(problem, DirectProtocol::ll);
  if (mode == DirectMode::push) return plan_rows(problem, DirectProtocol::push);
  const bool is_chosen = mode == DirectMode::automatic || mode == DirectMode::always;
  if (!is_chosen || problem.bytes > limits.norm) return {};
  const auto lines =
      problem.bytes <= limits.norm_ll ? plan_rows(problem, DirectProtocol::ll) : DirectPlan{};
  return lines ? lines : plan_rows(problem, DirectProtocol::push);
}

// The most that two ranks say to each other is unknown: all blocks, whole chunks.
DirectPlan plan_unequal(const DirectProblem& problem, DirectMode mode) {
  if (mode == DirectMode::ll) {
    return {DirectProtocol::ll, G::most_line_blocks(problem.size), G::kLines};
  }
  if (mode == DirectMode::ll128 && problem.has_ll128) {
    return {DirectProtocol::ll128, G::most_wide_blocks(problem.size), G::kWideUnits};
  }
  if (mode == DirectMode::always || mode == DirectMode::push) {
    return {DirectProtocol::push, most_push_blocks(problem.size), G::kVectors};
  }
  return {};
}

constexpr std::string_view kModeNames[] = {"off",  "auto",     "always", "ll",       "ll128",
                                           "push", "two_shot", "bulk",   "zero_copy"};

}  // namespace

std::string_view to_string(DirectMode mode) { return kModeNames[static_cast<size_t>(mode)]; }

DirectMode parse_direct_mode(std::string_view text, std::string_view what) {
  const std::string name = to_lower(text);
  const auto* const found = std::find(std::begin(kModeNames), std::end(kModeNames), name);
  TORCH_OVERLAP_CHECK(
      found != std::end(kModeNames), kValue, what,
      ": expected off, auto, always, ll, ll128, push, two_shot, bulk or zero_copy, got '", text,
      "'");
  return static_cast<DirectMode>(found - std::begin(kModeNames));
}

std::string_view to_string(DirectProtocol protocol) {
  switch (protocol) {
    case DirectProtocol::none:
      return "nccl";
    case DirectProtocol::ll:
      return "direct_ll";
    case DirectProtocol::ll128:
      return "direct_ll128";
    case DirectProtocol::push:
      return "direct_push";
    case DirectProtocol::two_shot:
      return "direct_two_shot";
    case DirectProtocol::bulk:
      return "direct_bulk";
  }
  return "unknown";
}

std::string_view to_string(const DirectPlan& plan) {
  return plan.zero_copy ? "direct_zero_copy" : to_string(plan.protocol);
}

int most_push_blocks(int size) {
  if (size <= 2) return G::kPushBlocksOf2;
  return size <= 4 ? G::kPushBlocksOf4 : G::kPushBlocksOf8;
}

bool is_direct_possible(Primitive primitive, int size) {
  return size >= 2 && limits_of(primitive, size) != nullptr;
}

DirectPlan plan_direct(const DirectProblem& problem, DirectMode mode) {
  const Limits* const limits = limits_of(problem.primitive, problem.size);
  if (problem.size < 2 || limits == nullptr) return {};
  if (!problem.is_uniform) return plan_unequal(problem, mode);
  if (problem.bytes == 0) return {};
  if (problem.row_bytes > 0) {
    if (const auto plan = plan_norm(problem, mode, *limits)) return plan;
  }
  switch (mode) {
    case DirectMode::off:
      return {};
    case DirectMode::ll:
      return plan_lines(problem);
    case DirectMode::ll128:
      return plan_ll128(problem);
    case DirectMode::push:
      return plan_push(problem);
    case DirectMode::two_shot:
      return problem.primitive == Primitive::all_reduce ? plan_two_shot(problem) : DirectPlan{};
    case DirectMode::bulk:
      return plan_bulk(problem);
    case DirectMode::zero_copy:
      return plan_zero_copy(problem);
    case DirectMode::automatic:
    case DirectMode::always:
      break;
  }
  const bool is_bulk = limits->bulk > 0 && problem.bytes >= limits->bulk;
  if (is_bulk && problem.has_few_blocks) {
    if (const auto plan = plan_bulk(problem)) return plan;
  }
  if (limits->zero_copy > 0 && problem.bytes >= limits->zero_copy) {
    if (const auto plan = plan_zero_copy(problem)) return plan;
  }
  // Limits are for lines of 12 bytes: with 8 there are as many for less.
  const auto fits_in_lines = [&](size_t limit) {
    return problem.bytes * 12 <= limit * problem.line_data;
  };
  if (!fits_in_lines(limits->few) && problem.bytes <= limits->ll128) {
    if (const auto plan = plan_ll128(problem)) return plan;
  }
  if (fits_in_lines(limits->ll)) return plan_lines(problem);
  const bool is_always = mode == DirectMode::always;
  if (is_always) {
    if (const auto plan = plan_zero_copy(problem)) return plan;
  }
  if (is_bulk) {
    if (const auto plan = plan_bulk(problem)) return plan;
  }
  if (problem.bytes <= limits->push) return plan_push(problem);
  if (problem.bytes <= limits->two_shot) return plan_two_shot(problem);
  if (is_always) {
    if (const auto plan = plan_bulk(problem)) return plan;
  }
  return is_always ? plan_large(problem) : DirectPlan{};
}

}  // namespace torch_overlap
