#include "torch_overlap/symm/begin.h"

#include <algorithm>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/strings.h"

namespace torch_overlap {
namespace {

// The word: rows below, the way above.
constexpr int kRowBits = 27;
constexpr uint32_t kRows = (1U << kRowBits) - 1;

// Codes: 0 for chunks, behind these by count or by width, and the rest.
constexpr int kPieces = 0;
constexpr int kMostPieces = 4;
constexpr int kColumns = kPieces + kMostPieces;
constexpr int kKernel = 16;
constexpr int kMostColumns = kKernel - 1 - kColumns;
constexpr int kWidth = 32;
constexpr int kMostWidth = 256;
constexpr int kRowsToAll = kKernel + kMostWidth / kWidth + 1;
constexpr int kColumnsToAll = kRowsToAll + 1;
constexpr int kEverywhere = kRowsToAll + 2;

Way way_of(int code) { return Way(static_cast<uint32_t>(code)); }

}  // namespace

Way Way::pieces(int count) {
  TORCH_OVERLAP_CHECK(count >= 1 && count <= kMostPieces, kValue, "expected 1 to ", kMostPieces,
                      " pieces, got ", count);
  return count == 1 ? chunks() : way_of(kPieces + count);
}

Way Way::columns(int count) {
  TORCH_OVERLAP_CHECK(count >= 1, kValue, "expected a piece at least, got ", count);
  return way_of(kColumns + std::min(count, kMostColumns));
}

Way Way::kernel(int tile_columns) {
  TORCH_OVERLAP_CHECK(tile_columns >= 0 && tile_columns % kWidth == 0 && tile_columns <= kMostWidth,
                      kValue, "expected a multiple of ", kWidth, " up to ", kMostWidth, ", got ",
                      tile_columns);
  return way_of(kKernel + tile_columns / kWidth);
}

Way Way::rows_to_all() { return way_of(kRowsToAll); }
Way Way::columns_to_all() { return way_of(kColumnsToAll); }
Way Way::everywhere() { return way_of(kEverywhere); }

std::string Way::str() const {
  const auto code = static_cast<int>(code_);
  if (code == kEverywhere) return "sums of all rows on every rank";
  if (code == kColumnsToAll) return "an all-to-all of columns";
  if (code == kRowsToAll) return "an all-to-all of rows";
  if (code > kKernel) {
    return concat("a kernel that sends tiles of ", (code - kKernel) * kWidth, " columns");
  }
  if (code == kKernel) return "a kernel that sends";
  if (code == kColumns + kMostColumns)
    return concat("pieces of all columns, ", kMostColumns, " or more");
  if (code > kColumns) return concat("pieces of all columns, ", code - kColumns);
  if (code > kPieces) return concat("pieces of each rank's rows, ", code - kPieces);
  return "each rank's rows as one";
}

uint32_t Begin::word() const {
  return (static_cast<uint32_t>(rows) & kRows) | way.code() << kRowBits;
}

Begin Begin::of(uint32_t word) { return {int64_t{word & kRows}, Way(word >> kRowBits)}; }

std::string describe_unlike_begins(const std::string& name, const Begin& own,
                                   const std::string& here, const Begin& other, int rank) {
  const int64_t own_rows = Begin::of(own.word()).rows;
  if (own_rows != other.rows) {
    return concat(name, ": expected the same number of rows on all ranks, got ", own_rows, " ",
                  here, " and ", other.rows, " on rank ", rank,
                  ". Pass equal shapes on all ranks (for a buffer of create_comm_overlap_buffer: "
                  "call set_active_tokens alike).");
  }
  return concat(name, ": expected the same operator and algorithm on all ranks, got ",
                own.way.str(), " ", here, " and ", other.way.str(), " on rank ", rank,
                "; give equal shapes, or name an algorithm that all can take");
}

}  // namespace torch_overlap
