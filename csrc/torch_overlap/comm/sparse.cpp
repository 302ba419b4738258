// all_reduce of sparse COO tensors.

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/torch_comm.h"

namespace torch_overlap {

// Ranks differ in how many elements they hold: gather the counts, then indices and values, and let
// coalescing add what meets. The last gather's work stands for the whole.
WorkPtr TorchComm::all_reduce_sparse(const Tensor& tensor, const ReduceOp& op, bool async_op,
                                     const OpOptions& options) {
  const at::NoGradGuard no_grad;
  TORCH_OVERLAP_CHECK(op.type() == RedOpType::SUM, kValue,
                      "all_reduce: expected SUM for a sparse tensor, got ", op.repr());
  TORCH_OVERLAP_CHECK(tensor.device() == device(), kType, "all_reduce: expected tensor on ",
                      device(), ", got ", tensor.device());
  const Tensor mine = tensor.coalesce();
  const Tensor indices = mine.indices().t().contiguous();  // one row an element
  const Tensor values = mine.values().contiguous();
  const auto index_options = indices.options();

  const Tensor count = at::full({1}, mine._nnz(), index_options);
  const Tensor counts = at::empty({size()}, index_options);
  all_gather_single(counts, count, /*async_op=*/true, options)->wait();
  const Tensor host_counts = counts.cpu();

  Tensors all_indices;
  Tensors all_values;
  for (int r = 0; r < size(); ++r) {
    const int64_t rows = host_counts[r].item<int64_t>();
    all_indices.push_back(at::empty({rows, indices.size(1)}, index_options));
    auto shape = values.sizes().vec();
    shape[0] = rows;
    all_values.push_back(at::empty(shape, values.options()));
  }
  all_gather_v(all_indices, indices, /*async_op=*/true, options)->wait();
  const WorkPtr work = all_gather_v(all_values, values, async_op, options);
  work->wait();

  const Tensor sum =
      at::sparse_coo_tensor(at::cat(all_indices).t(), at::cat(all_values), tensor.sizes())
          .coalesce();
  tensor.copy_(sum);
  return work;
}

}  // namespace torch_overlap
