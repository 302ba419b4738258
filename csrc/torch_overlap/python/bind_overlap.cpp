#include <pybind11/stl.h>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/ops/choose.h"
#include "torch_overlap/ops/scaled.h"
#include "torch_overlap/ops/tuning.h"
#include "torch_overlap/overlap/channel.h"
#include "torch_overlap/overlap/comm_overlap.h"
#include "torch_overlap/overlap/cpu/host_streams.h"
#include "torch_overlap/overlap/registry.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"
#include "torch_overlap/python/overlap_algos.h"
#include "torch_overlap/symm/pretend_unreachable.h"

namespace torch_overlap::python {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor or_undefined(const OptionalTensor& tensor) { return tensor.value_or(Tensor()); }

// Defines a method whose arguments are those of a product, in the order of Transformer Engine, and
// then `extra`: A is the weight, B the activations, and D = B A with torch's row-major storage.
template <typename Class, typename Run, typename... Extra>
void def_gemm_method(Class& cls, const char* name, const Run& run, const char* doc,
                     const Extra&... extra) {
  cls.def(
      name,
      [run, name](
          CommOverlapCore& self, const Tensor& A, bool transa, const OptionalTensor& B, bool transb,
          const OptionalTensor& D, const OptionalTensor& bias, const OptionalTensor& pre_gelu_out,
          const OptionalTensor& workspace, bool grad, bool accumulate, bool use_split_accumulator,
          const OptionalTensor& output, int64_t scaling_mode, const OptionalTensor& A_scale_inv,
          const OptionalTensor& B_scale_inv, const OptionalTensor& A_columnwise_data,
          const OptionalTensor& A_columnwise_scale_inv, const OptionalTensor& B_columnwise_data,
          const OptionalTensor& B_columnwise_scale_inv, bool A_scales_swizzled,
          bool B_scales_swizzled, const OptionalTensor& D_scale, const OptionalTensor& D_amax,
          CommOverlapType comm_type) {
        const ScalingMode mode = torch_overlap::scaling_mode(name, scaling_mode);
        GemmArgs product;
        // The mode is that of the weights: two operands with 128 x 128 blocks cannot be multiplied.
        product.lhs = {
            .data = or_undefined(B),
            .transposed = transb,
            .scaling = mode == ScalingMode::BLOCK_2D_SCALING ? ScalingMode::BLOCK_1D_SCALING : mode,
            .scale_inv = or_undefined(B_scale_inv),
            .swizzled = B_scales_swizzled,
            .columnwise_data = or_undefined(B_columnwise_data),
            .columnwise_scale_inv = or_undefined(B_columnwise_scale_inv)};
        product.rhs = {.data = A,
                       .transposed = transa,
                       .scaling = mode,
                       .scale_inv = or_undefined(A_scale_inv),
                       .swizzled = A_scales_swizzled,
                       .columnwise_data = or_undefined(A_columnwise_data),
                       .columnwise_scale_inv = or_undefined(A_columnwise_scale_inv)};
        product.out = or_undefined(D);
        if (grad) {
          product.epilogue.bias_grad = or_undefined(bias);
          product.epilogue.gelu_input = or_undefined(pre_gelu_out);
        } else {
          product.epilogue.bias = or_undefined(bias);
          product.epilogue.gelu = pre_gelu_out.has_value();
          product.epilogue.pre_gelu_out = or_undefined(pre_gelu_out);
        }
        product.accumulate = accumulate;
        product.use_split_accumulator = use_split_accumulator;
        product.out_scale = or_undefined(D_scale);
        product.out_amax = or_undefined(D_amax);
        product.workspace = or_undefined(workspace);
        const py::gil_scoped_release no_gil;
        run(self, product, or_undefined(output), comm_type);
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

// Creates a group from Python callables, which may be released on any thread.
std::shared_ptr<OverlapGroup> make_callback_group(const py::object& all_gather,
                                                  const py::object& barrier, int rank, int size,
                                                  const py::object& device, std::string name,
                                                  const py::object& timeout) {
  TORCH_OVERLAP_CHECK(PyCallable_Check(all_gather.ptr()) && PyCallable_Check(barrier.ptr()), kType,
                      "OverlapGroup: expected two callables, all_gather and barrier");
  const auto gather = share(all_gather);
  const auto barrier_callback = share(barrier);
  OverlapGroup::Callbacks callbacks{.all_gather =
                                        [gather](const std::string& mine) {
                                          const py::gil_scoped_acquire gil;
                                          const py::object all = borrow(gather)(py::bytes(mine));
                                          return all.cast<std::vector<std::string>>();
                                        },
                                    .barrier =
                                        [barrier_callback] {
                                          const py::gil_scoped_acquire gil;
                                          borrow(barrier_callback)();
                                        }};
  const auto limit = to_timeout("OverlapGroup", timeout);
  return OverlapGroup::of(std::move(callbacks), rank, size, device.cast<at::Device>(),
                          std::move(name), limit.value_or(std::chrono::seconds(600)));
}

constexpr const char* kGroupDoc =
    R"(The ranks of another framework, which provides two callbacks.

The ranks must be able to map each other's memory.

Args:
    all_gather: callable that takes this rank's bytes and returns a list of every rank's bytes, by
        rank.
    barrier: callable without arguments that returns after all ranks have called it. The thread that
        creates a buffer calls both.
    rank: rank of this process.
    size: number of ranks.
    device: torch.device of the buffers.
    name: name of the group in error messages.
    timeout: timedelta that bounds a wait for another rank. Default: 600 s.

Raises:
    InvalidTypeError: all_gather or barrier is not callable, or timeout is not a timedelta.
    InvalidValueError: timeout is negative.)";

constexpr const char* kCoreDoc =
    R"(A communication buffer [tokens, features], and products overlapped with communicating it.

The ranks of a group share the buffer. Rows are divided among the ranks into equal parts, rounded
up: the last ranks may have fewer, or none. All ranks must make the same calls in the same order.

Products: D [tokens, out] = op(B) op(A), row-major. The methods that compute one share these
arguments; docs/explanation/overlap_classes.md has the combinations that each method supports.
dtypes and epilogues are those of torch_overlap.gemm.gemm.

Args:
    A: weight; [out, in] with transa=True, otherwise [in, out].
    transa: if True, A is transposed.
    B: activations; [tokens, in], or [in, tokens] with transb=True.
    transb: if True, B is transposed.
    D: output [tokens, out].
    bias: [out], added to the product; with grad=True it receives the gradient of a bias.
    pre_gelu_out: [tokens, out]. With grad=False GELU is applied after the bias, and this receives
        its input. With grad=True the product is multiplied by the derivative of GELU at this input.
    workspace: contiguous memory for the library. None selects a cached one.
    grad: selects the meaning of bias and pre_gelu_out.
    accumulate: if True, adds to the content of D.
    use_split_accumulator: as in torch_overlap.gemm.GemmArgs.
    scaling_mode: a ScalingMode of 8-bit operands.
    A_scale_inv, B_scale_inv: inverse scales, as GemmOperand.scale_inv.
    A_columnwise_data, A_columnwise_scale_inv, B_columnwise_data, B_columnwise_scale_inv: the
        transposed 8-bit operands, as in GemmOperand.
    A_scales_swizzled, B_scales_swizzled: if True, MXFP8 scales are in the swizzled order of the
        tensor cores.
    D_scale, D_amax: one float32 each, for an 8-bit D, as out_scale and out_amax of GemmArgs.
    comm_type: the collective of bulk_overlap, AG or RS. Other methods ignore it.

Streams (CUDA): a call reads and writes in the order of the current stream. The host does not wait.
Calls may be captured in CUDA graphs. CPU: a call returns when it is done.

Raises:
    InvalidValueError, InvalidTypeError, UnsupportedError: an invalid argument. Arguments are
        checked before anything is sent; the buffer is unchanged.
    OperationTimeoutError: another rank did not arrive before the timeout, in this call or an
        earlier one. The buffer is unusable afterwards.
    StateError: the communicator has ended.)";

constexpr const char* kLastPathDoc =
    R"(Returns the path that the last call took, and the reason if it is not the fastest.

Returns "" before the first call. Example: "split_overlap_ag: shared memory, 4 products on 3
streams".)";

constexpr const char* kCopyIntoDoc =
    R"(Copies `input` into the active part of the buffer, or into this rank's rows of it.

Runs on the current stream; the host does not wait.

Args:
    input: tensor of the shape of get_buffer(local_chunk), on its device, of its dtype or another
        one of the same size in bytes.
    local_chunk: if True, copies into this rank's rows.

Raises:
    InvalidValueError: the shape does not match.
    InvalidTypeError: the dtype or the device does not match.)";

constexpr const char* kGetBufferDoc =
    R"(Returns a view of the active part of the buffer, or of this rank's rows of it.

The shape is [active_tokens(), features], or [rows of this rank, features]. The view has the
buffer's dtype and keeps the memory alive. The caller must order its reads and writes by streams, as
for any tensor. The result of a call stays in the buffer until this rank's next call.

Args:
    local_chunk: if True, returns this rank's rows.)";

constexpr const char* kScaleInvDoc =
    R"(Sets the inverse scale of an 8-bit buffer: value = data * scale_inv.

Args:
    scale_inv: one float32 on the buffer's device, equal on all ranks. The tensor is kept, and read
        when a call executes.

Raises:
    InvalidTypeError: another tensor, or a buffer whose elements do not have 8 bits.)";

