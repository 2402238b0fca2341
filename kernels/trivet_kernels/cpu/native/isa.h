// Which instruction sets this process may use, found once at run time.
//
// Every kernel file is compiled with the flags of its own instruction set and is entered only when this file says so.
// One level is in use for the whole life of the process: the bits of a product depend on it, so it never changes with
// the size of the work. Asking for AMX's tile state is a permission for the process, taken here; the tile
// configuration itself belongs to each thread and to the kernels.
#pragma once

namespace trivet {

enum class Isa { plain, avx2, avx512, amx };

struct CpuFeatures {
  Isa best = Isa::plain;     // avx512 means F, BW, DQ and VL
  bool avx512_bf16 = false;  // dpbf16ps
  bool avx512_vnni = false;  // dpbusd
};

// What the processor and the kernel allow.
const CpuFeatures& cpu_features();

// The level in use: the best one, or the lower one that TRIVET_CPU_ISA names (plain, avx2, avx512, amx).
Isa isa_in_use();

// For tests: use a level at or below the best one from here on. Weights and activations made before must not be used.
void use_isa(Isa isa);

const char* isa_name(Isa isa);

}  // namespace trivet
