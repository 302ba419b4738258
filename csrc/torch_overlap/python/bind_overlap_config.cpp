#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/overlap/config.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"
#include "torch_overlap/python/overlap_algos.h"

namespace torch_overlap::python {
namespace {

constexpr const char* kConfigDoc =
    R"(Configuration of a communication buffer. Immutable; can be compared and pickled.

It must be equal on all ranks. The arguments are the fields. None selects the default of the method;
create_comm_overlap_buffer documents the defaults. Fields are validated when a buffer is created
with the configuration, which raises InvalidValueError, InvalidTypeError or UnsupportedError.)";

// Returns a tuple of all fields.
template <typename Config>
auto fields(Config& c) {
  return std::tie(c.comm_type, c.method, c.buffer_shape, c.buffer_dtype, c.tp_size, c.num_splits,
                  c.num_max_streams, c.comm_cga_size, c.gemm_priority, c.comm_priority,
                  c.num_comm_sm, c.set_sm_margin, c.use_ce, c.atomic_gemm, c.rs_overlap_first_gemm,
                  c.aggregate_ag, c.relay_ag);
}

py::tuple config_state(const CommOverlapConfig& config) {
  return std::apply([](const auto&... values) { return py::make_tuple(values...); },
                    fields(config));
}

CommOverlapConfig config_of_state(const py::tuple& state) {
  CommOverlapConfig config;
  size_t next = 0;
  std::apply(
      [&](auto&... values) {
        ((values = state[next++].template cast<std::decay_t<decltype(values)>>()), ...);
      },
      fields(config));
  return config;
}

void register_enums(py::module_& m) {
  bind_enum<CommOverlapType>(
      m, "CommOverlapType", "enum.IntEnum",
      "Collective that is overlapped with products: all-gather or reduce-scatter.", 3);
  bind_enum<CommOverlapMethod>(
      m, "CommOverlapMethod", "enum.IntEnum",
      "Method of the overlap; docs/explanation/overlap_classes.md describes them.", 4);
  bind_enum<CommOverlapAlgo>(
      m, "CommOverlapAlgo", "enum.IntEnum",
      "Combinations of a type and a method, with Transformer Engine's names.", 10);
}

struct AlgoParts {
  CommOverlapAlgo algo;
  CommOverlapType type;
  CommOverlapMethod method;
  bool is_atomic = false;
};

// In the order of preference: the first is what a buffer for the algorithm is made of.
constexpr std::array<AlgoParts, 9> kAlgoParts{{
    {CommOverlapAlgo::BULK_OVERLAP_AG, CommOverlapType::AG, CommOverlapMethod::BULK},
    {CommOverlapAlgo::BULK_OVERLAP_RS, CommOverlapType::RS, CommOverlapMethod::BULK},
    {CommOverlapAlgo::EXTERNAL_BULK_OVERLAP_AG, CommOverlapType::AG, CommOverlapMethod::BULK},
    {CommOverlapAlgo::SPLIT_PIPELINED_AG_P2P, CommOverlapType::AG,
     CommOverlapMethod::RING_EXCHANGE},
    {CommOverlapAlgo::SPLIT_PIPELINED_RS, CommOverlapType::RS, CommOverlapMethod::PIPELINE},
    {CommOverlapAlgo::SPLIT_PIPELINED_RS_P2P, CommOverlapType::RS,
     CommOverlapMethod::RING_EXCHANGE},
    {CommOverlapAlgo::ATOMIC_GEMM_RS, CommOverlapType::RS, CommOverlapMethod::PIPELINE, true},
    {CommOverlapAlgo::ATOMIC_GEMM_AG_P2P, CommOverlapType::AG, CommOverlapMethod::RING_EXCHANGE,
     true},
    {CommOverlapAlgo::ATOMIC_GEMM_RS_P2P, CommOverlapType::RS, CommOverlapMethod::RING_EXCHANGE,
     true},
}};

CommOverlapConfig config_of_algo(CommOverlapAlgo algo, std::vector<int64_t> buffer_shape,
                                 at::ScalarType buffer_dtype, int tp_size) {
  const auto found = std::find_if(kAlgoParts.begin(), kAlgoParts.end(),
                                  [&](const AlgoParts& one) { return one.algo == algo; });
  TORCH_OVERLAP_CHECK(found != kAlgoParts.end(), kValue,
                      "CommOverlapConfig: expected algo to be one that overlaps, got ",
                      to_string(algo), ". Multiply without a buffer (comm_type NONE).");
  auto config = CommOverlapConfig::defaults(found->type, found->method, tp_size);
  config.buffer_shape = std::move(buffer_shape);
  config.buffer_dtype = buffer_dtype;
  config.atomic_gemm = found->is_atomic;
  return config;
}

void register_config(py::module_& m) {
  py::class_<CommOverlapConfig>(m, "CommOverlapConfig", kConfigDoc)
      .def(py::init([](CommOverlapType comm_type, CommOverlapMethod method,
                       std::vector<int64_t> buffer_shape, at::ScalarType buffer_dtype, int tp_size,
                       std::optional<int> num_splits, std::optional<int> num_max_streams,
                       std::optional<int> comm_cga_size, int gemm_priority, int comm_priority,
                       std::optional<int> num_comm_sm, std::optional<bool> set_sm_margin,
                       std::optional<bool> use_ce, bool atomic_gemm, bool rs_overlap_first_gemm,
                       bool aggregate_ag, bool relay_ag) {
             auto config = CommOverlapConfig::defaults(comm_type, method, tp_size, use_ce);
             config.buffer_shape = std::move(buffer_shape);
             config.buffer_dtype = buffer_dtype;
             config.num_splits = num_splits.value_or(config.num_splits);
             config.num_max_streams = num_max_streams.value_or(config.num_max_streams);
             config.comm_cga_size = comm_cga_size.value_or(config.comm_cga_size);
             config.gemm_priority = gemm_priority;
             config.comm_priority = comm_priority;
             config.num_comm_sm = num_comm_sm.value_or(config.num_comm_sm);
             config.set_sm_margin = set_sm_margin.value_or(config.set_sm_margin);
             config.atomic_gemm = atomic_gemm;
             config.rs_overlap_first_gemm = rs_overlap_first_gemm;
             config.aggregate_ag = aggregate_ag;
             config.relay_ag = relay_ag;
             return config;
           }),
           py::arg("comm_type"), py::arg("method"), py::arg("buffer_shape"),
           py::arg("buffer_dtype"), py::arg("tp_size"), py::kw_only(),
           py::arg("num_splits") = py::none(), py::arg("num_max_streams") = py::none(),
           py::arg("comm_cga_size") = py::none(), py::arg("gemm_priority") = 0,
           py::arg("comm_priority") = 0, py::arg("num_comm_sm") = py::none(),
           py::arg("set_sm_margin") = py::none(), py::arg("use_ce") = py::none(),
           py::arg("atomic_gemm") = false, py::arg("rs_overlap_first_gemm") = false,
           py::arg("aggregate_ag") = false, py::arg("relay_ag") = false)
      .def_readonly("comm_type", &CommOverlapConfig::comm_type,
                    "AG or RS. NONE, for BULK only, supports both.")
      .def_readonly("method", &CommOverlapConfig::method,
                    "Overlap method: BULK, PIPELINE or RING_EXCHANGE.")
      .def_readonly("buffer_shape", &CommOverlapConfig::buffer_shape,
                    "[tokens, features] of all ranks, the maximum of a call.")
      .def_readonly("buffer_dtype", &CommOverlapConfig::buffer_dtype, "dtype of the elements.")
      .def_readonly("tp_size", &CommOverlapConfig::tp_size, "Number of ranks.")
      .def_readonly("num_splits", &CommOverlapConfig::num_splits,
                    "Number of pieces of the output features of a PIPELINE.")
      .def_readonly("num_max_streams", &CommOverlapConfig::num_max_streams,
                    "Maximum number of concurrent products.")
      .def_readonly("comm_cga_size", &CommOverlapConfig::comm_cga_size,
                    "Number of blocks in a cluster of communication kernels.")
      .def_readonly("gemm_priority", &CommOverlapConfig::gemm_priority,
                    "CUDA priority of the products' streams; lower is more urgent.")
      .def_readonly("comm_priority", &CommOverlapConfig::comm_priority,
                    "CUDA priority of the communication streams. If both priorities are 0, "
                    "products have the lowest and communication the highest.")
      .def_readonly("num_comm_sm", &CommOverlapConfig::num_comm_sm,
                    "Number of blocks of communication kernels.")
      .def_readonly("set_sm_margin", &CommOverlapConfig::set_sm_margin,
                    "True if products leave num_comm_sm SMs free.")
      .def_readonly("use_ce", &CommOverlapConfig::use_ce,
                    "True if copy engines move gathered or exchanged data.")
      .def_readonly("atomic_gemm", &CommOverlapConfig::atomic_gemm,
                    "True if the buffer supports atomic_gemm_overlap_ag and _rs.")
      .def_readonly("rs_overlap_first_gemm", &CommOverlapConfig::rs_overlap_first_gemm,
                    "True if a PIPELINE issues a product before the reduction of the previous one.")
      .def_readonly("aggregate_ag", &CommOverlapConfig::aggregate_ag,
                    "True if RING_EXCHANGE of AG computes products of two chunks.")
      .def_readonly("relay_ag", &CommOverlapConfig::relay_ag,
                    "True if RING_EXCHANGE of AG forwards chunks from neighbour to neighbour.")
      .def_property_readonly("algos", &algos_of,
                             "Algorithms of the products of such a buffer, as Transformer Engine "
                             "names them: one, or several for BULK.")
      .def_static(
          "of_algo", &config_of_algo, py::arg("algo"), py::arg("buffer_shape"),
          py::arg("buffer_dtype"), py::arg("tp_size"),
          "Returns the configuration of a buffer for an algorithm, with the defaults of its "
          "method. Raises InvalidValueError for NO_OVERLAP, which has no buffer.")
      .def("__eq__", [](const CommOverlapConfig& a, const CommOverlapConfig& b) { return a == b; })
      .def(py::pickle(&config_state, &config_of_state))
      .def("__repr__", [](const CommOverlapConfig& config) {
        return concat("<torch_overlap.CommOverlapConfig ", config.text(), ">");
      });
}

}  // namespace

std::vector<CommOverlapAlgo> algos_of(const CommOverlapConfig& config) {
  std::vector<CommOverlapAlgo> algos;
  for (const AlgoParts& one : kAlgoParts) {
    const bool is_type = config.comm_type == one.type || config.comm_type == CommOverlapType::NONE;
    if (is_type && config.method == one.method && config.atomic_gemm == one.is_atomic) {
      algos.push_back(one.algo);
    }
  }
  return algos;
}

void register_overlap_config(py::module_& m) {
  register_enums(m);
  register_config(m);
}

}  // namespace torch_overlap::python
