// torchcomms' text format of a CallLog, version 1.
#include <array>
#include <cstdio>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "torch_overlap/base/strings.h"
#include "torch_overlap/comm/call_log_format.h"

namespace torch_overlap {
namespace {

std::string_view dtype_name(c10::ScalarType dtype) {
  static constexpr std::pair<c10::ScalarType, std::string_view> kNames[] = {
      {c10::kFloat, "f32"},
      {c10::kDouble, "f64"},
      {c10::kHalf, "f16"},
      {c10::kBFloat16, "bf16"},
      {c10::kInt, "i32"},
      {c10::kLong, "i64"},
      {c10::kShort, "i16"},
      {c10::kChar, "i8"},
      {c10::kByte, "u8"},
      {c10::kBool, "bool"},
      {c10::kFloat8_e4m3fn, "fp8e4m3"},
      {c10::kFloat8_e5m2, "fp8e5m2"},
  };
  for (const auto& [type, name] : kNames) {
    if (type == dtype) return name;
  }
  return "other";
}

std::string reduction_name(RedOpType op) {
  return op == RedOpType::PRODUCT ? "prod" : to_lower(to_string(op));
}

std::string seconds(int64_t ns) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.3f", static_cast<double>(ns) * 1e-9);
  return text.data();
}

template <typename Values, typename Text>
std::string joined(const Values& values, const Text& text) {
  std::string out;
  for (const auto& value : values) out += concat(out.empty() ? "" : ",", text(value));
  return out;
}

std::string num_elements(const at::Tensor& tensor) {
  return std::to_string(tensor.defined() ? tensor.numel() : 0);
}

std::string address(const at::Tensor& tensor) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%p", tensor.defined() ? tensor.data_ptr() : nullptr);
  return text.data();
}

// Number of slices of dimension 0, in which the sizes of an all_to_all_v_single are given.
std::string rows(const at::Tensor& tensor) {
  return std::to_string(tensor.dim() > 0 ? tensor.size(0) : 0);
}

// One side of a call: a tensor, or a list with one tensor per rank.
struct Side {
  Side(const at::Tensor& tensor) : tensors{tensor} {}
  Side(const RankTensors& blocks)
      : tensors(blocks.parts.empty() ? std::vector{blocks.flat} : blocks.parts),
        is_list(!blocks.parts.empty()) {}
  std::vector<at::Tensor> tensors;
  bool is_list = false;
};

// Fields of a signature, in the order of the format.
class Signature {
 public:
  Signature(const Call& call, bool has_buffers) : call_(call), has_buffers_(has_buffers) {
    text_ = std::string(to_string(call.name));
    add_tensors();
    add("async_op", call.async_op ? "t" : "f");
    text_ += buffers_;
    add("comm", call.comm);
  }
  std::string take() { return std::move(text_); }

