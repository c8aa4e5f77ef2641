// Chooses the kernels: the best instruction set that the CPU has and this build knows, or a lower one by $ALLSPARK_ISA.
#include "isa.h"

#include <cstdlib>
#include <stdexcept>

#include "sampler.h"

namespace as {
namespace {

struct Isa {
  const char* name;
  bool (*supported)();
  const Kernels& (*kernels)();
};

#if defined(AS_HAVE_AVX512)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}
#endif

// From best to worst.
const Isa kIsas[] = {
#if defined(AS_HAVE_AVX512_VNNI)
    {"avx512_vnni", [] { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }, avx512_vnni::kernels},
#endif
#if defined(AS_HAVE_AVX512)
    {"avx512", has_avx512, avx512::kernels},
#endif
#if defined(AS_HAVE_AVX2)
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }, avx2::kernels},
#endif
#if defined(AS_HAVE_NEON)
    {"neon", [] { return true; }, neon::kernels},
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
    if (wanted && *wanted) throw std::runtime_error("ALLSPARK_ISA=" + std::string(wanted) + ": this CPU does not have it");
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
