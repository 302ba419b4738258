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

constexpr const char* kGroupDoc =
    R"(The ranks of an outside framework, which lends two callbacks.

all_gather(bytes) -> list of bytes: everybody's, by rank. barrier(): returns when all ranks have called it. Both are
called by the thread that makes a buffer. device: of the buffers. name: for errors. timeout:
of a wait for another rank, as a timedelta; 600 s by default. Such ranks must reach each other's memory.

Raises InvalidTypeError where the two are not callable or timeout is no timedelta.)";

constexpr const char* kCoreDoc =
    R"(A buffer [tokens, features] that ranks share, and products that are overlapped with moving it.

Rows are shared among the ranks in equal parts, rounded up: the last ranks may have fewer, or none. All ranks make the
same calls in the same order.

Products. D [tokens, out] = op(B) op(A), as rows lie in torch: A is the weight, [out, in] with transa=True and [in, out]
without; B the activations, [tokens, in], or [in, tokens] with transb=True. dtypes and epilogues are those of
torch_overlap.gemm.gemm. grad=False: bias [out] is added; with pre_gelu_out [tokens, out] GELU follows, whose argument
that becomes. grad=True: bias becomes the gradient of a bias, and the product is multiplied with the derivative of GELU
at pre_gelu_out. accumulate=True adds to D. scaling_mode is a ScalingMode, with A_scale_inv and B_scale_inv as
GemmOperand.scale_inv; D_scale and D_amax, one float32 each, are for an 8-bit D. workspace: contiguous memory for the
library; None: a cached one. docs/overlap.md has what each method takes.

Streams (CUDA). A call reads and writes in the order of the current stream, the host does not wait, and it may be
captured in a graph. CPU: a call returns when it is done.

Errors. Arguments are checked before anything is sent, and raise InvalidValueError, InvalidTypeError or
UnsupportedError; the buffer stays as it was. A rank that does not come is an OperationTimeoutError, of this call or the
next; the buffer is of no more use then. After the end of its communicator a buffer raises StateError.)";

constexpr const char* kLastPathDoc =
    R"(Which way the last call went, and why if it is not the fastest: "" before the first.

For example "split_overlap_ag: shared memory, 4 products on 3 streams".)";

constexpr const char* kCopyIntoDoc =
    R"(Copies `input` into the active part of the buffer, or with local_chunk into this rank's rows of it.

input: of the shape of get_buffer(local_chunk), on its device, of its dtype or another one of as many bytes. On the
current stream; the host does not wait. InvalidValueError for the shape, InvalidTypeError for dtype or device.)";

constexpr const char* kGetBufferDoc =
    R"(The active part of the buffer, [active_tokens(), features], or with local_chunk this rank's rows of it.

A view, of the buffer's dtype, which keeps the memory. What is done with it is ordered by its streams, as with any
tensor; what a call left in it stays until this rank's next call.)";

constexpr const char* kScaleInvDoc =
    R"(Sets the factor of an 8-bit buffer: value = data * scale_inv. The same on all ranks.

scale_inv: one float32 on the buffer's device, which is kept, and read when a call is executed. InvalidTypeError for
anything else, and for a buffer that has no 8-bit elements.)";

constexpr const char* kExternalAgDoc =
    R"(Gathers this buffer, on the streams of `lender`, which may be under way with a product of its own.

Before it each rank's rows are in the buffer (copy_into_buffer), after it all rows are, on the current stream.
UnsupportedError unless the method is BULK and the type AG or NONE; InvalidTypeError for a lender on another device.)";

constexpr const char* kBulkDoc =
    R"(A product, which has nothing to do with the buffer, beside the collective `comm_type` (AG or RS) of the buffer.

AG: the rows of all ranks come into the buffer; rs_output is None. RS: the sum over ranks of this rank's rows of the
buffer goes to rs_output [rows of this rank, features], of the buffer's dtype (float32, float16 or bfloat16 for an 8-bit
buffer, which needs one), or without one into these rows of the buffer. D is complete on the current stream, and so is
what the collective made.

InvalidValueError for another comm_type than the buffer's, or a wrong rs_output; UnsupportedError for RING_EXCHANGE;
StateError for RS of an 8-bit buffer before set_ubuf_scale_inv.)";

