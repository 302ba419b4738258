#include "torch_overlap/base/emitter.h"

#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <utility>

namespace torch_overlap {
namespace {

// Returns the code point that begins at `at`, and its length in bytes; '?' and one byte if it is
// bad.
std::pair<uint32_t, size_t> decode(std::string_view text, size_t at) {
  constexpr std::pair<uint32_t, size_t> kBad{'?', 1};
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(at);
  if (first < 0x80) return {first, 1};
  const size_t length = first >= 0xF0 ? 4 : (first >= 0xE0 ? 3 : 2);
  if (first < 0xC2 || first > 0xF4 || at + length > text.size()) return kBad;
  uint32_t point = first & (0x7FU >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xC0) != 0x80) return kBad;
    point = (point << 6) | (byte(at + i) & 0x3F);
  }
  constexpr std::array<uint32_t, 5> kMinCodePoint{0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = point >= 0xD800 && point <= 0xDFFF;
  if (point < kMinCodePoint[length] || point > 0x10FFFF || is_surrogate) return kBad;
  return {point, length};
}

class JsonEmitter final : public Emitter {
 public:
  void begin_dict() override { open('{'); }
  void end_dict() override { close('}'); }
  void begin_list() override { open('['); }
  void end_list() override { close(']'); }

  void key(std::string_view name) override {
    text(name);
    out_ += ": ";
    is_first_ = true;  // no comma before the value
  }

  void null() override { add("null"); }
  void boolean(bool value) override { add(value ? "true" : "false"); }
  void integer(int64_t value) override { add(std::to_string(value)); }

  void number(double value) override {
    if (!std::isfinite(value)) return null();  // JSON has no such numbers
    std::array<char, 32> digits{};
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
    add(std::string_view(digits.data(), end - digits.data()));
  }

  void text(std::string_view value) override {
    add("\"");
    for (size_t at = 0; at < value.size();) {
      const auto [point, length] = decode(value, at);
      add_character(point);
      at += length;
    }
    out_ += '"';
  }

  std::string take() override {
    is_first_ = true;
    return std::exchange(out_, {});
  }

 private:
  void separate() {
    if (!is_first_) out_ += ", ";
    is_first_ = false;
  }
  void add(std::string_view word) {
    separate();
    out_ += word;
  }
  void open(char bracket) {
    separate();
    out_ += bracket;
    is_first_ = true;
  }
  void close(char bracket) {
    out_ += bracket;
    is_first_ = false;
  }

  void add_character(uint32_t point) {
    if (point == '"' || point == '\\') {
      out_ += '\\';
      out_ += static_cast<char>(point);
    } else if (point >= 0x20 && point < 0x7F) {
      out_ += static_cast<char>(point);
    } else if (point < 0x10000) {
      add_escape(point);
    } else {  // surrogate pair
      add_escape(0xD800 + ((point - 0x10000) >> 10));
      add_escape(0xDC00 + ((point - 0x10000) & 0x3FF));
    }
  }

  void add_escape(uint32_t unit) {
    out_ += "\\u";
    for (int shift = 12; shift >= 0; shift -= 4) out_ += "0123456789abcdef"[(unit >> shift) & 0xF];
  }

  std::string out_;
  bool is_first_ = true;
};

// Opcodes of Python's Lib/pickletools.py. Lists and dicts are built from a mark, so that their
// elements need not be counted in advance.
class PickleEmitter final : public Emitter {
 public:
  void begin_dict() override { out_ += '('; }
  void end_dict() override { out_ += 'd'; }
  void begin_list() override { out_ += '('; }
  void end_list() override { out_ += 'l'; }
  void key(std::string_view name) override { text(name); }
  void null() override { out_ += 'N'; }
  void boolean(bool value) override { out_ += value ? '\x88' : '\x89'; }

  void integer(int64_t value) override {
    out_ += "\x8a\x08";  // LONG1 of eight bytes
    add_bytes(static_cast<uint64_t>(value), 8);
  }

  void number(double value) override {
    out_ += 'G';  // big-endian, unlike all other values
    const auto bits = std::bit_cast<uint64_t>(value);
    for (int byte = 7; byte >= 0; --byte) out_ += static_cast<char>(bits >> (8 * byte));
  }

  void text(std::string_view value) override {
    std::string clean;
    for (size_t at = 0; at < value.size();) {
      const auto [point, length] = decode(value, at);
      const bool is_bad = length == 1 && point == '?';
      clean += is_bad ? std::string_view("?") : value.substr(at, length);
      at += length;
    }
    out_ += 'X';
    add_bytes(clean.size(), 4);
    out_ += clean;
  }

  std::string take() override {
    std::string all = "\x80\x02" + std::exchange(out_, {}) + '.';
    return all;
  }

 private:
  void add_bytes(uint64_t value, int count) {
    for (int byte = 0; byte < count; ++byte) out_ += static_cast<char>(value >> (8 * byte));
  }

  std::string out_;
};

}  // namespace

std::unique_ptr<Emitter> make_json_emitter() { return std::make_unique<JsonEmitter>(); }
std::unique_ptr<Emitter> make_pickle_emitter() { return std::make_unique<PickleEmitter>(); }

}  // namespace torch_overlap
