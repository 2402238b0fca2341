// Detection of instruction sets by CPUID, XCR0 and, for AMX, a request to the kernel.
#include "isa.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace trivet {
namespace {

#if defined(__x86_64__)

// The tile state is 8 KiB a thread, so Linux hands it out only on request (arch_prctl, since 5.16).
bool request_tile_state() {
  constexpr long request_permission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long tile_data = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25;
  if ((d & (bf16 | tile | int8)) != (bf16 | tile | int8)) return false;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return false;  // OSXSAVE: XGETBV may be used
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned tile_states = 3u << 17;
  return (low & tile_states) == tile_states && request_tile_state();
}

CpuFeatures detect() {
  CpuFeatures features;
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return features;
  features.best = Isa::avx2;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return features;
  }
  features.best = Isa::avx512;
  features.avx512_bf16 = __builtin_cpu_supports("avx512bf16");
  features.avx512_vnni = __builtin_cpu_supports("avx512vnni");
  if (features.avx512_bf16 && features.avx512_vnni && __builtin_cpu_supports("avx512vbmi") && has_amx()) features.best = Isa::amx;
  return features;
}

#else

CpuFeatures detect() { return {}; }

#endif

Isa initial_isa() {
  const char* wanted = std::getenv("TRIVET_CPU_ISA");
  if (wanted == nullptr) return cpu_features().best;
  for (Isa isa : {Isa::plain, Isa::avx2, Isa::avx512, Isa::amx}) {
    if (std::strcmp(wanted, isa_name(isa)) == 0) return std::min(isa, cpu_features().best);
  }
  return cpu_features().best;
}

Isa& current_isa() {
  static Isa isa = initial_isa();
  return isa;
}

}  // namespace

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

Isa isa_in_use() { return current_isa(); }

void use_isa(Isa isa) { current_isa() = std::min(isa, cpu_features().best); }

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::plain: return "plain";
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    case Isa::amx: return "amx";
  }
  return "unknown";
}

}  // namespace trivet
