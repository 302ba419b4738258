#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <optional>
#include <string>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/options.h"

namespace torch_overlap {

// Arguments of a gloo process group.
struct GlooRequest {
  c10::intrusive_ptr<c10d::Store> store;  // used by this communicator only
  int rank = 0;
  int size = 1;
  Milliseconds timeout{0};
  // Listening address: a host name or address, or a network interface; at most one is set. Taken
  // from the hints `hostname` and `interface`, otherwise from TORCHCOMM_GLOO_HOSTNAME and
  // TORCHCOMM_GLOO_INTERFACE.
  std::optional<std::string> hostname;
  std::optional<std::string> interface;
  bool lazy = false;  // connect at the first message
};

// Creates torch's ProcessGroupGloo. The wheel ships it without its headers, so the Python package
// sets this factory when it is imported. Collective. The factory is called on a background thread
// with no lock held. Setting it again replaces it. Thread-safe.
using GlooFactory = std::function<c10::intrusive_ptr<c10d::Backend>(const GlooRequest&)>;
TORCH_OVERLAP_API void set_gloo_factory(GlooFactory factory);

}  // namespace torch_overlap
