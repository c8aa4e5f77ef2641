// Chooses the kernels: the best instruction set that the CPU has and this build knows, or a lower one by $ALLSPARK_ISA.
#include "cpu/isa.h"

#include <cstdlib>
#include <stdexcept>

#if defined(AS_HAVE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__aarch64__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

#include "sampling/sampler.h"

namespace as {
namespace {

struct Isa {
  const char* name;
  bool (*supported)();
  const Kernels& (*kernels)();
};

#if defined(__x86_64__)
[[maybe_unused]] bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}
#endif

#if defined(AS_HAVE_AMX)
bool has_amx() {
  if (!has_avx512() || !__builtin_cpu_supports("avx512vnni") || !__builtin_cpu_supports("avx512bf16")) return false;
#if defined(AS_AMX_EMULATED)
  return true;
#else
  unsigned a, b, c, d;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return false;
  // The kernel keeps the tiles' 8 KB only for processes that ask; the answer holds for all threads.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#endif
}
#endif

#if defined(__aarch64__)
[[maybe_unused]] bool has_dot_products() { return getauxval(AT_HWCAP) & (1ul << 20); }  // HWCAP_ASIMDDP

// SVE with vectors of just this size: kernels have it compiled in. (A process may have set a shorter one than the
// CPU's.)
[[maybe_unused]] bool has_sve(int bytes) {
  constexpr unsigned long kSve = 1ul << 22;                   // HWCAP_SVE
  constexpr int kGetVectorLength = 51, kLengthMask = 0xffff;  // PR_SVE_GET_VL, PR_SVE_VL_LEN_MASK
  if (!(getauxval(AT_HWCAP) & kSve)) return false;
  const int length = prctl(kGetVectorLength);
  return length >= 0 && (length & kLengthMask) == bytes;
}
#endif

// From best to worst.
const Isa kIsas[] = {
#if defined(AS_HAVE_AMX)
    {"amx", has_amx, amx::kernels},
#endif
#if defined(AS_HAVE_AVX512_BF16)
    {"avx512_bf16",
     [] { return has_avx512() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16"); },
     avx512_bf16::kernels},
#endif
#if defined(AS_HAVE_AVX512_VNNI)
    {"avx512_vnni", [] { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }, avx512_vnni::kernels},
#endif
#if defined(AS_HAVE_AVX512)
    {"avx512", has_avx512, avx512::kernels},
#endif
#if defined(AS_HAVE_AVX2)
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }, avx2::kernels},
#endif
#if defined(AS_HAVE_SVE512)
    {"sve512", [] { return has_sve(64); }, sve512::kernels},
#endif
#if defined(AS_HAVE_SVE256)
    {"sve256", [] { return has_sve(32); }, sve256::kernels},
#endif
#if defined(AS_HAVE_NEON_DOTPROD)
    {"neon_dotprod", has_dot_products, neon_dotprod::kernels},
#endif
#if defined(AS_HAVE_NEON)
    {"neon", [] { return (getauxval(AT_HWCAP) & 2) != 0; }, neon::kernels},  // HWCAP_ASIMD
#endif
};

const Kernels& choose() {
  std::string known;
  for (const Isa& isa : kIsas) known += (known.empty() ? "" : ", ") + std::string(isa.name);
  const char* wanted = std::getenv("ALLSPARK_ISA");
  for (const Isa& isa : kIsas) {
    if (wanted && *wanted && wanted != std::string(isa.name)) continue;
    if (isa.supported()) {
      use_logit_kernels(isa.kernels().logits());
      return isa.kernels();
    }
    if (wanted && *wanted)
      throw std::runtime_error("ALLSPARK_ISA=" + std::string(wanted) + ": this CPU does not have it");
  }
  if (wanted && *wanted) throw std::runtime_error("ALLSPARK_ISA=" + std::string(wanted) + " is not one of " + known);
  throw std::runtime_error("this CPU has none of the instruction sets that kernels are built for: " + known);
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Isa& isa : kIsas)
    if (isa.supported()) names.push_back(isa.name);
  return names;
}

}  // namespace as
