#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Writes nested dicts and lists as text that another program reads. The caller closes what it
// opens; within a dict every value follows its key. Text that is not UTF-8 is repaired: each bad
// byte becomes '?'. Threads: one at a time.
class TORCH_OVERLAP_API Emitter {
 public:
  virtual ~Emitter() = default;

  virtual void begin_dict() = 0;
  virtual void end_dict() = 0;
  virtual void begin_list() = 0;
  virtual void end_list() = 0;
  virtual void key(std::string_view name) = 0;
  virtual void null() = 0;
  virtual void boolean(bool value) = 0;
  virtual void integer(int64_t value) = 0;
  virtual void number(double value) = 0;
  virtual void text(std::string_view value) = 0;
  // Returns everything written so far. The emitter is empty afterwards.
  virtual std::string take() = 0;

  // Write what `body` writes, as a dict, and the elements of a range, each by `write`, as a list.
  template <typename Body>
  void dict(const Body& body) {
    begin_dict();
    body();
    end_dict();
  }
  template <typename Range, typename Write>
  void list(const Range& range, const Write& write) {
    begin_list();
    for (const auto& element : range) write(element);
    end_list();
  }

  // Writes a key and its value. The overload for numbers is a template: a pointer must not become a
  // bool.
  void field(std::string_view name, std::string_view value) { key(name), text(value); }
  void field(std::string_view name, const char* value) { key(name), text(value); }
  template <typename Value>
    requires std::is_arithmetic_v<Value>
  void field(std::string_view name, Value value) {
    key(name);
    if constexpr (std::is_same_v<Value, bool>) {
      boolean(value);
    } else if constexpr (std::is_floating_point_v<Value>) {
      number(value);
    } else {
      integer(static_cast<int64_t>(value));
    }
  }
};

// JSON on one line, ASCII only.
TORCH_OVERLAP_API std::unique_ptr<Emitter> make_json_emitter();
// Python's pickle, protocol 2: dicts, lists, str, int, float, bool and None.
TORCH_OVERLAP_API std::unique_ptr<Emitter> make_pickle_emitter();

}  // namespace torch_overlap
