// Chooses the kernels: the best instruction set that CPU and build support, or a lower one from $ALLSPARK_ISA or
// use_isa().
#include "cpu/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

#include "cpu/kernels/lora.h"
#include "sampling/sampler.h"

namespace as {

// setup.py lists the instruction sets that kernels are compiled for, best first: AS_FOR_EACH_ISA(X) is X(name) ...
#define AS_DECLARE(name)             \
  namespace name {                   \
  const Kernels& kernels();          \
  const LoraKernels& lora_kernels(); \
  }
AS_FOR_EACH_ISA(AS_DECLARE)

namespace {

// has_NAME(): whether this CPU and operating system support everything that the kernels of NAME use.

#if defined(__x86_64__)

enum class Register { eax, ebx, ecx, edx };

bool cpuid_has(unsigned leaf, unsigned subleaf, Register in, unsigned bits) {
  unsigned found[4];
  if (!__get_cpuid_count(leaf, subleaf, &found[0], &found[1], &found[2], &found[3])) return false;
  return (found[(int)in] & bits) == bits;
}

[[maybe_unused]] bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}
[[maybe_unused]] bool has_avx2_vnni() {
#if defined(AS_AVX2_VNNI_EMULATED)
  return has_avx2();
#else
  return has_avx2() && cpuid_has(7, 1, Register::eax, 1u << 4);
#endif
}
[[maybe_unused]] bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}
[[maybe_unused]] bool has_avx512_vnni() { return has_avx512() && cpuid_has(7, 0, Register::ecx, 1u << 11); }
[[maybe_unused]] bool has_avx512_bf16() { return has_avx512_vnni() && cpuid_has(7, 1, Register::eax, 1u << 5); }
[[maybe_unused]] bool has_amx() {
  if (!has_avx512_bf16()) return false;
#if defined(AS_AMX_EMULATED)
  return true;
#else
  constexpr unsigned kBf16 = 1u << 22, kAmxTile = 1u << 24, kInt8 = 1u << 25;
  if (!cpuid_has(7, 0, Register::edx, kBf16 | kAmxTile | kInt8)) return false;
  // Linux saves the tiles' 8 KB only for processes that request it. The permission covers all threads.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#endif
}

// Intel's cores execute vdpbf16ps more slowly than float32 FMA. Measured on 2 cores of Emerald Rapids without tiles, a
// model of 0.5B in bfloat16, avx512_bf16 / avx512_vnni: prompts 218 / 334 tokens/s, 8 rows 76 / 117.
bool slow_bf16() { return __builtin_cpu_is("intel"); }

// Zen 3 reads four streams a core 1.2 to 1.4 times as fast as one; Zen 5 and Emerald Rapids read one faster
// (docs/decisions/cpu-matmul.md). Not measured elsewhere.
bool likes_streams() { return __builtin_cpu_is("znver3"); }

#elif defined(__aarch64__)

bool slow_bf16() { return false; }
bool likes_streams() { return false; }

[[maybe_unused]] bool has_neon() { return getauxval(AT_HWCAP) & (1ul << 1); }           // HWCAP_ASIMD
[[maybe_unused]] bool has_neon_dotprod() { return getauxval(AT_HWCAP) & (1ul << 20); }  // HWCAP_ASIMDDP

// SVE with vectors of exactly this size, which is compiled into the kernels. (A process may have set a shorter size
// than the CPU's.)
[[maybe_unused]] bool has_sve(int bytes) {
  constexpr unsigned long kSve = 1ul << 22;                   // HWCAP_SVE
  constexpr int kGetVectorLength = 51, kLengthMask = 0xffff;  // PR_SVE_GET_VL, PR_SVE_VL_LEN_MASK
  if (!(getauxval(AT_HWCAP) & kSve)) return false;
  const int length = prctl(kGetVectorLength);
  return length >= 0 && (length & kLengthMask) == bytes;
}
[[maybe_unused]] bool has_sve256() { return has_sve(32); }
[[maybe_unused]] bool has_sve512() { return has_sve(64); }

#endif

struct Isa {
  const char* name;
  bool (*supported)();
  const Kernels& (*kernels)();
  const LoraKernels& (*lora)();
};

#define AS_ENTRY(name) {#name, has_##name, name::kernels, name::lora_kernels},
const Isa kIsas[] = {AS_FOR_EACH_ISA(AS_ENTRY)};

// Those that this CPU supports, best first.
std::vector<const Isa*> supported() {
  std::vector<const Isa*> found;
  for (const Isa& isa : kIsas)
    if (isa.supported()) found.push_back(&isa);
  for (size_t i = 1; slow_bf16() && i < found.size(); i++)
    if (found[i - 1]->name == std::string_view("avx512_bf16") && found[i]->name == std::string_view("avx512_vnni"))
      std::swap(found[i - 1], found[i]);
  return found;
}

// source: of the name, for errors. Throws std::runtime_error if the CPU does not support it.
const Isa* supported(const std::string& name, const std::string& source) {
  for (const Isa* isa : supported())
    if (name == isa->name) return isa;
  std::string known;
  for (const Isa& isa : kIsas) {
    if (name == isa.name) throw std::runtime_error(source + name + ": this CPU does not have it");
    known += (known.empty() ? "" : ", ") + std::string(isa.name);
  }
  if (!name.empty()) throw std::runtime_error(source + name + " is not one of " + known);
  throw std::runtime_error("this CPU has none of the instruction sets that kernels are built for: " + known);
}

const Isa* choose() {
  const char* wanted = std::getenv("ALLSPARK_ISA");
  const std::vector<const Isa*> best_first = supported();
  const bool forced = wanted && *wanted;
  const Isa* isa = forced || best_first.empty() ? supported(forced ? wanted : "", "ALLSPARK_ISA=") : best_first[0];
  use_logit_kernels(isa->kernels().logits());
  return isa;
}

bool streams = likes_streams();

const Isa*& chosen() {
  static const Isa* isa = choose();
  return isa;
}

}  // namespace

const Kernels& kernels() { return chosen()->kernels(); }

const LoraKernels& lora_kernels() { return chosen()->lora(); }

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Isa* isa : supported()) names.push_back(isa->name);
  return names;
}

bool uses_streams() { return streams; }

void use_streams(bool several) { streams = several; }

void use_isa(const std::string& name) {
  chosen() = supported(name, "instruction set ");
  use_logit_kernels(kernels().logits());
}

}  // namespace as
