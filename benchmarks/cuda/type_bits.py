"""Finds out which tensor-core products give the same bits at every tile size: writes a CUDA program, builds it with
nvcc, runs it.

    type_bits.py [--keep DIR]

For fp16, bf16, e4m3, e5m2 and int8: A [64, K] times B [256, K]^T with K in one ascending chain, by wgmma at every N
from 8 to 256 and by mma.sync, compared bit by bit with wgmma at N = 8, and with float64. For 8-bit floats also with
sums moved into float32 registers every 128 of K, and mma.sync on operands widened to fp16. The kernels move bytes,
whatever the type: a step of K is 32 bytes in each.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

SIZES = (8, 16, 32, 64, 128, 256)
#: name -> (PTX type, elements in 32 bytes, accumulator, C++ type, further operands of wgmma)
TYPES = {
    "fp16": ("f16", 16, "f32", "__half", ", 1, 1, 0, 0"),
    "bf16": ("bf16", 16, "f32", "__nv_bfloat16", ", 1, 1, 0, 0"),
    "e4m3": ("e4m3", 32, "f32", "__nv_fp8_e4m3", ", 1, 1"),
    "e5m2": ("e5m2", 32, "f32", "__nv_fp8_e5m2", ", 1, 1"),
    "int8": ("s8", 32, "s32", "int8_t", ""),
}

PROGRAM = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>
#define CHECK(x) do { cudaError_t e = (x); if (e) { \
    printf("%s: %s\n", #x, cudaGetErrorString(e)); exit(1); } } while (0)

// One step of K: d [64, N] += a [64, 32 bytes] b [N, 32 bytes]^T, by one warpgroup.
template <int T, int N> struct Tile;
@TILES@

// Shared memory without swizzle: core matrices of 8 rows x 16 bytes, two of them along K.
__device__ uint64_t descriptor(const void* p) {
  const uint32_t address = (uint32_t)__cvta_generic_to_shared(p);
  return (uint64_t)((address & 0x3FFFF) >> 4) | (uint64_t)(128 >> 4) << 16 | (uint64_t)(256 >> 4) << 32;
}
__device__ int place(int row, int byte) { return ((row / 8) * 2 + byte / 16) * 128 + row % 8 * 16 + byte % 16; }

// bytes: of a row. promote: steps after which the sums move on into other registers; 0: never.
template <int T, int N, class S>
__global__ void by_wgmma(const uint8_t* a, const uint8_t* b, S* out, int bytes, int promote) {
  __shared__ __align__(128) uint8_t sa[64 * 32], sb[256 * 32];
  S d[N / 2], total[N / 2];
  for (int i = 0; i < N / 2; i++) d[i] = total[i] = 0;
  const int t0 = blockIdx.x * N;
  for (int k = 0, step = 1; k < bytes; k += 32, step++) {
    __syncthreads();
    for (int i = threadIdx.x; i < 64 * 32; i += 128) sa[place(i / 32, i % 32)] = a[i / 32 * bytes + k + i % 32];
    for (int i = threadIdx.x; i < N * 32; i += 128) sb[place(i / 32, i % 32)] = b[(t0 + i / 32) * bytes + k + i % 32];
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    Tile<T, N>::multiply(d, descriptor(sa), descriptor(sb));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (promote && step % promote == 0)
      for (int i = 0; i < N / 2; i++) total[i] += d[i], d[i] = 0;
  }
  const int w = threadIdx.x / 32, l = threadIdx.x % 32;
  for (int i = 0; i < N / 2; i++)
    out[(w * 16 + l / 4 + 8 * (i % 4 / 2)) * 256 + t0 + 8 * (i / 4) + 2 * (l % 4) + i % 2] =
        promote ? total[i] + d[i] : d[i];
}

template <int T, class S> __device__ void step(S* d, const uint32_t* a, const uint32_t* b);
@STEPS@

// Four e4m3 values as fp16 pairs (exact): low half and high half.
__device__ uint32_t widen(uint32_t four, int half) {
  uint32_t out;
  asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.rn.f16x2.e4m3x2 %0, lo; }" : "=r"(out)
      : "r"(half ? four >> 16 : four));
  return out;
}

template <int T, class S>
__global__ void by_mma(const uint8_t* a, const uint8_t* b, S* out, int bytes, int promote, bool widened) {
  const int w = threadIdx.x / 32, l = threadIdx.x % 32, t0 = blockIdx.x * 8;
  auto word = [&](const uint8_t* m, int row, int k) {
    return *(const uint32_t*)(m + (size_t)row * bytes + k + l % 4 * 4);
  };
  S d[4] = {}, total[4] = {};
  for (int k = 0, n = 1; k < bytes; k += 32, n++) {
    const int r = w * 16 + l / 4;
    const uint32_t x[4] = {word(a, r, k), word(a, r + 8, k), word(a, r, k + 16), word(a, r + 8, k + 16)};
    const uint32_t y[2] = {word(b, t0 + l / 4, k), word(b, t0 + l / 4, k + 16)};
    if constexpr (T == 2) {
      if (widened) {  // within 32 the order of K is another one, the same for both operands
        for (int h = 0; h < 2; h++) {
          const uint32_t xs[4] = {widen(x[0], h), widen(x[1], h), widen(x[2], h), widen(x[3], h)};
          const uint32_t ys[2] = {widen(y[0], h), widen(y[1], h)};
          step<0>(d, xs, ys);
        }
      } else step<T>(d, x, y);
    } else step<T>(d, x, y);
    if (promote && n % promote == 0)
      for (int i = 0; i < 4; i++) total[i] += d[i], d[i] = 0;
  }
  for (int i = 0; i < 4; i++) out[(w * 16 + l / 4 + 8 * (i / 2)) * 256 + t0 + 2 * (l % 4) + i % 2] =
        promote ? total[i] + d[i] : d[i];
}

template <class E> double value(E x) { return (double)(float)x; }
template <> double value(int8_t x) { return x; }

template <int T, class E, class S> void test(const char* name) {
  for (int trial = 0; trial < 4; trial++) {
    const int k = trial < 2 ? 896 : 3584, bytes = k * sizeof(E);
    const bool spread = trial % 2;  // of exponents
    std::mt19937 g(trial);
    std::uniform_real_distribution<float> unit(-1, 1);
    auto draw = [&] {
      if (T == 4) return (E)(int)(unit(g) * 127);
      return (E)ldexpf(unit(g), spread ? (int)(g() % 10) - 5 : 0);
    };
    std::vector<E> a(64 * k), b(256 * k);
    for (E& x : a) x = draw();
    for (E& x : b) x = draw();
    uint8_t *da, *db;
    S* out;
    CHECK(cudaMalloc(&da, a.size() * sizeof(E)));
    CHECK(cudaMalloc(&db, b.size() * sizeof(E)));
    CHECK(cudaMalloc(&out, 64 * 256 * sizeof(S)));
    CHECK(cudaMemcpy(da, a.data(), a.size() * sizeof(E), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(db, b.data(), b.size() * sizeof(E), cudaMemcpyHostToDevice));
    auto run = [&](auto launch) {
      CHECK(cudaMemset(out, 0xff, 64 * 256 * sizeof(S)));
      launch();
      CHECK(cudaDeviceSynchronize());
      std::vector<S> h(64 * 256);
      CHECK(cudaMemcpy(h.data(), out, h.size() * sizeof(S), cudaMemcpyDeviceToHost));
      return h;
    };
    auto error = [&](const std::vector<S>& h) {
      double worst = 0;
      for (int r = 0; r < 64; r += 7)
        for (int t = 0; t < 256; t += 5) {
          double sum = 0, size = 0;
          for (int i = 0; i < k; i++) {
            const double p = value(a[r * k + i]) * value(b[t * k + i]);
            sum += p, size += fabs(p);
          }
          worst = fmax(worst, fabs(sum - (double)h[r * 256 + t]) / size);
        }
      return worst;
    };
    auto differ = [](const std::vector<S>& x, const std::vector<S>& y) {
      int n = 0;
      for (size_t i = 0; i < x.size(); i++) n += memcmp(&x[i], &y[i], sizeof(S)) != 0;
      return n;
    };
    const auto first = run([&] { by_wgmma<T, 8, S><<<32, 128>>>(da, db, out, bytes, 0); });
    printf("%s K=%d spread=%d: of 16384 differ from wgmma N=8:", name, k, spread);
@RUNS@
    const auto mma = run([&] { by_mma<T, S><<<32, 128>>>(da, db, out, bytes, 0, false); });
    printf(" mma.sync %d; error/sum|p| wgmma %.1e mma.sync %.1e", differ(mma, first), error(first), error(mma));
    if (T == 2 || T == 3) {
      const auto p8 = run([&] { by_wgmma<T, 8, S><<<32, 128>>>(da, db, out, bytes, 4); });
      const auto p128 = run([&] { by_wgmma<T, 128, S><<<2, 128>>>(da, db, out, bytes, 4); });
      const auto pm = run([&] { by_mma<T, S><<<32, 128>>>(da, db, out, bytes, 4, false); });
      printf("; moved every 128: N128 %d mma.sync %d differ from N8, error %.1e",
             differ(p128, p8), differ(pm, p8), error(p8));
      if (T == 2) {
        const auto wide = run([&] { by_mma<T, S><<<32, 128>>>(da, db, out, bytes, 0, true); });
        printf("; widened to fp16: %d differ from mma.sync, error %.1e", differ(wide, mma), error(wide));
      }
    }
    printf("\n");
    cudaFree(da), cudaFree(db), cudaFree(out);
  }
}

int main() {
@TESTS@
}
"""