constexpr const char* kExternalAgDoc =
    R"(All-gathers this buffer on the streams of `lender`.

The lender may have a product of its own in flight. Each rank's rows must be in the buffer
(copy_into_buffer). Afterwards the buffer holds the rows of all ranks, on the current stream.

Args:
    lender: a buffer on the same device.

Raises:
    UnsupportedError: the method is not BULK, or the type is not AG or NONE.
    InvalidTypeError: lender is on another device.)";

constexpr const char* kBulkDoc =
    R"(Computes a product concurrently with a collective of the buffer that it does not depend on.

The arguments of the product are those of the class. D and the result of the collective are complete
on the current stream.

Args:
    comm_type: AG gathers the rows of all ranks into the buffer. RS sums each rank's rows of the
        buffer over all ranks.
    rs_output: [rows of this rank, features], receives the sum of RS; of the buffer's dtype, or
        float32, float16 or bfloat16 for an 8-bit buffer, for which it is required. None writes the
        sum to this rank's rows of the buffer. Must be None for AG.

Raises:
    InvalidValueError: comm_type is not AG or RS, or not that of the buffer; rs_output has the wrong
        shape, is missing, or is given with AG.
    InvalidTypeError: the dtype or device of rs_output; RS of a uint8 buffer.
    UnsupportedError: the method is RING_EXCHANGE.
    StateError: RS of an 8-bit buffer before set_ubuf_scale_inv.)";

