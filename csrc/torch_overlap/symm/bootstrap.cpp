#include "torch_overlap/symm/bootstrap.h"

#include <c10/util/Exception.h>

namespace torch_overlap {

Fault Fault::current() {
  try {
    throw;
  } catch (const Error& error) {
    return {error.kind(), error.what()};
  } catch (const c10::Error& error) {
    return {ErrorKind::kRuntime, error.what_without_backtrace()};
  } catch (const std::exception& error) {
    return {ErrorKind::kRuntime, error.what()};
  } catch (...) {
    return {ErrorKind::kRuntime, "unknown error"};
  }
}

Fault Fault::of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (...) {
    return current();
  }
}

std::vector<std::string> all_gather_or_throw(Bootstrap& bootstrap, const std::string& payload,
                                             const Fault& mine) {
  std::vector<std::string> all;
  try {
    all = bootstrap.all_gather(payload);
  } catch (const std::exception&) {  // callbacks may throw any exception
    if (!mine) throw;
  }
  if (mine) throw Error(mine.kind, mine.text);
  return all;
}

void throw_if_any_failed(Bootstrap& bootstrap, std::string_view op, const Fault& mine) {
  const std::string payload =
      mine ? concat(static_cast<int>(mine.kind_for_peers()), ' ', mine.text) : "";
  const auto all = all_gather_or_throw(bootstrap, payload, mine);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) continue;
    const size_t space = all[rank].find(' ');
    const auto kind = parse_int(all[rank].substr(0, space), "the kind of another rank's error");
    throw Error(static_cast<ErrorKind>(kind),
                concat(op, ": rank ", rank, " could not take part: ", all[rank].substr(space + 1)));
  }
}

// "<length>:<bytes>" for each field.
std::string pack(const std::vector<std::string>& fields) {
  std::string message;
  for (const auto& field : fields) message += concat(field.size(), ':', field);
  return message;
}

std::vector<std::string> unpack(const std::string& message) {
  std::vector<std::string> fields;
  for (size_t at = 0; at < message.size();) {
    const size_t colon = message.find(':', at);
    TORCH_OVERLAP_CHECK(colon != std::string::npos, kRuntime,
                        "expected a message of fields from another rank, got ", message.size(),
                        " bytes that are none; do all ranks run the same version?");
    const auto length = parse_int(message.substr(at, colon - at), "the length of a field");
    TORCH_OVERLAP_CHECK(length >= 0 && colon + 1 + length <= message.size(), kRuntime,
                        "expected a field of ", length, " bytes from another rank, got ",
                        message.size() - colon - 1, "; do all ranks run the same version?");
    fields.push_back(message.substr(colon + 1, length));
    at = colon + 1 + length;
  }
  return fields;
}

}  // namespace torch_overlap
