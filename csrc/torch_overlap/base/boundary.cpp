#include "torch_overlap/base/boundary.h"

#include <atomic>

namespace torch_overlap {
namespace {

std::atomic<ExceptionTranslator> exception_translator{nullptr};

}  // namespace

void set_exception_translator(ExceptionTranslator translate) { exception_translator = translate; }

void rethrow_translated(const Error& caught) {
  if (const ExceptionTranslator translate = exception_translator) translate(caught);
  throw;
}

}  // namespace torch_overlap
