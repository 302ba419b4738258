#include "torch_overlap/mesh/mesh.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <unordered_map>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/strings.h"
#include "torch_overlap/mesh/text.h"

namespace torch_overlap::mesh {
namespace {

constexpr int64_t kMaxRanks = int64_t{1} << 24;

bool is_name(std::string_view text) {
  const auto is_letter = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
  };
  if (text.empty() || !is_letter(text[0])) return false;
  return std::all_of(text.begin(), text.end(),
                     [&](char c) { return is_letter(c) || (c >= '0' && c <= '9'); });
}

int64_t check_axes(const std::vector<Axis>& axes) {
  TORCH_OVERLAP_CHECK(static_cast<int64_t>(axes.size()) <= Mesh::kMaxAxes, kValue,
                      "Mesh: expected at most ", Mesh::kMaxAxes, " axes, got ", axes.size());
  std::set<std::string> names;
  int64_t product = 1;
  for (const Axis& axis : axes) {
    TORCH_OVERLAP_CHECK(is_name(axis.name), kValue,
                        "Mesh: expected an axis name of letters, digits and _, got '", axis.name,
                        "'");
    TORCH_OVERLAP_CHECK(names.insert(axis.name).second, kValue,
                        "Mesh: expected every axis name once, got '", axis.name, "' twice");
    TORCH_OVERLAP_CHECK(axis.size >= 1, kValue, "Mesh: expected a size of at least 1 for axis '",
                        axis.name, "', got ", axis.size);
    TORCH_OVERLAP_CHECK(axis.size <= kMaxRanks / product, kValue, "Mesh: expected at most ",
                        kMaxRanks, " ranks, got more from the sizes of its axes");
    product *= axis.size;
  }
  return product;
}

}  // namespace

