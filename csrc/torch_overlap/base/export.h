#pragma once

// Symbols of libtorch_overlap.so that another binary may use. Everything else is hidden.
#define TORCH_OVERLAP_API __attribute__((visibility("default")))
