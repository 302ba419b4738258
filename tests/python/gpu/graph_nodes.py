"""The nodes of a captured call: kernels with their grid, cluster and priority, and the number of copies."""

from dataclasses import dataclass

import torch
from cuda.bindings import driver


@dataclass(frozen=True)
class Kernel:
    name: str
    blocks: int
    cluster: int
    priority: int


def checked(result):
    status, *values = result
    assert status == driver.CUresult.CUDA_SUCCESS, status
    return values[0] if len(values) == 1 else values


def kernel_of(node):
    found = checked(driver.cuGraphKernelNodeGetParams(node))
    name = driver.cuFuncGetName(found.func) if int(found.func) else driver.cuKernelGetName(found.kern)

    def attribute(which):
        return checked(driver.cuGraphKernelNodeGetAttribute(node, which))

    ids = driver.CUlaunchAttributeID
    return Kernel(
        checked(name).decode(),
        found.gridDimX * found.gridDimY * found.gridDimZ,
        max(attribute(ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).clusterDim.x, 1),
        attribute(ids.CU_LAUNCH_ATTRIBUTE_PRIORITY).priority,
    )


@dataclass(frozen=True)
class Copy:
    bytes: int
    to_device: int


def copy_of(node):
    found = checked(driver.cuGraphMemcpyNodeGetParams(node))
    size = found.WidthInBytes * max(found.Height, 1) * max(found.Depth, 1)
    return Copy(size, device_of(int(found.dstDevice)))


def device_of(address):
    """Returns the device of the memory; the address of mapped memory does not identify it."""
    status, handle = driver.cuMemRetainAllocationHandle(address)
    if status != driver.CUresult.CUDA_SUCCESS:
        device = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        return checked(driver.cuPointerGetAttribute(device, address))
    place = checked(driver.cuMemGetAllocationPropertiesFromHandle(handle)).location
    checked(driver.cuMemRelease(handle))
    return int(place.id)


KINDS = driver.CUgraphNodeType


def nodes_in(graph):
    handle = driver.CUgraph(graph.raw_cuda_graph())
    _, count = checked(driver.cuGraphGetNodes(handle))
    found, _ = checked(driver.cuGraphGetNodes(handle, count))
    return found[:count]


def disable_all_but(graph, name):
    """Disables the copies, the fills and the kernels without this name in an instantiated graph whose source was
    kept."""
    instance = driver.CUgraphExec(graph.raw_cuda_graph_exec())
    for node in nodes_in(graph):
        kind = checked(driver.cuGraphNodeGetType(node))
        is_kernel = kind == KINDS.CU_GRAPH_NODE_TYPE_KERNEL
        can_be = is_kernel or kind in (KINDS.CU_GRAPH_NODE_TYPE_MEMCPY, KINDS.CU_GRAPH_NODE_TYPE_MEMSET)
        if can_be and not (is_kernel and name in kernel_of(node).name):
            checked(driver.cuGraphNodeSetEnabled(instance, node, 0))


def captured(issue):
    """Returns the nodes that `issue` captures, which never run (Kernel, Copy or the type of other nodes), and their
    edges as pairs of indices."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        issue()
    handle = driver.CUgraph(graph.raw_cuda_graph())
    read = {KINDS.CU_GRAPH_NODE_TYPE_KERNEL: kernel_of, KINDS.CU_GRAPH_NODE_TYPE_MEMCPY: copy_of}
    nodes, index = [], {}
    for node in nodes_in(graph):
        index[int(node)] = len(nodes)
        kind = checked(driver.cuGraphNodeGetType(node))
        nodes.append(read[kind](node) if kind in read else kind)
    *_, edges = checked(driver.cuGraphGetEdges(handle))
    first, second, *_ = checked(driver.cuGraphGetEdges(handle, edges))
    pairs = zip(first[:edges], second[:edges], strict=True)
    return nodes, [(index[int(a)], index[int(b)]) for a, b in pairs]


def nodes_of(issue):
    """Returns the kernels that `issue` captures, and the number of copies."""
    nodes, _ = captured(issue)
    return [n for n in nodes if isinstance(n, Kernel)], sum(isinstance(n, Copy) for n in nodes)
