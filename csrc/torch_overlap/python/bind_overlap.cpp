#include <pybind11/native_enum.h>
#include <pybind11/stl.h>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/ops/choose.h"
#include "torch_overlap/ops/exchange.h"
#include "torch_overlap/ops/scaled.h"
#include "torch_overlap/ops/summed_product.h"
#include "torch_overlap/ops/tuning.h"
#include "torch_overlap/overlap/channel.h"
#include "torch_overlap/overlap/comm_overlap.h"
#include "torch_overlap/overlap/cpu/host_lanes.h"
#include "torch_overlap/overlap/registry.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"
#include "torch_overlap/symm/pretend_unreachable.h"

namespace torch_overlap::python {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor or_none(const OptionalTensor& tensor) { return tensor.value_or(Tensor()); }

// The operands in the order of Transformer Engine: A is the weight, B the activations, and D = B A
// as rows lie in torch.
struct Product {
  Tensor A;
  bool transa;
  OptionalTensor B;
  bool transb;
  OptionalTensor D;
  OptionalTensor bias;
  OptionalTensor pre_gelu_out;
  OptionalTensor workspace;
  bool grad;
  bool accumulate;
  bool use_split_accumulator;
  int64_t scaling_mode;
  OptionalTensor A_scale_inv;
  OptionalTensor B_scale_inv;
  OptionalTensor A_columnwise_data;
  OptionalTensor A_columnwise_scale_inv;
  OptionalTensor B_columnwise_data;
  OptionalTensor B_columnwise_scale_inv;
  bool A_scales_swizzled;
  bool B_scales_swizzled;
  OptionalTensor D_scale;
  OptionalTensor D_amax;

