// Layouts as text: "[dp],[tp,cp:(1)2] P{x,y:max} I{z}".

#include <algorithm>
#include <array>
#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/mesh/layout.h"
#include "torch_overlap/mesh/text.h"

namespace torch_overlap::mesh {
namespace {

constexpr std::array<std::string_view, 5> kReduceKindNames{"sum", "avg", "max", "min", "product"};

// Reads from the front of a text. An error reports the position at which something else was
// expected.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  bool take(std::string_view token) {
    skip_spaces();
    if (text_.substr(at_, token.size()) != token) return false;
    at_ += token.size();
    return true;
  }
  void expect(std::string_view token) {
    if (!take(token)) stop(concat("'", token, "'"));
  }
  std::string_view until(std::string_view stops) {
    skip_spaces();
    const size_t end = std::min(text_.find_first_of(stops, at_), text_.size());
    const std::string_view out = text_.substr(at_, end - at_);
    at_ = end;
    return out;
  }
  bool done() {
    skip_spaces();
    return at_ == text_.size();
  }
  [[noreturn]] void stop(std::string_view expected) const {
    fail(ErrorKind::kValue, "Layout: expected ", expected, " at character ", at_, ", got '", text_,
         "'; write it as in [dp],[tp] P{x:max}");
  }

 private:
  void skip_spaces() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }

  std::string_view text_;
  size_t at_ = 0;
};

// Reads "a,b]" up to and including the closing bracket.
AxisList read_axes(const Mesh& mesh, Reader& reader, std::string_view close) {
  AxisList out;
  if (reader.take(close)) return out;
  do {
    out.push_back(mesh.axis(reader.until(concat(",", close))));
  } while (reader.take(","));
  reader.expect(close);
  return out;
}

std::vector<Partial> read_partial(const Mesh& mesh, Reader& reader) {
  std::vector<Partial> out;
  do {
    const std::string_view item = reader.until(",}");
    // "x", "x:max", "x:(1)2", "x:(1)2:max": a kind begins with a letter.
    const size_t colon = item.rfind(':');
    const bool has_kind =
        colon != std::string_view::npos && colon + 1 < item.size() && item[colon + 1] != '(';
    const auto kind =
        has_kind ? parse_reduce_kind(trim_spaces(item.substr(colon + 1))) : ReduceKind::kSum;
    out.push_back({mesh.axis(has_kind ? item.substr(0, colon) : item), kind});
  } while (reader.take(","));
  reader.expect("}");
  return out;
}

}  // namespace

std::string_view to_string(ReduceKind kind) {
  const auto index = static_cast<size_t>(kind);
  TORCH_OVERLAP_CHECK(index < kReduceKindNames.size(), kValue,
                      "ReduceKind: expected one of the kinds, got ", index);
  return kReduceKindNames[index];
}

ReduceKind parse_reduce_kind(std::string_view name) {
  const auto found = std::find(kReduceKindNames.begin(), kReduceKindNames.end(), name);
  if (found != kReduceKindNames.end())
    return static_cast<ReduceKind>(found - kReduceKindNames.begin());
  fail(ErrorKind::kValue, "ReduceKind: expected sum, avg, max, min or product, got '", name, "'");
}

Layout Layout::parse(const Mesh& mesh, std::string_view text) {
  Reader reader(text);
  std::vector<AxisList> dims;
  std::vector<Partial> partial;
  AxisList invariant;
  if (!reader.take("scalar")) {
    do {
      reader.expect("[");
      dims.push_back(read_axes(mesh, reader, "]"));
    } while (reader.take(","));
  }
  if (reader.take("P{")) partial = read_partial(mesh, reader);
  if (reader.take("I{")) invariant = read_axes(mesh, reader, "}");
  if (!reader.done()) reader.stop("the end");
  return Layout(mesh, std::move(dims), std::move(partial), std::move(invariant));
}

std::string Layout::str() const {
  std::string out = dims_.empty() ? "scalar" : "";
  for (const AxisList& axes : dims_) {
    if (!out.empty()) out += ',';
    out += concat("[", mesh_.names(axes), "]");
  }
  if (!partial_.empty()) {
    const char* separator = " P{";
    for (const Partial& pending : partial_) {
      out += concat(separator, mesh_.name(pending.axis));
      if (pending.kind != ReduceKind::kSum) out += concat(":", to_string(pending.kind));
      separator = ",";
    }
    out += '}';
  }
  if (!invariant_.empty()) out += concat(" I{", mesh_.names(invariant_), "}");
  return out;
}

}  // namespace torch_overlap::mesh
