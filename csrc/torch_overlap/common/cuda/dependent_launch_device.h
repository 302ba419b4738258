#pragma once

// Programmatic dependent launch: a kernel starts while the one before it in its stream still runs.
// Both functions do nothing before sm_90, and without such a launch. For .cu files.
namespace torch_overlap::cuda {

// Returns when the kernel before this one has ended, and what it wrote can be read.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start once all blocks have called this, or have ended.
__device__ __forceinline__ void let_next_kernel_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace torch_overlap::cuda