def program() -> str:
    tiles, steps, tests = [], [], []
    for index, (name, (ptx, elements, total, cpp, rest)) in enumerate(TYPES.items()):
        kind, constraint = ("float", "f") if total == "f32" else ("int", "r")
        for n in SIZES:
            regs = n // 2
            names = ", ".join(f"%{i}" for i in range(regs))
            outs = ", ".join(f'"+{constraint}"(d[{i}])' for i in range(regs))
            tiles.append(
                f"template <> struct Tile<{index}, {n}> {{ __device__ static void multiply({kind}* d, uint64_t a, "
                f'uint64_t b) {{\n  asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k{elements}.{total}.{ptx}.{ptx} '
                f'{{{names}}}, %{regs}, %{regs + 1}, 1{rest};" : {outs} : "l"(a), "l"(b));\n}} }};')
        steps.append(
            f"template <> __device__ void step<{index}, {kind}>({kind}* d, const uint32_t* a, const uint32_t* b) {{\n"
            f'  asm volatile("mma.sync.aligned.m16n8k{elements}.row.col.{total}.{ptx}.{ptx}.{total} {{%0,%1,%2,%3}},'
            f'{{%4,%5,%6,%7}},{{%8,%9}},{{%0,%1,%2,%3}};"\n    : "+{constraint}"(d[0]), "+{constraint}"(d[1]), '
            f'"+{constraint}"(d[2]), "+{constraint}"(d[3])\n    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), '
            f'"r"(b[0]), "r"(b[1]));\n}}')
        tests.append(f'  test<{index}, {cpp}, {kind}>("{name}");')
    runs = "\n".join(
        f"    {{ const auto h = run([&] {{ by_wgmma<T, {n}, S><<<{256 // n}, 128>>>(da, db, out, bytes, 0); }}); "
        f'printf(" N{n} %d", differ(h, first)); }}' for n in SIZES[1:])
    return (PROGRAM.replace("@TILES@", "\n".join(tiles)).replace("@STEPS@", "\n".join(steps))
            .replace("@RUNS@", runs).replace("@TESTS@", "\n".join(tests)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="where the program stays")
    folder = parser.parse_args().keep or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    source, binary = folder / "type_bits.cu", folder / "type_bits"
    source.write_text(program())
    subprocess.run(["nvcc", "-O2", "-std=c++17", "-gencode", "arch=compute_90a,code=sm_90a", "-o", binary, source],
                   check=True)
    subprocess.run([binary], check=True)
    sass = subprocess.run(["cuobjdump", "--dump-sass", binary], capture_output=True, text=True).stdout
    print("instructions:", {op: sass.count(op) for op in ("HGMMA", "QGMMA", "IGMMA", "HMMA", "QMMA", "IMMA")})


if __name__ == "__main__":
    main()
