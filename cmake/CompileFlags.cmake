# Source lines in kernels, for ncu and compute-sanitizer: they double the size of the library.
option(TORCH_OVERLAP_LINEINFO "Keep source lines in CUDA kernels" OFF)

# torch_overlap_compile_flags(<target>): the warnings of all our code. Torch's headers are system headers: no warnings.
function(torch_overlap_compile_flags target)
  set(warnings -Wall -Wextra -Wno-unused-parameter)
  list(JOIN warnings "," warnings_for_nvcc)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:${warnings}>
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${warnings_for_nvcc} --expt-relaxed-constexpr>
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${TORCH_OVERLAP_LINEINFO}>>:-lineinfo>)
endfunction()