Mesh::Mesh(std::vector<Axis> axes, std::vector<int64_t> ranks, int64_t ranks_per_host) {
  const int64_t size = check_axes(axes);
  TORCH_OVERLAP_CHECK(ranks_per_host >= 0, kValue,
                      "Mesh: expected ranks_per_host of at least 0, got ", ranks_per_host);
  if (ranks.empty()) {
    ranks.resize(static_cast<size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  TORCH_OVERLAP_CHECK(static_cast<int64_t>(ranks.size()) == size, kValue, "Mesh: expected ", size,
                      " ranks, the product of the axes, got ", ranks.size());
  auto data = std::make_shared<Data>();
  int64_t highest = 0;
  for (const int64_t rank : ranks) {
    TORCH_OVERLAP_CHECK(rank >= 0 && rank < kMaxRanks, kValue, "Mesh: expected ranks from 0 to ",
                        kMaxRanks - 1, ", got ", rank);
    highest = std::max(highest, rank);
  }
  data->index_by_rank.assign(static_cast<size_t>(highest) + 1, -1);
  for (size_t i = 0; i < ranks.size(); ++i) {
    int64_t& index = data->index_by_rank[static_cast<size_t>(ranks[i])];
    TORCH_OVERLAP_CHECK(index < 0, kValue, "Mesh: expected every rank once, got ", ranks[i],
                        " twice");
    index = static_cast<int64_t>(i);
  }
  data->strides.resize(axes.size());
  int64_t stride = 1;
  for (size_t i = axes.size(); i-- > 0;) {
    data->strides[i] = stride;
    stride *= axes[i].size;
  }
  for (const Axis& axis : axes) {
    data->hash =
        data->hash * 1000003 + std::hash<std::string>()(axis.name) + static_cast<size_t>(axis.size);
  }
  data->axes = std::move(axes);
  data->ranks = std::move(ranks);
  data->ranks_per_host = ranks_per_host;
  data_ = std::move(data);
}

Mesh Mesh::parse(std::string_view text, int64_t ranks_per_host) {
  std::vector<Axis> axes;
  for (const std::string& part : split_string(text, ',')) {
    const size_t equals = part.find('=');
    TORCH_OVERLAP_CHECK(equals != std::string::npos, kValue,
                        "Mesh: expected sizes by name as in dp=2,tp=4, got '", text, "'");
    const std::string name(trim_spaces(std::string_view(part).substr(0, equals)));
    axes.push_back({name, parse_int(trim_spaces(std::string_view(part).substr(equals + 1)),
                                    concat("Mesh: axis '", name, "'"))});
  }
  return Mesh(std::move(axes), {}, ranks_per_host);
}

AxisRef Mesh::axis(std::string_view text) const {
  const std::string_view full = trim_spaces(text);
  const size_t colon = full.find(':');
  const std::string_view name = trim_spaces(full.substr(0, colon));
  for (size_t i = 0; i < axes().size(); ++i) {
    if (axes()[i].name != name) continue;
    AxisRef ref{static_cast<int32_t>(i), 1, static_cast<int32_t>(axes()[i].size)};
    if (colon != std::string_view::npos) {
      const std::string_view part = full.substr(colon + 1);
      const size_t close = part.find(')');
      TORCH_OVERLAP_CHECK(part.size() > 2 && part[0] == '(' && close != std::string_view::npos,
                          kValue, str(), ": expected a part of an axis as in x:(2)4, got '", full,
                          "'");
      const auto pre = parse_int(part.substr(1, close - 1), full);
      const auto size = parse_int(part.substr(close + 1), full);
      constexpr int64_t kMaxPart = std::numeric_limits<int32_t>::max();
      TORCH_OVERLAP_CHECK(pre >= 1 && pre < kMaxPart && size >= 1 && size < kMaxPart, kValue, str(),
                          ": expected a part of an axis as in x:(2)4, got '", full, "'");
      ref.pre = static_cast<int32_t>(pre);
      ref.size = static_cast<int32_t>(size);
      check(ref);
    }
    return ref;
  }
  std::vector<std::string> names;
  for (const Axis& axis : axes()) names.push_back(axis.name);
  fail(ErrorKind::kValue, str(), ": expected one of the axes ", list_string(names), ", got '", name,
       "'");
}

AxisList Mesh::axis_list(const std::vector<std::string>& names) const {
  AxisList out;
  for (const std::string& name : names) out.push_back(axis(name));
  return out;
}

bool Mesh::is_whole(const AxisRef& ref) const noexcept {
  return ref.pre == 1 && ref.size == axes()[static_cast<size_t>(ref.axis)].size;
}

std::string Mesh::name(const AxisRef& ref) const {
  const std::string& name = axes()[static_cast<size_t>(ref.axis)].name;
  return is_whole(ref) ? name : concat(name, ":(", ref.pre, ")", ref.size);
}

std::string Mesh::names(const AxisList& axes) const {
  std::string out;
  for (const AxisRef& ref : axes) out += concat(out.empty() ? "" : ",", name(ref));
  return out;
}

void Mesh::check(const AxisRef& ref) const {
  TORCH_OVERLAP_CHECK(ref.axis >= 0 && ref.axis < static_cast<int32_t>(axes().size()), kValue,
                      str(), ": expected an axis from 0 to ", axes().size(), ", got ", ref.axis);
  const Axis& axis = axes()[static_cast<size_t>(ref.axis)];
  const bool fits = ref.pre >= 1 && ref.size >= 1 && axis.size % (int64_t{ref.pre} * ref.size) == 0;
  TORCH_OVERLAP_CHECK(fits, kValue, str(), ": expected a part of axis '", axis.name,
                      "' whose (pre) times size divides ", axis.size, ", got (", ref.pre, ")",
                      ref.size);
}

int64_t Mesh::index_of(int64_t rank) const {
  const auto& index = data_->index_by_rank;
  const bool known = rank >= 0 && rank < static_cast<int64_t>(index.size()) &&
                     index[static_cast<size_t>(rank)] >= 0;
  TORCH_OVERLAP_CHECK(known, kValue, str(), ": expected a rank of the mesh, got ", rank);
  return index[static_cast<size_t>(rank)];
}

int64_t Mesh::coordinate_at(int64_t index, const AxisRef& ref) const noexcept {
  const auto axis = static_cast<size_t>(ref.axis);
  const int64_t size = data_->axes[axis].size;
  const int64_t whole = index / data_->strides[axis] % size;
  const int64_t post = size / (int64_t{ref.pre} * ref.size);
  return whole / post % ref.size;
}

std::vector<int64_t> Mesh::group_at(int64_t index, const AxisList& axes) const {
  // Start with the member whose coordinate is 0 on every axis, then enumerate the others, last axis
  // fastest.
  int64_t base = index;
  std::vector<int64_t> steps;
  for (const AxisRef& ref : axes) {
    const auto axis = static_cast<size_t>(ref.axis);
    const int64_t post = data_->axes[axis].size / (int64_t{ref.pre} * ref.size);
    steps.push_back(data_->strides[axis] * post);
    base -= coordinate_at(index, ref) * steps.back();
  }
  std::vector<int64_t> out{base};
  for (size_t i = 0; i < axes.size(); ++i) {
    std::vector<int64_t> next;
    next.reserve(out.size() * static_cast<size_t>(axes[i].size));
    for (const int64_t member : out) {
      for (int64_t c = 0; c < axes[i].size; ++c) next.push_back(member + c * steps[i]);
    }
    out = std::move(next);
  }
  return out;
}

std::vector<int64_t> Mesh::group(int64_t rank, const AxisList& axes) const {
  std::vector<int64_t> out = group_at(index_of(rank), axes);
  for (int64_t& member : out) member = ranks()[static_cast<size_t>(member)];
  return out;
}

std::vector<LinkLevel> Mesh::links(const AxisList& axes) const {
  std::vector<LinkLevel> levels;
  const auto add = [&](const std::string& link, int64_t size) {
    if (size <= 1) return;
    for (LinkLevel& level : levels) {
      if (level.link == link) {
        level.size *= size;
        return;
      }
    }
    levels.push_back({link, size});
  };
  AxisList unnamed;
  for (const AxisRef& ref : axes) {
    const std::string& link = this->axes()[static_cast<size_t>(ref.axis)].link;
    if (link.empty()) unnamed.push_back(ref);
  }
  if (!unnamed.empty()) {
    const int64_t size = size_of(unnamed);
    int64_t hosts = 1;
    if (data_->ranks_per_host > 0) {
      std::unordered_map<int64_t, int64_t> by_host;
      for (const int64_t member : group_at(0, unnamed)) {
        ++by_host[ranks()[static_cast<size_t>(member)] / data_->ranks_per_host];
      }
      hosts = static_cast<int64_t>(by_host.size());
    }
    add(kNvlink, (size + hosts - 1) / hosts);
    add(kNetwork, hosts);
  }
  for (const AxisRef& ref : axes) {
    const std::string& link = this->axes()[static_cast<size_t>(ref.axis)].link;
    if (!link.empty()) add(link, ref.size);
  }
  return levels;
}

std::string Mesh::str() const {
  std::string out = "Mesh(";
  for (const Axis& axis : axes()) {
    if (out.back() != '(') out += ", ";
    out += concat(axis.name, "=", axis.size);
  }
  return out + ")";
}

bool operator==(const Mesh& a, const Mesh& b) {
  if (a.data_ == b.data_) return true;
  return a.data_->hash == b.data_->hash && a.axes() == b.axes() && a.ranks() == b.ranks() &&
         a.ranks_per_host() == b.ranks_per_host();
}

int64_t size_of(const AxisList& axes) noexcept {
  int64_t product = 1;
  for (const AxisRef& ref : axes) product *= ref.size;
  return product;
}

AxisList merged(const AxisList& axes) {
  AxisList out;
  for (const AxisRef& ref : axes) {
    if (!out.empty() && out.back().axis == ref.axis &&
        out.back().pre * out.back().size == ref.pre) {
      out.back().size *= ref.size;
    } else {
      out.push_back(ref);
    }
  }
  return out;
}

bool overlap(const AxisRef& a, const AxisRef& b) noexcept {
  if (a.axis != b.axis) return false;
  if (a == b) return true;  // equal parts of size 1, too
  const AxisRef& first = a.pre <= b.pre ? a : b;
  const AxisRef& second = a.pre <= b.pre ? b : a;
  return second.pre % (int64_t{first.pre} * first.size) != 0;
}

}  // namespace torch_overlap::mesh
