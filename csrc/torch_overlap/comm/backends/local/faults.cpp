#include "torch_overlap/comm/backends/local/faults.h"

#include <array>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

using Kind = Faults::Fault::Kind;

struct FaultHint {
  const char* key;
  Kind kind;
  const char* grammar;
};

constexpr std::array<FaultHint, 3> kFaultHints{
    {{"local::delay", Kind::kDelay, "rank@operation:milliseconds"},
     {"local::fail", Kind::kFail, "rank@operation"},
     {"local::drop", Kind::kDrop, "rank@operation"}}};

Faults::Fault parse(const FaultHint& form, const std::string& text) {
  const auto at = text.find('@');
  const auto colon = text.find(':');
  const bool has_delay = colon != std::string::npos;
  TORCH_OVERLAP_CHECK(at != std::string::npos && has_delay == (form.kind == Kind::kDelay), kValue,
                      "hint ", form.key, ": expected ", form.grammar, ", got '", text, "'");
  Faults::Fault fault{.kind = form.kind,
                      .rank = static_cast<int>(parse_int(text.substr(0, at), form.key)),
                      .index = std::nullopt};
  const std::string index = text.substr(at + 1, has_delay ? colon - at - 1 : std::string::npos);
  if (index != "*") fault.index = parse_int(index, form.key);
  if (has_delay) fault.delay = Milliseconds(parse_int(text.substr(colon + 1), form.key));
  return fault;
}

}  // namespace

Faults Faults::take(Hints& hints) {
  Faults out;
  for (const FaultHint& form : kFaultHints) {
    const auto found = hints.find(form.key);
    if (found == hints.end()) continue;
    for (const auto& text : split_string(found->second, ',')) {
      out.faults.push_back(parse(form, text));
    }
    hints.erase(found);
  }
  return out;
}

std::vector<std::string_view> Faults::hints() {
  std::vector<std::string_view> names;
  for (const FaultHint& form : kFaultHints) names.emplace_back(form.key);
  return names;
}

}  // namespace torch_overlap
