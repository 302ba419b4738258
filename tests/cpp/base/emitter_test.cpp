#include "torch_overlap/base/emitter.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <string>

namespace torch_overlap {
namespace {

void write_sample(Emitter& out) {
  out.begin_dict();
  out.field("text", "a");
  out.field("yes", true);
  out.field("count", -2);
  out.key("list");
  out.begin_list();
  out.integer(1);
  out.null();
  out.begin_list();
  out.end_list();
  out.begin_dict();
  out.end_dict();
  out.number(0.5);
  out.end_list();
  out.end_dict();
}

std::string json_of(std::string_view text) {
  const auto out = make_json_emitter();
  out->text(text);
  return out->take();
}

TEST(JsonEmitter, NestsAndSeparates) {
  const auto out = make_json_emitter();
  write_sample(*out);
  EXPECT_EQ(out->take(),
            R"({"text": "a", "yes": true, "count": -2, "list": [1, null, [], {}, 0.5]})");
  out->integer(7);
  EXPECT_EQ(out->take(), "7");
}

TEST(JsonEmitter, NumbersComeBackAsTheyWere) {
  for (const double value : {0.1, -1e300, 5e-324, 1.0 / 3}) {
    const auto out = make_json_emitter();
    out->number(value);
    EXPECT_EQ(std::strtod(out->take().c_str(), nullptr), value);
  }
  const auto out = make_json_emitter();
  out->number(std::numeric_limits<double>::infinity());
  EXPECT_EQ(out->take(), "null");
  out->integer(std::numeric_limits<int64_t>::min());
  EXPECT_EQ(out->take(), "-9223372036854775808");
}

TEST(JsonEmitter, EscapesEverythingButPlainAscii) {
  EXPECT_EQ(json_of("a\"b\\c\n\x7F"), R"("a\"b\\c\u000a\u007f")");
  EXPECT_EQ(json_of("\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80"), R"("\u00e9 \u20ac \ud83d\ude00")");
}

TEST(JsonEmitter, BytesThatAreNotTextBecomeQuestionMarks) {
  EXPECT_EQ(json_of("a\xFF\x62"), R"("a?b")");
  EXPECT_EQ(json_of("\xC3"), R"("?")");                 // truncated
  EXPECT_EQ(json_of("\xC0\xAF"), R"("??")");            // overlong encoding
  EXPECT_EQ(json_of("\xED\xA0\x80"), R"("???")");       // half of a surrogate pair
  EXPECT_EQ(json_of("\xF4\x90\x80\x80"), R"("????")");  // past the last code point
}

TEST(PickleEmitter, WritesProtocolTwo) {
  const auto out = make_pickle_emitter();
  out->begin_dict();
  out->field("k", "v\xFF");
  out->key("n");
  out->begin_list();
  out->integer(-2);
  out->boolean(false);
  out->null();
  out->end_list();
  out->end_dict();
  using namespace std::string_literals;
  EXPECT_EQ(out->take(), "\x80\x02("s + "X\x01\0\0\0k"s + "X\x02\0\0\0v?"s + "X\x01\0\0\0n"s +
                             "("s + "\x8a\x08\xFE\xFF\xFF\xFF\xFF\xFF\xFF\xFF"s + "\x89N"s + "l"s +
                             "d."s);
}

TEST(PickleEmitter, FloatsAreBigEndian) {
  const auto out = make_pickle_emitter();
  out->number(1.0);
  using namespace std::string_literals;
  EXPECT_EQ(out->take(), "\x80\x02G\x3F\xF0\0\0\0\0\0\0."s);
}

}  // namespace
}  // namespace torch_overlap