constexpr const char* kSplitAgDoc =
    R"(Computes D [active tokens, out] from the gathered rows of B.

Each chunk is multiplied as soon as it has arrived. The arguments of the product are those of the
class. transb must be False.

Args:
    B: this rank's rows [rows of this rank, in], contiguous, of the buffer's dtype or one of the
        same size in bytes. None if the rows are in the buffer (copy_into_buffer).
    B_scale_inv: with scales per row or block, one row of scales for each of this rank's rows,
        unswizzled. They are gathered too. None uses the scale of an 8-bit buffer
        (set_ubuf_scale_inv).
    B_copy: tensor of the shape of get_buffer(), receives the rows of all ranks; or None.

Raises:
    UnsupportedError: the method is not RING_EXCHANGE or the type is not AG; transb is True;
        B_scale_inv is swizzled.
    InvalidValueError: a shape, or the element size of B or B_copy, does not match.
    InvalidTypeError: another dtype, or a device, does not match.)";

constexpr const char* kSplitRsDoc =
    R"(Computes the sum over ranks of op(B) op(A) [active tokens, features] and scatters its rows.

Each rank gets its rows in rs_output. The arguments of the product are those of the class. D is
ignored.

Args:
    rs_output: [rows of this rank, features], contiguous rows, of the buffer's dtype; or float32,
        float16 or bfloat16 for an 8-bit buffer, which needs D_scale and set_ubuf_scale_inv.
    bias: [features], of rs_output's dtype, added once, after the sum.

Raises:
    InvalidValueError: a shape does not match.
    InvalidTypeError: a dtype or device does not match.
    UnsupportedError: the method is not PIPELINE or RING_EXCHANGE, or the type is not RS;
        accumulate, GELU or a bias gradient, which must be applied after the sum.
    StateError: an 8-bit buffer before set_ubuf_scale_inv.)";

