#include "torch_overlap/comm/primitives.h"

#include "torch_overlap/base/errors.h"

namespace torch_overlap {

void Primitives::run(const Call& call) {
  switch (call.primitive) {
    case Primitive::p2p:
      return p2p(call.p2p);
    case Primitive::broadcast:
      return broadcast(call.tensor, call.root);
    case Primitive::all_reduce:
      return all_reduce(call.tensor, call.reduce_op);
    case Primitive::reduce:
      return reduce(call.tensor, call.reduce_op, call.root);
    case Primitive::all_gather:
      return all_gather(call.out, call.tensor);
    case Primitive::reduce_scatter:
      return reduce_scatter(call.tensor, call.in, call.reduce_op);
    case Primitive::all_to_all:
      return all_to_all(call.out, call.in);
    case Primitive::barrier:
      return barrier();
    case Primitive::scatter:
      return scatter(call.tensor, call.in, call.root);
    case Primitive::gather:
      return gather(call.out, call.tensor, call.root);
    case Primitive::put:
      return put(*call.window, call.tensor, call.peer, call.offset);
    case Primitive::signal:
      return signal(*call.window, call.peer);
    case Primitive::wait_signal:
      return wait_signal(*call.window, call.peer, call.ticket);
  }
  fail(ErrorKind::kRuntime, call.describe(), ": expected a primitive, got number ",
       static_cast<int>(call.primitive));
}

}  // namespace torch_overlap
