# TORCH_OVERLAP_SANITIZE: all targets of the build are instrumented; torch's libraries are not. `make sanitize` says how
# the programs are run. No vptr check: it needs type information that torch's libraries keep to themselves.
if(TORCH_OVERLAP_SANITIZE)
  set(sanitize -fsanitize=${TORCH_OVERLAP_SANITIZE})
  add_link_options(${sanitize})
  if(TORCH_OVERLAP_SANITIZE MATCHES "undefined")
    list(APPEND sanitize -fno-sanitize=vptr -fno-sanitize-recover=undefined)
  endif()
  add_compile_options(${sanitize} -fno-omit-frame-pointer -O1 -g1 -UNDEBUG)
endif()
