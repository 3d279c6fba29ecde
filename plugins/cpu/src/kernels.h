// What the bindings (torch) and the kernels (no torch) know of each other: plain arguments and one table per
// instruction set. A kernel does a range of independent pieces of its op, so that the binding can share them out among
// threads; no result depends on how they are shared out.
#pragma once

#include <cstdint>

namespace trtspec {

struct Kernels {
  const char* name;
};

// The table of the best instruction set this machine has, or of the one TRTSPEC_CPU_ISA names.
const Kernels& kernels();

}  // namespace trtspec
