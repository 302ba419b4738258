#include <pybind11/native_enum.h>

#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/python/bindings.h"
#include "torch_overlap/python/convert.h"

namespace torch_overlap::python {

void register_batch(py::module_& module) {
  py::native_enum<P2POp::Type>(module, "P2POpType", "enum.Enum", "A send or a receive.")
      .value("SEND", P2POp::Type::SEND)
      .value("RECV", P2POp::Type::RECV)
      .finalize();

  py::class_<P2POp>(module, "P2POp", "One send or receive of a batch.")
      .def(py::init([](P2POp::Type type, const at::Tensor& tensor, int64_t peer, int64_t tag) {
        return P2POp{type, tensor, to_int("P2POp", "peer", peer), to_int("P2POp", "tag", tag)};
      }))
      .def_readonly("type", &P2POp::type, "SEND or RECV.")
      .def_readonly("tensor", &P2POp::tensor, "The tensor that is sent, or received into.")
      .def_readonly("peer", &P2POp::peer, "The peer's rank.")
      .def_readonly("tag", &P2POp::tag, "The tag: messages match among those of one tag.");

  py::class_<BatchSendRecv, std::shared_ptr<BatchSendRecv>>(
      module, "BatchSendRecv",
      "A batch of sends and receives that are issued together. None waits for another, so any "
      "pattern that matches across the ranks completes. TorchComm.batch_op_create() makes it; "
      "issue() empties it.",
      py::release_gil_before_calling_cpp_dtor())
      .def("_send",
           [](BatchSendRecv& self, const at::Tensor& tensor, int64_t dst, int64_t tag) {
             self.send(tensor, to_int("send", "dst", dst), to_int("send", "tag", tag));
           })
      .def("_recv",
           [](BatchSendRecv& self, const at::Tensor& tensor, int64_t src, int64_t tag) {
             self.recv(tensor, to_int("recv", "src", src), to_int("recv", "tag", tag));
           })
      .def("_issue",
           [](BatchSendRecv& self, const py::handle& async_op, const py::handle& options,
              const py::handle& hints, const py::handle& timeout) {
             const bool is_async = to_bool("issue", "async_op", async_op);
             BatchP2POptions merged;
             static_cast<OpOptions&>(merged) =
                 to_options<BatchP2POptions>("batch_op_issue", hints, timeout, options);
             return without_gil([&] { return self.issue(is_async, merged); });
           })
      .def_property_readonly("ops", &BatchSendRecv::ops,
                             "List of the P2POps that were added since the last issue().");

  py::class_<TorchComm, std::shared_ptr<TorchComm>>(module.attr("TorchComm"))
      .def("_batch_op_create", [](const std::shared_ptr<TorchComm>& self) {
        self->require_not_finalized("batch_op_create");
        return std::make_shared<BatchSendRecv>(self);
      });
}

}  // namespace torch_overlap::python
