#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/comm/validate.h"

namespace torch_overlap {

void TorchComm::tensor_register(const Tensor& tensor) {
  require_active("tensor_register");
  checker("tensor_register").tensor(tensor, "tensor");
  const void* begin = tensor.const_data_ptr();
  const auto members = membership();
  const std::lock_guard lock(registered_mutex_);
  if (std::exchange(registered_generation_, members->generation) != members->generation) {
    registered_.clear();  // the backend that had them was destroyed
  }
  TORCH_OVERLAP_CHECK(registered_.count(begin) == 0, kState,
                      "tensor_register: expected memory that is not registered, got a tensor at an "
                      "address that is; call tensor_deregister() first");
  members->backend->register_memory(tensor);
  registered_.emplace(begin, tensor.nbytes());
}

void TorchComm::tensor_deregister(const Tensor& tensor) {
  require_active("tensor_deregister");
  checker("tensor_deregister").tensor(tensor, "tensor");
  const auto members = membership();
  const std::lock_guard lock(registered_mutex_);
  const auto found = registered_.find(tensor.const_data_ptr());
  TORCH_OVERLAP_CHECK(found != registered_.end() && found->second == tensor.nbytes(), kState,
                      "tensor_deregister: expected a tensor that was registered, got one of ",
                      tensor.nbytes(), " bytes that was not; pass the same tensor");
  if (registered_generation_ == members->generation) members->backend->deregister_memory(tensor);
  registered_.erase(found);
}

}  // namespace torch_overlap
