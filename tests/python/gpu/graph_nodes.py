"""The nodes of a captured call: kernels with their grid, cluster and priority, and how many copies."""

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


def nodes_of(issue):
    """The kernels of what `issue` captures, which is never run, and the number of copies."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        issue()
    handle = driver.CUgraph(graph.raw_cuda_graph())
    _, count = checked(driver.cuGraphGetNodes(handle))
    nodes, _ = checked(driver.cuGraphGetNodes(handle, count))
    kinds = [(node, checked(driver.cuGraphNodeGetType(node))) for node in nodes[:count]]
    kernels = [kernel_of(node) for node, kind in kinds if kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL]
    copies = sum(kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY for _, kind in kinds)
    return kernels, copies
