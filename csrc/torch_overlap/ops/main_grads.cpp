#include "torch_overlap/ops/main_grads.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/grad_mode.h>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/ops/rows.h"

namespace torch_overlap::ops {

WeightBuffers split_main_grads(std::string_view op, const MainGrads& main_grads,
                               const std::vector<at::Tensor>& weights, const at::Tensor& x) {
  if (!main_grads || main_grads->empty()) return {};
  WeightBuffers found(weights.size());
  size_t next = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const int64_t rows = weights[i].size(0);
    int64_t covered = 0;
    while (next < main_grads->size()) {
      const at::Tensor buffer = main_grads->get(next);
      // A weight without rows has a buffer without rows.
      if (covered == rows && !(found[i].empty() && buffer.numel() == 0)) break;
      TORCH_OVERLAP_CHECK(
          buffer.dim() == 2 && buffer.size(1) == weights[i].size(1) && buffer.is_contiguous() &&
              covered + buffer.size(0) <= rows,
          kValue, op, ": expected main_grads whose rows, in order, are those of the weights, ",
          "contiguous, got main_grads[", next, "] of shape ", buffer.sizes(), ", strides ",
          buffer.strides(), " for rows ", covered, " to ", rows, " of a weight of shape ",
          weights[i].sizes(), ". Pass one buffer for each weight, of its shape.");
      TORCH_OVERLAP_CHECK((buffer.scalar_type() == x.scalar_type() ||
                           (buffer.scalar_type() == at::kFloat && x.element_size() == 2)) &&
                              buffer.device() == x.device() && !buffer.requires_grad(),
                          kType, op, ": expected main_grads of dtype ", x.scalar_type(),
                          x.element_size() == 2 ? " or torch.float32" : "", " on ", x.device(),
                          ", without a gradient, got main_grads[", next, "] of dtype ",
                          buffer.scalar_type(), " on ", buffer.device(),
                          buffer.requires_grad() ? ", which requires a gradient." : ".");
      covered += buffer.size(0);
      found[i].push_back(buffer);
      ++next;
    }
    TORCH_OVERLAP_CHECK(covered == rows, kValue, op, ": expected main_grads with the ", rows,
                        " rows of weight ", i, ", got ", covered,
                        ". Pass one buffer for each weight, of its shape.");
  }
  TORCH_OVERLAP_CHECK(next == main_grads->size(), kValue, op, ": expected ", next,
                      " main_grads for the rows of the weights, got ", main_grads->size(),
                      ". Pass one buffer for each weight, of its shape.");
  return found;
}

void check_may_add(std::string_view op, at::TensorList tensors) {
  TORCH_OVERLAP_CHECK(!at::GradMode::is_enabled(), kUnsupported, op,
                      ": expected a backward pass without create_graph=True where gradients are "
                      "added to main_grads, got one with it. Call without main_grads.");
  TORCH_OVERLAP_CHECK(
      !at::areAnyTensorSubclassLike(tensors), kUnsupported, op,
      ": expected a backward pass of plain tensors where gradients are added to "
      "main_grads, got one that is traced or transformed. Call without main_grads.");
}

std::vector<GemmArgs> products_into(const std::vector<at::Tensor>& buffers,
                                    const at::Tensor& grad_rows, const at::Tensor& inputs) {
  std::vector<GemmArgs> products;
  int64_t begin = 0;
  for (const auto& buffer : buffers) {
    GemmArgs args;
    args.lhs = operand(grad_rows.narrow(1, begin, buffer.size(0)).t());
    args.rhs = {.data = inputs};
    args.out = buffer;
    args.accumulate = true;
    products.push_back(std::move(args));
    begin += buffer.size(0);
    if (!buffer.is_inference()) buffer.unsafeGetTensorImpl()->bump_version();
  }
  return products;
}

}  // namespace torch_overlap::ops