 private:
  void add(std::string_view name, std::string_view value) {
    text_ += concat("|", name, "=", value);
  }
  void add_buffers(std::string_view name, const Side& side) {
    if (has_buffers_) buffers_ += concat("|", name, "=", joined(side.tensors, address));
  }
  void add_counts(std::string_view name, const Side& side) {
    const bool is_split = call_.name == OpName::all_to_all_v_single;
    add(concat(name, is_split       ? "_splits"
                     : side.is_list ? "_counts"
                                    : "_count"),
        joined(side.tensors, is_split ? rows : num_elements));
  }
  void add_sides(const Side& input, const Side& output) {
    add_counts("in", input);
    add_counts("out", output);
    const Side& any = input.tensors.front().defined() ? input : output;
    if (any.tensors.front().defined()) {
      add("dtype", dtype_name(any.tensors.front().scalar_type()));
    }
    add_buffers("in", input);
    add_buffers("out", output);
  }
  void add_message() {
    if (call_.name == OpName::batch_op_issue) {
      return add("num_ops", std::to_string(call_.p2p.size()));
    }
    const P2POp& message = call_.p2p.front();
    const bool is_send = message.type == P2POp::Type::SEND;
    add("in_count", is_send ? num_elements(message.tensor) : "0");
    add("out_count", is_send ? "0" : num_elements(message.tensor));
    add("dtype", dtype_name(message.tensor.scalar_type()));
    add("peer", std::to_string(message.peer));
    add_buffers(is_send ? "in" : "out", message.tensor);
  }
  void add_tensors() {
    switch (call_.primitive) {
      case Primitive::p2p:
        return add_message();
      case Primitive::broadcast:
      case Primitive::all_reduce:
      case Primitive::reduce:
        add("in_count", num_elements(call_.tensor));
        add("out_count", num_elements(call_.tensor));
        add("dtype", dtype_name(call_.tensor.scalar_type()));
        add_buffers("buf", call_.tensor);
        break;
      case Primitive::all_gather:
      case Primitive::gather:
        add_sides(call_.tensor, call_.out);
        break;
      case Primitive::reduce_scatter:
      case Primitive::scatter:
        add_sides(call_.in, call_.tensor);
        break;
      case Primitive::all_to_all:
        add_sides(call_.in, call_.out);
        break;
      case Primitive::put:
        add_sides(call_.tensor, at::Tensor());
        break;
      case Primitive::barrier:
      case Primitive::signal:
      case Primitive::wait_signal:
        break;
    }
    if (call_.record->has_reduction()) add("red_op", reduction_name(call_.reduce_op.type()));
    if (call_.root >= 0) add("root", std::to_string(call_.root));
    if (call_.peer >= 0) add("peer", std::to_string(call_.peer));
  }

  const Call& call_;
  const bool has_buffers_;
  std::string text_;
  std::string buffers_;
};

class TextFormatter final : public LogFormatter {
 public:
  std::string opened() override { return concat("V|1|base_timestamp=", seconds(base_ns_), "\n"); }

  std::string attached(const CommRecord& comm, const CommRecord* parent) override {
    if (parent == nullptr) {
      return concat("new_comm|comm=", comm.name, "|rank=", comm.rank,
                    "|world_size=", comm.ranks_in_world.size(), "\n");
    }
    return concat("split|parent=", parent->name, "|child=", comm.name, "|ranks=",
                  joined(comm.ranks_in_world, [](int rank) { return std::to_string(rank); }), "\n");
  }

  // Calls with equal signatures share a number, which is written with the first one.
  std::string queued(const Call& call, bool has_buffers) override {
    if (call.name == OpName::split) return {};
    std::string signature = Signature(call, has_buffers).take();
    const std::lock_guard lock(mutex_);
    const auto [entry, is_new] = numbers_.try_emplace(signature, numbers_.size() + 1);
    const uint64_t number = entry->second;
    calls_[call.record.get()] = number;
    std::string text = is_new ? concat("C", number, "|sig|", signature, "\n") : std::string();
    return text + line(number, concat("Q|work_id=", ++works_), call.record->created_ns);
  }
  std::string started(const CallRecord& record) override {
    const std::lock_guard lock(mutex_);
    const auto call = calls_.find(&record);
    return call == calls_.end() ? "" : line(call->second, "S", record.started_ns().value_or(0));
  }
  std::string ended(const CallRecord& record) override {
    const std::lock_guard lock(mutex_);
    const auto call = calls_.find(&record);
    if (call == calls_.end()) return {};
    const uint64_t number = call->second;
    calls_.erase(call);
    return line(number, "E", record.ended_ns().value_or(0));
  }

 private:
  std::string line(uint64_t number, std::string_view event, int64_t time_ns) const {
    return concat("C", number, "|", event, "|+", seconds(time_ns - base_ns_), "\n");
  }

  const int64_t base_ns_ = now_ns();
  std::mutex mutex_;  // guards all members below
  std::map<std::string, uint64_t> numbers_;
  // Calls that are not known to have ended. One of which no end is reported (in a CUDA graph) is
  // replaced by the next call at its address.
  std::map<const CallRecord*, uint64_t> calls_;
  uint64_t works_ = 0;
};

}  // namespace

std::unique_ptr<LogFormatter> make_text_formatter() { return std::make_unique<TextFormatter>(); }

}  // namespace torch_overlap