  GemmArgs args(std::string_view op) const {
    const ScalingMode mode = torch_overlap::scaling_mode(op, scaling_mode);
    GemmArgs made;
    // Two operands of 128 x 128 are not multiplied: the mode is that of the weights.
    made.lhs = {
        .data = or_none(B),
        .transposed = transb,
        .scaling = mode == ScalingMode::BLOCK_2D_SCALING ? ScalingMode::BLOCK_1D_SCALING : mode,
        .scale_inv = or_none(B_scale_inv),
        .swizzled = B_scales_swizzled,
        .columnwise_data = or_none(B_columnwise_data),
        .columnwise_scale_inv = or_none(B_columnwise_scale_inv)};
    made.rhs = {.data = A,
                .transposed = transa,
                .scaling = mode,
                .scale_inv = or_none(A_scale_inv),
                .swizzled = A_scales_swizzled,
                .columnwise_data = or_none(A_columnwise_data),
                .columnwise_scale_inv = or_none(A_columnwise_scale_inv)};
    made.out = or_none(D);
    if (grad) {
      made.epilogue.bias_grad = or_none(bias);
      made.epilogue.gelu_input = or_none(pre_gelu_out);
    } else {
      made.epilogue.bias = or_none(bias);
      made.epilogue.gelu = pre_gelu_out.has_value();
      made.epilogue.pre_gelu_out = or_none(pre_gelu_out);
    }
    made.accumulate = accumulate;
    made.use_split_accumulator = use_split_accumulator;
    made.out_scale = or_none(D_scale);
    made.out_amax = or_none(D_amax);
    made.workspace = or_none(workspace);
    return made;
  }
};

// Defines a method that takes a product, then one more argument of its own.
template <typename Class, typename Run, typename... Extra>
void def_product(Class& cls, const char* name, const Run& run, const char* doc,
                 const Extra&... extra) {
  cls.def(
      name,
      [run](CommOverlapCore& self, const Tensor& A, bool transa, const OptionalTensor& B,
            bool transb, const OptionalTensor& D, const OptionalTensor& bias,
            const OptionalTensor& pre_gelu_out, const OptionalTensor& workspace, bool grad,
            bool accumulate, bool use_split_accumulator, const OptionalTensor& output,
            int64_t scaling_mode, const OptionalTensor& A_scale_inv,
            const OptionalTensor& B_scale_inv, const OptionalTensor& A_columnwise_data,
            const OptionalTensor& A_columnwise_scale_inv, const OptionalTensor& B_columnwise_data,
            const OptionalTensor& B_columnwise_scale_inv, bool A_scales_swizzled,
            bool B_scales_swizzled, const OptionalTensor& D_scale, const OptionalTensor& D_amax,
            CommOverlapType comm_type) {
        const Product product{A,
                              transa,
                              B,
                              transb,
                              D,
                              bias,
                              pre_gelu_out,
                              workspace,
                              grad,
                              accumulate,
                              use_split_accumulator,
                              scaling_mode,
                              A_scale_inv,
                              B_scale_inv,
                              A_columnwise_data,
                              A_columnwise_scale_inv,
                              B_columnwise_data,
                              B_columnwise_scale_inv,
                              A_scales_swizzled,
                              B_scales_swizzled,
                              D_scale,
                              D_amax};
        const py::gil_scoped_release no_gil;
        run(self, product, or_none(output), comm_type);
      },
      py::arg("A"), py::arg("transa"), py::arg("B"), py::arg("transb"), py::arg("D"),
      py::arg("bias") = py::none(), py::arg("pre_gelu_out") = py::none(),
      py::arg("workspace") = py::none(), py::arg("grad") = false, py::arg("accumulate") = false,
      py::arg("use_split_accumulator") = false, extra..., py::kw_only(),
      py::arg("scaling_mode") = 0, py::arg("A_scale_inv") = py::none(),
      py::arg("B_scale_inv") = py::none(), py::arg("A_columnwise_data") = py::none(),
      py::arg("A_columnwise_scale_inv") = py::none(), py::arg("B_columnwise_data") = py::none(),
      py::arg("B_columnwise_scale_inv") = py::none(), py::arg("A_scales_swizzled") = false,
      py::arg("B_scales_swizzled") = false, py::arg("D_scale") = py::none(),
      py::arg("D_amax") = py::none(), py::arg("comm_type") = CommOverlapType::NONE, doc);
}

// What makes a group of Python callables, which may be dropped on any thread.
std::shared_ptr<OverlapGroup> group_of_callbacks(const py::object& all_gather,
                                                 const py::object& barrier, int rank, int size,
                                                 const py::object& device, std::string name,
                                                 const py::object& timeout) {
  TORCH_OVERLAP_CHECK(PyCallable_Check(all_gather.ptr()) && PyCallable_Check(barrier.ptr()), kType,
                      "OverlapGroup: expected two callables, all_gather and barrier");
  const auto gather = share(all_gather);
  const auto meet = share(barrier);
  OverlapGroup::Callbacks callbacks{.all_gather =
                                        [gather](const std::string& mine) {
                                          const py::gil_scoped_acquire gil;
                                          const py::object all = borrow(gather)(py::bytes(mine));
                                          return all.cast<std::vector<std::string>>();
                                        },
                                    .barrier =
                                        [meet] {
                                          const py::gil_scoped_acquire gil;
                                          borrow(meet)();
                                        }};
  const auto limit = to_timeout("OverlapGroup", timeout);
  return OverlapGroup::of(std::move(callbacks), rank, size, device.cast<at::Device>(),
                          std::move(name), limit.value_or(std::chrono::seconds(600)));
}

void register_enums(py::module_& m) {
  py::native_enum<CommOverlapType>(m, "CommOverlapType", "enum.IntEnum",
                                   "What is hidden behind products: all-gather or reduce-scatter.")
      .value("NONE", CommOverlapType::NONE)
      .value("RS", CommOverlapType::RS)
      .value("AG", CommOverlapType::AG)
      .finalize();
  py::native_enum<CommOverlapMethod>(m, "CommOverlapMethod", "enum.IntEnum",
                                     "How it is hidden: docs/overlap.md.")
      .value("NONE", CommOverlapMethod::NONE)
      .value("BULK", CommOverlapMethod::BULK)
      .value("PIPELINE", CommOverlapMethod::PIPELINE)
      .value("RING_EXCHANGE", CommOverlapMethod::RING_EXCHANGE)
      .finalize();
  py::native_enum<CommOverlapAlgo>(m, "CommOverlapAlgo", "enum.IntEnum",
                                   "A type and a method, as Transformer Engine names them.")
      .value("NO_OVERLAP", CommOverlapAlgo::NO_OVERLAP)
      .value("BULK_OVERLAP_AG", CommOverlapAlgo::BULK_OVERLAP_AG)
      .value("BULK_OVERLAP_RS", CommOverlapAlgo::BULK_OVERLAP_RS)
      .value("SPLIT_PIPELINED_AG_P2P", CommOverlapAlgo::SPLIT_PIPELINED_AG_P2P)
      .value("SPLIT_PIPELINED_RS", CommOverlapAlgo::SPLIT_PIPELINED_RS)
      .value("SPLIT_PIPELINED_RS_P2P", CommOverlapAlgo::SPLIT_PIPELINED_RS_P2P)
      .value("ATOMIC_GEMM_RS", CommOverlapAlgo::ATOMIC_GEMM_RS)
      .value("ATOMIC_GEMM_AG_P2P", CommOverlapAlgo::ATOMIC_GEMM_AG_P2P)
      .value("ATOMIC_GEMM_RS_P2P", CommOverlapAlgo::ATOMIC_GEMM_RS_P2P)
      .value("EXTERNAL_BULK_OVERLAP_AG", CommOverlapAlgo::EXTERNAL_BULK_OVERLAP_AG)
      .finalize();
}

void register_config(py::module_& m) {
  py::class_<CommOverlapConfig>(m, "CommOverlapConfig",
                                "All that two buffers have in common if they are the same.")
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
      .def_readonly("comm_type", &CommOverlapConfig::comm_type)
      .def_readonly("method", &CommOverlapConfig::method)
      .def_readonly("buffer_shape", &CommOverlapConfig::buffer_shape)
      .def_readonly("buffer_dtype", &CommOverlapConfig::buffer_dtype)
      .def_readonly("tp_size", &CommOverlapConfig::tp_size)
      .def_readonly("num_splits", &CommOverlapConfig::num_splits)
      .def_readonly("num_max_streams", &CommOverlapConfig::num_max_streams)
      .def_readonly("comm_cga_size", &CommOverlapConfig::comm_cga_size)
      .def_readonly("gemm_priority", &CommOverlapConfig::gemm_priority)
      .def_readonly("comm_priority", &CommOverlapConfig::comm_priority)
      .def_readonly("num_comm_sm", &CommOverlapConfig::num_comm_sm)
      .def_readonly("set_sm_margin", &CommOverlapConfig::set_sm_margin)
      .def_readonly("use_ce", &CommOverlapConfig::use_ce)
      .def_readonly("atomic_gemm", &CommOverlapConfig::atomic_gemm)
      .def_readonly("rs_overlap_first_gemm", &CommOverlapConfig::rs_overlap_first_gemm)
      .def_readonly("aggregate_ag", &CommOverlapConfig::aggregate_ag)
      .def_readonly("relay_ag", &CommOverlapConfig::relay_ag)
      .def("__eq__", [](const CommOverlapConfig& a, const CommOverlapConfig& b) { return a == b; })
      .def("__repr__", [](const CommOverlapConfig& config) {
        return concat("<torch_overlap.CommOverlapConfig ", config.text(), ">");
      });
}

template <typename Class>
void register_class(py::module_& m, const char* name, const char* doc) {
  py::class_<Class, CommOverlapCore, std::shared_ptr<Class>>(m, name, doc)
      .def(py::init([](const std::shared_ptr<TorchComm>& comm, const CommOverlapConfig& config) {
             const py::gil_scoped_release no_gil;
             return std::make_shared<Class>(OverlapGroup::of(comm), config);
           }),
           py::arg("comm").none(false), py::arg("config"))
      .def(
          py::init([](const std::shared_ptr<OverlapGroup>& group, const CommOverlapConfig& config) {
            const py::gil_scoped_release no_gil;
            return std::make_shared<Class>(group, config);
          }),
          py::arg("group").none(false), py::arg("config"));
}

}  // namespace

