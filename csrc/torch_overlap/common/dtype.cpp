#include <c10/core/ScalarType.h>

#include "torch_overlap/base/strings.h"

namespace torch_overlap {

std::ostream& write_dtype(std::ostream& out, c10::ScalarType dtype) {
  if (dtype == c10::ScalarType::Undefined) return out << "no dtype";
  return out << "torch." << c10::getDtypeNames(dtype).first;
}

}  // namespace torch_overlap