template <typename Class>
void register_overlap_class(py::module_& m, const char* name, const char* doc) {
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
      .def(py::init(&make_callback_group), py::arg("all_gather"), py::arg("barrier"),
           py::arg("rank"), py::arg("size"), py::arg("device"), py::arg("name") = "outside",
           py::arg("timeout") = py::none())
      .def("get_rank", &OverlapGroup::rank, "Returns the rank of this process.")
      .def("get_size", &OverlapGroup::size, "Returns the number of ranks.");

  py::class_<CommOverlapCore, std::shared_ptr<CommOverlapCore>> core(m, "CommOverlapCore",
                                                                     kCoreDoc);
  core.def_property_readonly("config", &CommOverlapCore::config,
                             "The CommOverlapConfig of the buffer.")
      .def_property_readonly(
          "algos", [](const CommOverlapCore& self) { return algos_of(self.config()); },
          "Algorithms of the products of this buffer: config.algos.")
      .def("get_tp_size", &CommOverlapCore::get_tp_size, "Returns the number of ranks.")
      .def("is_atomic_gemm", &CommOverlapCore::is_atomic_gemm,
           "Returns True if the buffer supports the atomic methods: config.atomic_gemm.")
      .def("is_p2p_overlap", &CommOverlapCore::is_p2p_overlap,
           "Returns True for a CommOverlapP2PBase, which exchanges chunks point to point.")
      .def("is_fp8_ubuf", &CommOverlapCore::is_fp8_ubuf,
           "Returns True if the elements of the buffer have 8 bits.")
      .def(
          "get_ubuf_dptr",
          [](const CommOverlapCore& self) {
            return reinterpret_cast<uintptr_t>(self.get_ubuf_dptr());
          },
          "Returns the address of the first byte of the buffer, on its device. It does not keep "
          "the memory alive.")
      .def("last_path", &CommOverlapCore::last_path, kLastPathDoc)
      .def("check", &CommOverlapCore::check,
           "Raises OperationTimeoutError if a wait for another rank has expired since the last "
           "call, including in a CUDA graph replay.")
      .def("set_active_tokens", &CommOverlapCore::set_active_tokens, py::arg("tokens"),
           py::call_guard<py::gil_scoped_release>(),
           "Sets the number of tokens, from the next call on. `tokens` must be equal on all ranks. "
           "Raises InvalidValueError if it is negative or more than the buffer has.")
      .def("active_tokens", &CommOverlapCore::active_tokens,
           "Returns the number of tokens of a call; initially all of the buffer's.")
      .def("copy_into_buffer", &CommOverlapCore::copy_into_buffer, py::arg("input"),
           py::arg("local_chunk") = false, py::call_guard<py::gil_scoped_release>(), kCopyIntoDoc)
      .def("get_buffer", &CommOverlapCore::get_buffer, py::arg("local_chunk") = false,
           py::call_guard<py::gil_scoped_release>(), kGetBufferDoc)
      .def("get_buffer_chunk_by_id", &CommOverlapCore::get_buffer_chunk_by_id, py::arg("chunk_id"),
           py::call_guard<py::gil_scoped_release>(),
           "Returns the rows of rank `chunk_id`, [rows of that rank, features], as a view like "
           "that of get_buffer(). Raises InvalidValueError if there is no such rank.")
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
  def_gemm_method(
      core, "bulk_overlap",
      [](Core& self, const GemmArgs& product, const Tensor& output, CommOverlapType type) {
        self.bulk_overlap(product, type, output);
      },
      kBulkDoc, py::arg("rs_output") = py::none());
  def_gemm_method(
      core, "split_overlap_ag",
      [](Core& self, const GemmArgs& product, const Tensor& output, CommOverlapType) {
        self.split_overlap_ag(product, output);
      },
      kSplitAgDoc, py::arg("B_copy") = py::none());
  def_gemm_method(
      core, "atomic_gemm_overlap_ag",
      [](Core& self, const GemmArgs& product, const Tensor& output, CommOverlapType) {
        self.atomic_gemm_overlap_ag(product, output);
      },
      "Does the same as split_overlap_ag, for a buffer with atomic_gemm: arguments, results and "
      "errors are the same. Raises StateError for a buffer without atomic_gemm.",
      py::arg("B_copy") = py::none());
  def_gemm_method(
      core, "split_overlap_rs",
      [](Core& self, const GemmArgs& product, const Tensor& output, CommOverlapType) {
        self.split_overlap_rs(product, output);
      },
      kSplitRsDoc, py::arg("rs_output") = py::none());
  def_gemm_method(
      core, "atomic_gemm_overlap_rs",
      [](Core& self, const GemmArgs& product, const Tensor& output, CommOverlapType) {
        self.atomic_gemm_overlap_rs(product, output);
      },
      "Does the same as split_overlap_rs, for a buffer with atomic_gemm: arguments, results and "
      "errors are the same. Raises StateError for a buffer without atomic_gemm.",
      py::arg("rs_output") = py::none());
  register_overlap_class<CommOverlapBase>(
      m, "CommOverlapBase",
      "Collectives that run concurrently with a product (BULK), and reduce-scatter in pieces of "
      "the output features (PIPELINE). Created collectively from a CommOverlapConfig, over a "
      "TorchComm (`comm`) or an OverlapGroup (`group`).");
  register_overlap_class<CommOverlapP2PBase>(
      m, "CommOverlapP2PBase",
      "Point-to-point exchange of chunks (RING_EXCHANGE): all-gather before products, "
      "reduce-scatter after them. Created collectively from a CommOverlapConfig, over a TorchComm "
      "(`comm`) or an OverlapGroup (`group`).");

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
  m.def("_explain", [](const py::function& call) {
    const ops::ExplainScope scope;
    call();
    TORCH_OVERLAP_CHECK(scope.choice.has_value(), kValue,
                        "explain: expected an operator that chooses an algorithm, got one that "
                        "does not. Call an overlapped product, as all_gather_matmul.");
    const ops::Choice& choice = *scope.choice;
    return std::tuple(std::string(ops::to_string(choice.algorithm)), choice.why,
                      std::string(choice.decided_by));
  });
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
