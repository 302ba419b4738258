// Implements all_reduce of sparse COO tensors.

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/hash.h>

#include <algorithm>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/torch_comm.h"

namespace torch_overlap {

// The numbers of elements differ by rank. Gathers what determines the sizes, then indices and
// values, and coalesces, which adds the values of equal indices. The last gather's work represents
// the whole.
WorkPtr TorchComm::all_reduce_sparse(const Tensor& tensor, const ReduceOp& op, bool async_op,
                                     const OpOptions& options) {
  const at::NoGradGuard no_grad;
  TORCH_OVERLAP_CHECK(op.type() == RedOpType::SUM, kValue,
                      "all_reduce: expected SUM for a sparse tensor, got ", op.repr());
  TORCH_OVERLAP_CHECK(tensor.device() == device(), kType, "all_reduce: expected tensor on ",
                      device(), ", got ", tensor.device());
  TORCH_OVERLAP_CHECK(!is_capturing(), kState,
                      "all_reduce: expected a stream that is not capturing for a sparse tensor, "
                      "whose ranks exchange sizes on the host, got one that is");
  const Tensor mine = tensor.coalesce();
  const Tensor indices = mine.indices().t().contiguous();  // one row per element
  const Tensor values = mine.values().contiguous();
  // Everything that determines the sizes of the second round. The shape is sent as a hash: it is
  // equal on all ranks exactly if the shapes are, except for a chance of one in 2^62.
  const auto shape_hash =
      static_cast<int64_t>(c10::get_hash(tensor.sizes().vec()) & ((uint64_t{1} << 62) - 1));
  const std::vector<int64_t> facts{mine._nnz(), tensor.sparse_dim(), shape_hash,
                                   static_cast<int64_t>(tensor.scalar_type())};
  const auto fact_count = static_cast<int64_t>(facts.size());
  const Tensor my_facts = at::tensor(facts, at::kLong).to(device());
  const Tensor everybodys = at::empty({size(), fact_count}, my_facts.options());
  all_gather_single(everybodys, my_facts, /*async_op=*/true, options)->wait();
  const Tensor host_facts = everybodys.cpu();

  Tensors all_indices;
  Tensors all_values;
  for (int r = 0; r < size(); ++r) {
    const auto* theirs = host_facts[r].const_data_ptr<int64_t>();
    TORCH_OVERLAP_CHECK(std::equal(facts.begin() + 1, facts.end(), theirs + 1), kValue,
                        "all_reduce: expected sparse tensors of one shape, dtype and number of "
                        "sparse dimensions on all ranks, got another on rank ",
                        r, " than on rank ", rank(), ", which has sizes ", tensor.sizes());
    all_indices.push_back(at::empty({theirs[0], indices.size(1)}, indices.options()));
    auto shape = values.sizes().vec();
    shape[0] = theirs[0];
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
