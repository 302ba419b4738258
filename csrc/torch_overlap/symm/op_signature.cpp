#include "torch_overlap/symm/op_signature.h"

#include <algorithm>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/strings.h"

namespace torch_overlap {
namespace {

// Layout of the word: rows in the low bits, signature in the high bits.
constexpr int kRowBits = 27;
constexpr uint32_t kRowMask = (1U << kRowBits) - 1;

// Codes: 0 for chunks, then pieces and columns by count, then kernels by tile width, and the rest.
constexpr int kPieces = 0;
constexpr int kMaxPieces = 4;
constexpr int kColumns = kPieces + kMaxPieces;
constexpr int kKernel = 16;
constexpr int kMaxColumnPieces = kKernel - 1 - kColumns;
constexpr int kTileColumnsStep = 32;
constexpr int kMaxTileColumns = 256;
constexpr int kAllToAllRows = kKernel + kMaxTileColumns / kTileColumnsStep + 1;
constexpr int kAllToAllColumns = kAllToAllRows + 1;
constexpr int kAllReduceRows = kAllToAllRows + 2;

OpSignature signature_of_code(int code) { return OpSignature(static_cast<uint32_t>(code)); }

}  // namespace

OpSignature OpSignature::pieces(int count) {
  TORCH_OVERLAP_CHECK(count >= 1 && count <= kMaxPieces, kValue, "expected 1 to ", kMaxPieces,
                      " pieces, got ", count);
  return count == 1 ? chunks() : signature_of_code(kPieces + count);
}

OpSignature OpSignature::columns(int count) {
  TORCH_OVERLAP_CHECK(count >= 1, kValue, "expected a piece at least, got ", count);
  return signature_of_code(kColumns + std::min(count, kMaxColumnPieces));
}

OpSignature OpSignature::kernel(int tile_columns) {
  TORCH_OVERLAP_CHECK(
      tile_columns >= 0 && tile_columns % kTileColumnsStep == 0 && tile_columns <= kMaxTileColumns,
      kValue, "expected a multiple of ", kTileColumnsStep, " up to ", kMaxTileColumns, ", got ",
      tile_columns);
  return signature_of_code(kKernel + tile_columns / kTileColumnsStep);
}

OpSignature OpSignature::all_to_all_rows() { return signature_of_code(kAllToAllRows); }
OpSignature OpSignature::all_to_all_columns() { return signature_of_code(kAllToAllColumns); }
OpSignature OpSignature::all_reduce_rows() { return signature_of_code(kAllReduceRows); }

std::string OpSignature::str() const {
  const auto code = static_cast<int>(code_);
  if (code == kAllReduceRows) return "sums of all rows on every rank";
  if (code == kAllToAllColumns) return "an all-to-all of columns";
  if (code == kAllToAllRows) return "an all-to-all of rows";
  if (code > kKernel) {
    return concat("a kernel that sends tiles of ", (code - kKernel) * kTileColumnsStep, " columns");
  }
  if (code == kKernel) return "a kernel that sends";
  if (code == kColumns + kMaxColumnPieces)
    return concat("pieces of all columns, ", kMaxColumnPieces, " or more");
  if (code > kColumns) return concat("pieces of all columns, ", code - kColumns);
  if (code > kPieces) return concat("pieces of each rank's rows, ", code - kPieces);
  return "each rank's rows as one";
}

uint32_t EntryPayload::word() const {
  return (static_cast<uint32_t>(rows) & kRowMask) | signature.code() << kRowBits;
}

EntryPayload EntryPayload::of(uint32_t word) {
  return {int64_t{word & kRowMask}, OpSignature(word >> kRowBits)};
}

std::string describe_entry_mismatch(const std::string& name, const EntryPayload& own,
                                    const std::string& here, const EntryPayload& other, int rank) {
  const int64_t own_rows = EntryPayload::of(own.word()).rows;
  if (own_rows != other.rows) {
    return concat(name, ": expected the same number of rows on all ranks, got ", own_rows, " ",
                  here, " and ", other.rows, " on rank ", rank,
                  ". Pass equal shapes on all ranks (for a buffer of create_comm_overlap_buffer: "
                  "call set_active_tokens alike).");
  }
  return concat(name, ": expected the same operator and algorithm on all ranks, got ",
                own.signature.str(), " ", here, " and ", other.signature.str(), " on rank ", rank,
                "; give equal shapes, or name an algorithm that all can take");
}

}  // namespace torch_overlap