void register_overlap(py::module_& m) {
  register_enums(m);
  register_config(m);
  py::class_<OverlapGroup, std::shared_ptr<OverlapGroup>>(
      m, "OverlapGroup", "The ranks of an outside framework, which lends two callbacks.")
      .def(py::init(&group_of_callbacks), py::arg("all_gather"), py::arg("barrier"),
           py::arg("rank"), py::arg("size"), py::arg("device"), py::arg("name") = "outside",
           py::arg("timeout") = py::none())
      .def("get_rank", &OverlapGroup::rank)
      .def("get_size", &OverlapGroup::size);

  py::class_<CommOverlapCore, std::shared_ptr<CommOverlapCore>> core(
      m, "CommOverlapCore",
      "A buffer that ranks share, and products that are overlapped with moving it.");
  core.def_property_readonly("config", &CommOverlapCore::config)
      .def("get_tp_size", &CommOverlapCore::get_tp_size)
      .def("is_atomic_gemm", &CommOverlapCore::is_atomic_gemm)
      .def("is_p2p_overlap", &CommOverlapCore::is_p2p_overlap)
      .def("is_fp8_ubuf", &CommOverlapCore::is_fp8_ubuf)
      .def("get_ubuf_dptr",
           [](const CommOverlapCore& self) {
             return reinterpret_cast<uintptr_t>(self.get_ubuf_dptr());
           })
      .def("last_path", &CommOverlapCore::last_path)
      .def("check", &CommOverlapCore::check,
           "Raises if a wait for another rank has expired since the last call, in a replay too.")
      .def("set_active_tokens", &CommOverlapCore::set_active_tokens, py::arg("tokens"),
           py::call_guard<py::gil_scoped_release>())
      .def("active_tokens", &CommOverlapCore::active_tokens)
      .def("copy_into_buffer", &CommOverlapCore::copy_into_buffer, py::arg("input"),
           py::arg("local_chunk") = false, py::call_guard<py::gil_scoped_release>())
      .def("get_buffer", &CommOverlapCore::get_buffer, py::arg("local_chunk") = false,
           py::call_guard<py::gil_scoped_release>())
      .def("get_buffer_chunk_by_id", &CommOverlapCore::get_buffer_chunk_by_id, py::arg("chunk_id"),
           py::call_guard<py::gil_scoped_release>())
      .def("set_ubuf_scale_inv", &CommOverlapCore::set_ubuf_scale_inv, py::arg("scale_inv"),
           py::call_guard<py::gil_scoped_release>())
      .def(
          "bulk_overlap_external_ag",
          [](CommOverlapCore& self, const std::shared_ptr<CommOverlapCore>& lender) {
            const py::gil_scoped_release no_gil;
            self.bulk_overlap_external_ag(*lender);
          },
          py::arg("lender").none(false));
  using Core = CommOverlapCore;
  def_product(
      core, "bulk_overlap",
      [](Core& self, const Product& product, const Tensor& output, CommOverlapType type) {
        self.bulk_overlap(product.args("bulk_overlap"), type, output);
      },
      "A product beside the collective `comm_type` of the buffer.",
      py::arg("rs_output") = py::none());
  def_product(
      core, "split_overlap_ag",
      [](Core& self, const Product& product, const Tensor& output, CommOverlapType) {
        self.split_overlap_ag(product.args("split_overlap_ag"), output);
      },
      "A product of the gathered rows.", py::arg("B_copy") = py::none());
  def_product(
      core, "atomic_gemm_overlap_ag",
      [](Core& self, const Product& product, const Tensor& output, CommOverlapType) {
        self.atomic_gemm_overlap_ag(product.args("atomic_gemm_overlap_ag"), output);
      },
      "As split_overlap_ag, for a buffer with atomic_gemm.", py::arg("B_copy") = py::none());
  def_product(
      core, "split_overlap_rs",
      [](Core& self, const Product& product, const Tensor& output, CommOverlapType) {
        self.split_overlap_rs(product.args("split_overlap_rs"), output);
      },
      "The sum of products over ranks, each rank its rows.", py::arg("rs_output") = py::none());
  def_product(
      core, "atomic_gemm_overlap_rs",
      [](Core& self, const Product& product, const Tensor& output, CommOverlapType) {
        self.atomic_gemm_overlap_rs(product.args("atomic_gemm_overlap_rs"), output);
      },
      "As split_overlap_rs, for a buffer with atomic_gemm.", py::arg("rs_output") = py::none());
  register_class<CommOverlapBase>(m, "CommOverlapBase",
                                  "Collectives beside products (BULK, PIPELINE).");
  register_class<CommOverlapP2PBase>(m, "CommOverlapP2PBase",
                                     "Chunks from rank to rank (RING_EXCHANGE).");

  m.def("_create_comm_overlap_buffer", &create_comm_overlap_buffer, py::arg("comm").none(false),
        py::arg("config"), py::call_guard<py::gil_scoped_release>());
  m.def("_destroy_comm_overlap_buffer", &destroy_comm_overlap_buffer,
        py::call_guard<py::gil_scoped_release>());
  m.def("_destroy_all_comm_overlap_buffers", &destroy_all_comm_overlap_buffers,
        py::call_guard<py::gil_scoped_release>());
  m.def("_find_comm_overlap_buffer",
        [](int64_t id) { return find_comm_overlap_buffer("comm_overlap_buffer", id); });
  m.def("_comm_overlap_buffers", [] {
    py::dict entries;
    for (const auto& [id, entry] : comm_overlap_buffers()) {
      entries[py::int_(id)] = py::make_tuple(entry.comm, entry.config, entry.holds);
    }
    return entries;
  });
  m.def(
      "_explain_algorithm",
      [](const std::string& op, const std::string& algorithm,
         const std::shared_ptr<TorchComm>& comm, at::ScalarType dtype,
         const std::tuple<int64_t, int64_t, int64_t>& shape, int64_t chunk_rows,
         int64_t gather_bytes, int64_t scatter_bytes,
         const std::tuple<int64_t, int64_t, int64_t>& local_shape, bool prefers_channels,
         const std::optional<std::tuple<at::ScalarType, at::ScalarType, int64_t, bool>>& scaled) {
        const auto [m, n, k] = shape;
        std::optional<FusedTypes> types;
        if (scaled) {
          types = {.lhs = std::get<0>(*scaled),
                   .rhs = std::get<1>(*scaled),
                   .out = dtype,
                   .scaling = scaling_mode(op, std::get<2>(*scaled)),
                   .use_split_accumulator = std::get<3>(*scaled)};
        }
        const auto choice = ops::explain_algorithm({.op = op,
                                                    .dtype = dtype,
                                                    .m = m,
                                                    .n = n,
                                                    .k = k,
                                                    .chunk_rows = chunk_rows,
                                                    .gather_bytes = gather_bytes,
                                                    .scatter_bytes = scatter_bytes,
                                                    .local_n = std::get<1>(local_shape),
                                                    .local_k = std::get<2>(local_shape),
                                                    .local_m = std::get<0>(local_shape),
                                                    .types = types,
                                                    .prefers_channels = prefers_channels},
                                                   algorithm, comm);
        return std::tuple(std::string(ops::to_string(choice.algorithm)), choice.why,
                          std::string(choice.decided_by));
      },
      py::arg("op"), py::arg("algorithm"), py::arg("comm").none(false), py::arg("dtype"),
      py::arg("shape"), py::arg("chunk_rows"), py::arg("gather_bytes") = 0,
      py::arg("scatter_bytes") = 0,
      py::arg("local_shape") = std::tuple<int64_t, int64_t, int64_t>(0, 0, 0),
      py::arg("prefers_channels") = true, py::arg("scaled") = py::none());
  m.def(
      "_summed_product_problem",
      [](const std::string& op, const std::shared_ptr<TorchComm>& comm, int64_t rows,
         int64_t features, int64_t local_k, at::ScalarType dtype, std::optional<int64_t> scaling) {
        const int64_t unit = scaling ? ops::row_unit(ops::scaled_modes(op, *scaling)) : 1;
        const auto problem =
            ops::summed_product_problem(op, *comm, rows, features, local_k, dtype, unit);
        return py::dict(
            py::arg("dtype") = dtype,
            py::arg("shape") = std::tuple(problem.m, problem.n, problem.k),
            py::arg("chunk_rows") = problem.chunk_rows,
            py::arg("gather_bytes") = problem.gather_bytes,
            py::arg("scatter_bytes") = problem.scatter_bytes,
            py::arg("local_shape") = std::tuple(problem.local_m, problem.local_n, problem.local_k),
            py::arg("prefers_channels") = problem.prefers_channels);
      },
      py::arg("op"), py::arg("comm").none(false), py::arg("rows"), py::arg("features"),
      py::arg("local_k"), py::arg("dtype"), py::arg("scaling_mode") = py::none());
  m.attr("_ROW_PIECES") = ops::kRowPieces;
  m.def("_column_exchange_bytes", &ops::ColumnExchange::channel_bytes, py::arg("bytes"));
  m.def("_algorithms", &ops::algorithm_names);
  m.def("_tuning_key", &ops::tuning_key, py::arg("op"), py::arg("m"), py::arg("n"), py::arg("k"),
        py::arg("dtype"), py::arg("group_size"), py::arg("device"), py::arg("in_graph"));
  m.def(
      "_set_tuning",
      [](const std::string& source, ops::TuningEntries entries) {
        ops::set_tuning(source == "table" ? ops::TuningSource::table : ops::TuningSource::cache,
                        std::move(entries));
      },
      py::arg("source"), py::arg("entries"));
  m.def("_set_interleaving", &set_interleaving);
  py::class_<PretendUnreachable>(m, "_PretendUnreachable").def(py::init<>());
}

}  // namespace torch_overlap::python