constexpr const char* kSplitAgDoc =
    R"(D [active tokens, out] = the product of the gathered rows, each multiplied as it comes.

B: this rank's rows [rows, in], contiguous, of the buffer's dtype or one of as many bytes; None: they are in the buffer.
transb is False. B_copy: of the shape of get_buffer(), becomes all rows. B_scale_inv with blocks or rows has a row for
each of this rank's rows, unswizzled; without one an 8-bit buffer's own factor counts.

UnsupportedError unless the method is RING_EXCHANGE and the type AG, and for a transposed B.)";

constexpr const char* kSplitRsDoc =
    R"(rs_output = the sum over ranks of the product op(B) op(A) [active tokens, features], of which each rank gets its rows.

rs_output [rows of this rank, features], contiguous rows, of the buffer's dtype; float32, float16 or bfloat16 for an
8-bit buffer, which needs D_scale and set_ubuf_scale_inv. D is not looked at. bias [features], of rs_output's dtype, is
added once, behind the sum.

InvalidValueError for other sizes; UnsupportedError unless the method is PIPELINE or RING_EXCHANGE and the type RS, and
with accumulate, GELU or a bias gradient, which belong behind the sum.)";

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
  py::class_<OverlapGroup, std::shared_ptr<OverlapGroup>>(m, "OverlapGroup", kGroupDoc)
      .def(py::init(&group_of_callbacks), py::arg("all_gather"), py::arg("barrier"),
           py::arg("rank"), py::arg("size"), py::arg("device"), py::arg("name") = "outside",
           py::arg("timeout") = py::none())
      .def("get_rank", &OverlapGroup::rank, "The rank of this end.")
      .def("get_size", &OverlapGroup::size, "The number of ranks.");

  py::class_<CommOverlapCore, std::shared_ptr<CommOverlapCore>> core(m, "CommOverlapCore",
                                                                     kCoreDoc);
  core.def_property_readonly("config", &CommOverlapCore::config, "What it was made with.")
      .def("get_tp_size", &CommOverlapCore::get_tp_size, "The number of ranks.")
      .def("is_atomic_gemm", &CommOverlapCore::is_atomic_gemm,
           "Whether it has the atomic methods: config.atomic_gemm.")
      .def("is_p2p_overlap", &CommOverlapCore::is_p2p_overlap,
           "Whether chunks go from rank to rank: of a CommOverlapP2PBase.")
      .def("is_fp8_ubuf", &CommOverlapCore::is_fp8_ubuf,
           "Whether the elements of the buffer have 8 bits.")
      .def(
          "get_ubuf_dptr",
          [](const CommOverlapCore& self) {
            return reinterpret_cast<uintptr_t>(self.get_ubuf_dptr());
          },
          "The address of the first byte of the buffer, on its device. It does not keep the "
          "memory.")
      .def("last_path", &CommOverlapCore::last_path, kLastPathDoc)
      .def("check", &CommOverlapCore::check,
           "Raises OperationTimeoutError if a wait for another rank has expired since the last "
           "call, "
           "in a replay too.")
      .def("set_active_tokens", &CommOverlapCore::set_active_tokens, py::arg("tokens"),
           py::call_guard<py::gil_scoped_release>(),
           "How many tokens there are from the next call on; equal on all ranks. InvalidValueError "
           "for more than the buffer has.")
      .def("active_tokens", &CommOverlapCore::active_tokens,
           "How many tokens calls have now; all of the buffer's at first.")
      .def("copy_into_buffer", &CommOverlapCore::copy_into_buffer, py::arg("input"),
           py::arg("local_chunk") = false, py::call_guard<py::gil_scoped_release>(), kCopyIntoDoc)
      .def("get_buffer", &CommOverlapCore::get_buffer, py::arg("local_chunk") = false,
           py::call_guard<py::gil_scoped_release>(), kGetBufferDoc)
      .def("get_buffer_chunk_by_id", &CommOverlapCore::get_buffer_chunk_by_id, py::arg("chunk_id"),
           py::call_guard<py::gil_scoped_release>(),
           "The rows of rank `chunk_id`, [rows of that rank, features]: a view, as get_buffer(). "
           "InvalidValueError for a rank that there is not.")
      .def("set_ubuf_scale_inv", &CommOverlapCore::set_ubuf_scale_inv, py::arg("scale_inv"),
           py::call_guard<py::gil_scoped_release>(), kScaleInvDoc)
      .def(
          "bulk_overlap_external_ag",
          [](CommOverlapCore& self, const std::shared_ptr<CommOverlapCore>& lender) {
            const py::gil_scoped_release no_gil;
            self.bulk_overlap_external_ag(*lender);
          },
          py::arg("lender").none(false), kExternalAgDoc);
  using Core = CommOverlapCore;
  def_product(
      core, "bulk_overlap",
      [](Core& self, const Product& product, const Tensor& output, CommOverlapType type) {
        self.bulk_overlap(product.args("bulk_overlap"), type, output);
      },
      kBulkDoc, py::arg("rs_output") = py::none());
  def_product(
      core, "split_overlap_ag",
      [](Core& self, const Product& product, const Tensor& output, CommOverlapType) {
        self.split_overlap_ag(product.args("split_overlap_ag"), output);
      },
      kSplitAgDoc, py::arg("B_copy") = py::none());
  def_product(
      core, "atomic_gemm_overlap_ag",
      [](Core& self, const Product& product, const Tensor& output, CommOverlapType) {
        self.atomic_gemm_overlap_ag(product.args("atomic_gemm_overlap_ag"), output);
      },
      "split_overlap_ag of a buffer with atomic_gemm: the same arguments, results and errors. "
      "StateError for a buffer without.",
      py::arg("B_copy") = py::none());
  def_product(
      core, "split_overlap_rs",
      [](Core& self, const Product& product, const Tensor& output, CommOverlapType) {
        self.split_overlap_rs(product.args("split_overlap_rs"), output);
      },
      kSplitRsDoc, py::arg("rs_output") = py::none());
  def_product(
      core, "atomic_gemm_overlap_rs",
      [](Core& self, const Product& product, const Tensor& output, CommOverlapType) {
        self.atomic_gemm_overlap_rs(product.args("atomic_gemm_overlap_rs"), output);
      },
      "split_overlap_rs of a buffer with atomic_gemm: the same arguments, results and errors. "
      "StateError for a buffer without.",
      py::arg("rs_output") = py::none());
  register_class<CommOverlapBase>(
      m, "CommOverlapBase",
      "Collectives beside products (BULK), and a reduce-scatter in pieces of the output features "
      "(PIPELINE). Made collectively, over a TorchComm or an OverlapGroup.");
  register_class<CommOverlapP2PBase>(
      m, "CommOverlapP2PBase",
      "Chunks from rank to rank (RING_EXCHANGE): an all-gather before products, a reduce-scatter "
      "behind them. Made collectively, over a TorchComm or an OverlapGroup.");

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
         const std::optional<std::tuple<at::ScalarType, at::ScalarType, int64_t, bool>>& scaled,
         std::optional<int64_t> direct_bytes, bool reduces) {
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
                                                    .direct_bytes = direct_bytes,
                                                    .reduces = reduces,
                                                    .prefers_channels = prefers_channels},
                                                   algorithm, comm);
        return std::tuple(std::string(ops::to_string(choice.algorithm)), choice.why,
                          std::string(choice.decided_by));
      },
      py::arg("op"), py::arg("algorithm"), py::arg("comm").none(false), py::arg("dtype"),
      py::arg("shape"), py::arg("chunk_rows"), py::arg("gather_bytes") = 0,
      py::arg("scatter_bytes") = 0,
      py::arg("local_shape") = std::tuple<int64_t, int64_t, int64_t>(0, 0, 0),
      py::arg("prefers_channels") = true, py::arg("scaled") = py::none(),
      py::arg("direct_bytes") = py::none(), py::arg("reduces") = false);
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
            py::arg("prefers_channels") = problem.prefers_channels,
            py::arg("direct_bytes") = problem.direct_bytes, py::arg("reduces") = problem.reduces);
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
      [](const std::string& source, const ops::TuningEntries& entries) {
        ops::set_tuning(source == "table" ? ops::TuningSource::table : ops::TuningSource::cache,
                        entries);
      },
      py::arg("source"), py::arg("entries"));
  m.def("_set_interleaving", &set_interleaving);
  py::class_<PretendUnreachable>(m, "_PretendUnreachable").def(py::init<>());
}

}  // namespace torch_overlap::python
