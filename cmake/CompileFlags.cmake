# torch_overlap_compile_flags(<target>): the warnings of all our code. Torch's headers are system headers: no warnings.
function(torch_overlap_compile_flags target)
  set(warnings -Wall -Wextra -Wno-unused-parameter)
  list(JOIN warnings "," warnings_for_nvcc)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:${warnings}>
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${warnings_for_nvcc} --expt-relaxed-constexpr -lineinfo>)
endfunction()
