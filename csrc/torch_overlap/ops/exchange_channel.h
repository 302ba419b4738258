#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string_view>
#include <vector>

#include "torch_overlap/ops/exchange.h"

// Exchanges over the operators' channels: rows are written directly to their place among those of
// other ranks, and columns travel without the communicator's kernels.
namespace torch_overlap::ops {

std::unique_ptr<RowExchange> start_channel_rows(std::string_view op,
                                                const std::shared_ptr<TorchComm>& comm,
                                                const std::vector<at::Tensor>& matrices,
                                                int64_t pieces);
std::unique_ptr<ColumnExchange> start_channel_columns(std::string_view op,
                                                      const std::shared_ptr<TorchComm>& comm,
                                                      const std::vector<at::Tensor>& into);

}  // namespace torch_overlap::ops
