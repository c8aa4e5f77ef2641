// The products of a layer and what is between them in one launch (native/cuda/chain.h), against launches one by one:
// the same bits, and microseconds a layer of Qwen2.5-7B's shape.
//   nvcc -std=c++17 -O3 -Inative -gencode=arch=compute_90a,code=sm_90a tests/perf/cuda/chain.cu native/cuda/chain.cpp
//        native/cuda/kernels/{chain*,linear_*,rows,byte_rows,quantize,sum_ranks,ceilings}.cu -o chain
//   chain schedule: every step is computed once, and nobody waits for ever; needs no GPU
//   chain check FORMAT [repetitions]; chain beside FORMAT [repetitions]; chain time FORMAT [rows,rows...]; FORMAT:
//   bf16, float8, int8, int4, w8a8, w4a8
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/kernels/chain.cuh"

using namespace as::cuda;

static void check(cudaError_t result) {
  if (result != cudaSuccess) std::printf("%s\n", cudaGetErrorString(result)), std::exit(1);
}

// ---- the schedule
static int faults = 0;
static void fault(const char* what, int n, int k, int blocks, int own) {
  if (faults++ < 10) std::printf("%s: [%d, %d], %d blocks of threads, number %d\n", what, n, k, blocks, own);
}

// Blocks of threads take turns until none goes on.
template <typename S>
static void simulate(int n, int k, int most_pieces, int blocks, int rows) {
  ChainOp op;
  op.product.w.n = n, op.product.w.k = k, op.product.w.most_pieces = most_pieces;
  const ChainLinks chain = links_of<S>(&op, 1, rows, blocks, {});
  const ChainLink& link = chain.links[0];
  const ChainSteps& s = link.k;
  struct Own {
    ChainParts parts;
    ChainPart part;
    bool there;
  };
  std::vector<Own> all;
  for (int b = 0; b < blocks; b++) {
    all.push_back({ChainParts(link, b), {}, false});
    all.back().there = all.back().parts.next(all.back().part);
  }
  struct Left {
    bool there = false;
    ChainPart part;
  };
  std::vector<Left> left(blocks);
  std::vector<int> done((size_t)link.tiles * s.count), ended((size_t)link.tiles * s.pieces),
      columns((size_t)link.tiles * s.blocks);
  for (bool any = true; any;) {
    any = false;
    for (int b = blocks - 1; b >= 0; b--) {  // the worst order
      Own& own = all[b];
      if (!own.there) continue;
      const ChainPart part = own.part;
      if (part.begin > part.first) {
        if (!left[b - 1].there) continue;
        const ChainPart& other = left[b - 1].part;
        if (other.tile != part.tile || other.piece != part.piece || other.end != part.begin)
          fault("another's sums", n, k, blocks, b);
        left[b - 1].there = false;
      }
      any = true;
      if (part.begin >= part.end || part.end > part.last) fault("a part of nothing", n, k, blocks, b);
      for (int step = part.begin, block = part.block; step < part.end; step++, block += kStepBlocks) {
        done[(size_t)part.tile * s.count + step]++;
        for (int j = 0; j < kStepBlocks && block + j < part.block_end; j++) {
          columns[(size_t)part.tile * s.blocks + block + j]++;
          if ((block + j) / s.piece_blocks != part.piece) fault("another piece", n, k, blocks, b);
        }
      }
      if (part.end < part.last) {
        if (left[b].there) fault("sums over sums", n, k, blocks, b);
        left[b] = {true, part};
      } else {
        ended[(size_t)part.tile * s.pieces + part.piece]++;
      }
      own.there = own.parts.next(own.part);
    }
  }
  for (int b = 0; b < blocks; b++)
    if (all[b].there || left[b].there) fault("waits for ever", n, k, blocks, b);
  for (const auto& counts : {done, ended, columns})
    for (int count : counts)
      if (count != 1) fault("not once", n, k, blocks, count);
}

static void schedule() {
  int count = 0;
  for (int blocks : {132, 114, 78, 13, 2, 1})
    for (int n : {1, 64, 65, 130, 896, 1152, 3584, 4608, 9728, 18944, 37888})
      for (int k : {1, 64, 65, 200, 896, 1000, 3584, 4864, 7168, 14336, 18944})
        for (int pieces : {1, 2, 3, 4, 5, 8}) {
          simulate<ChainShape<Plain, 8, 2>>(n, k, pieces, blocks, 8);
          simulate<ChainShape<Rounded<4, false>, 32, 4>>(n, k, pieces, blocks, 32), count += 2;
        }
  std::printf("%d schedules, %d faults\n", count, faults);
}

// ---- memory
static cudaStream_t stream;
static Queue queue;
template <typename T>
static T* memory(size_t bytes) {
  void* data = nullptr;
  check(cudaMalloc(&data, bytes));
  check(cudaMemset(data, 0, bytes));
  return static_cast<T*>(data);
}
static uint64_t seed = 1;
template <typename T>
static T* noise(size_t bytes, float size) {
  T* data = memory<T>(bytes);
  fill_noise(data, bytes / 4 * 4, size, seed++, queue);
  return data;
}

static Scratch new_scratch() {
  return {memory<float>(kScratchBlocks * kScratchFloats * 4), memory<int>(kScratchBlocks * kScratchFlags * 4),
          memory<float>(kScratchPieces * 4), memory<int>(kScratchCounts * 4), memory<int>(kScratchBarriers * 4)};
}

struct Sizes {
  int hidden, attention, inner, qkv;
};
static const Sizes k7B = {3584, 3584, 18944, 4608};

// What a layer has of its own, and what steps write.
struct Layer {
  Matrix o, gate_up, down, qkv;
  float *first_norm, *second_norm, *bias;
};
struct Step {
  float *hidden, *out;
  uint16_t *attention, *normed, *gated, *normed_again;
  char* bytes;
};
static std::string format = "bf16";
static bool of_bytes() { return format == "float8" || format == "w8a8" || format == "w4a8"; }
static Matrix matrix(int n, int k) {
  Matrix m;
  m.n = n, m.k = k;
  if (format == "bf16") {
    m.kind = Kind::bf16, m.most_pieces = most_pieces(n);
    m.tiles = noise<uint16_t>(tiles_bytes(n, k), 0.03f);
    return m;
  }
  const bool floats = format == "float8";
  m.kind = floats ? Kind::float8 : of_bytes() ? Kind::integers : Kind::codes;
  m.codes.bits = format == "int4" || format == "w4a8" ? 4 : 8, m.codes.floats = floats;
  m.codes.group = floats || k < kBlock ? k : kBlock, m.codes.groups = (k + m.codes.group - 1) / m.codes.group;
  m.most_pieces = pieces_of_codes(n, k);
  m.codes.words = memory<uint32_t>(codes_bytes(n, k, m.codes.bits));
  m.codes.scales = memory<uint32_t>(scales_bytes(n, m.codes.groups));
  static uint16_t* values = memory<uint16_t>((size_t)512 << 20);
  static float* ranges = memory<float>((size_t)256 << 20);
  static auto* bad = memory<unsigned long long>(8);
  fill_noise(values, (size_t)n * k * 2 / 4 * 4, 0.03f, seed++, queue);
  quantize_rows(values, Source::bf16, k, m.codes.group, 0, n, m, 0, ranges, bad, queue);
  return m;
}
static Layer layer_of(const Sizes& s) {
  return {matrix(s.hidden, s.attention), matrix(paired_rows(2 * s.inner), s.hidden), matrix(s.hidden, s.inner),
          matrix(s.qkv, s.hidden),       noise<float>(s.hidden * 4, 1.0f),           noise<float>(s.hidden * 4, 1.0f),
          noise<float>(s.qkv * 4, 1.0f)};
}
static void free_layer(const Layer& l) {
  for (const Matrix* m : {&l.o, &l.gate_up, &l.down, &l.qkv})
    cudaFree(const_cast<uint16_t*>(m->tiles)), cudaFree(m->codes.words), cudaFree(m->codes.scales);
  cudaFree(l.first_norm), cudaFree(l.second_norm), cudaFree(l.bias);
}
static Step step_of(const Sizes& s, const Step* same = nullptr) {
  const int rows = 64;
  return {memory<float>(rows * s.hidden * 4),
          memory<float>(rows * s.qkv * 4),
          same ? same->attention : noise<uint16_t>(tiles_bytes(rows, s.attention), 1.0f),
          memory<uint16_t>(tiles_bytes(rows, s.hidden)),
          memory<uint16_t>(tiles_bytes(rows, s.inner)),
          memory<uint16_t>(tiles_bytes(rows, s.hidden)),
          memory<char>(byte_rows_bytes(rows, std::max({s.inner, s.hidden, s.attention})))};
}
static std::vector<ChainOp> ops_of(const Layer& l, const Step& t, const Sizes& s) {
  std::vector<ChainOp> ops;
  const Rows hidden = {t.hidden, nullptr, s.hidden};
  // Rows for a product, normed or not.
  const auto rows_for = [&](const Matrix& w, uint16_t* tiles, const float* norm) {
    ChainOp op;
    op.kind = of_bytes() ? ChainOp::Kind::bytes : ChainOp::Kind::norm;
    op.product.w = w, op.product.x = {nullptr, tiles, w.k}, op.product.bytes = byte_rows(t.bytes, 64, w.k);
    if (norm) op.x = t.hidden, op.norm = {norm, 1e-6f, false}, op.y = {nullptr, tiles, w.k};
    if (norm || of_bytes()) ops.push_back(op);
  };
  const auto product = [&](const Matrix& w, uint16_t* x, const Rows& y) -> Product& {
    ChainOp op;
    op.product.w = w, op.product.x = {nullptr, x, w.k}, op.product.y = y;
    if (of_bytes()) op.product.bytes = byte_rows(t.bytes, 64, w.k);
    ops.push_back(op);
    return ops.back().product;
  };
  rows_for(l.o, t.attention, nullptr);
  product(l.o, t.attention, hidden).adds = true;
  rows_for(l.gate_up, t.normed, l.first_norm);
  product(l.gate_up, t.normed, {nullptr, t.gated, s.inner}).gated = true;
  rows_for(l.down, t.gated, nullptr);
  product(l.down, t.gated, hidden).adds = true;
  rows_for(l.qkv, t.normed_again, l.second_norm);
  product(l.qkv, t.normed_again, {t.out, nullptr, s.qkv}).bias = l.bias;
  return ops;
}
static void one_by_one(const ChainOp* ops, int count, int rows) {
  for (int i = 0; i < count; i++) run_op(ops[i], rows, queue);
}

__global__ void differ_kernel(const uint32_t* a, const uint32_t* b, size_t count, int* differ) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x)
    if (a[i] != b[i]) atomicAdd(differ, 1);
}

static int check_bits(int repetitions) {
  int* differ = memory<int>(4 * sizeof(int));
  int wrong = 0;
  for (const Sizes& s : {Sizes{896, 896, 4864, 1152}, k7B, Sizes{1000, 1144, 2744, 1300}, Sizes{72, 200, 136, 90},
                         Sizes{4096, 4096, 12288, 6144}, Sizes{5120, 4096, 8704, 10240}}) {
    const Layer l = layer_of(s);
    const Step one = step_of(s), all = step_of(s, &one);
    float* before = noise<float>(64 * s.hidden * 4, 2.0f);
    check(cudaStreamSynchronize(stream));  // products ask for weights before the launches before them have ended
    for (int rows : {1, 2, 7, 8, 9, 16, 17, 31, 32}) {
      const auto compare = [&](const void* a, const void* b, size_t bytes, int which) {
        differ_kernel<<<64, 256, 0, stream>>>((const uint32_t*)a, (const uint32_t*)b, bytes / 4, differ + which);
      };
      const auto begin = [&](const Step& t) {
        check(cudaMemcpyAsync(t.hidden, before, 64 * s.hidden * 4, cudaMemcpyDeviceToDevice, stream));
        check(cudaMemsetAsync(t.out, 0, 64 * s.qkv * 4, stream));
        for (uint16_t* tiles : {t.normed, t.normed_again})
          check(cudaMemsetAsync(tiles, 0, tiles_bytes(64, s.hidden), stream));
        check(cudaMemsetAsync(t.gated, 0, tiles_bytes(64, s.inner), stream));
      };
      const std::vector<ChainOp> ops = ops_of(l, all, s);
      const int count = (int)ops.size();
      begin(one), one_by_one(ops_of(l, one, s).data(), count, rows);
      if (chained(ops.data(), count, rows, queue) != count) std::printf("no chain: %d rows\n", rows), wrong++;
      for (int i = 0; i < repetitions; i++) {
        begin(all), run_chain(ops.data(), count, rows, queue);
        if (i % 8 == 0)
          run_chain(ops.data(), count, rows, queue), begin(all), run_chain(ops.data(), count, rows, queue);
        compare(one.out, all.out, rows * s.qkv * 4, 0), compare(one.hidden, all.hidden, rows * s.hidden * 4, 1);
        compare(one.gated, all.gated, tiles_bytes(rows, s.inner), 2);
        compare(one.normed, all.normed, tiles_bytes(rows, s.hidden), 3);
      }
      int counts[4];
      check(cudaMemcpyAsync(counts, differ, sizeof(counts), cudaMemcpyDeviceToHost, stream));
      check(cudaMemsetAsync(differ, 0, sizeof(counts), stream));
      check(cudaStreamSynchronize(stream));
      if (counts[0] || counts[1] || counts[2] || counts[3])
        wrong++, std::printf("[%d %d %d %d] %d rows: differ: qkv %d, hidden %d, gated %d, normed %d\n", s.hidden,
                             s.attention, s.inner, s.qkv, rows, counts[0], counts[1], counts[2], counts[3]);
    }
    free_layer(l);
  }
  std::printf("check %s: %d wrong\n", format.c_str(), wrong);
  return wrong;
}

static double time_of(int layers, const std::vector<std::vector<ChainOp>>& ops, int rows, bool chain, int first,
                      int count) {
  const auto run = [&] {
    for (int i = 0; i < layers; i++)
      if (chain) run_chain(ops[i].data() + first, count, rows, queue);
      else one_by_one(ops[i].data() + first, count, rows);
  };
  run();
  check(cudaStreamSynchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  run();
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&replay, graph, 0));
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin)), check(cudaEventCreate(&end));
  float best = 1e9;
  for (int i = 0; i < 8; i++) {
    float ms;
    check(cudaEventRecord(begin, stream));
    check(cudaGraphLaunch(replay, stream));
    check(cudaEventRecord(end, stream));
    check(cudaEventSynchronize(end));
    check(cudaEventElapsedTime(&ms, begin, end));
    best = ms < best ? ms : best;
  }
  cudaGraphExecDestroy(replay), cudaGraphDestroy(graph), cudaEventDestroy(begin), cudaEventDestroy(end);
  return 1e3 * best / layers;
}

static void time_layers(const std::vector<int>& all_rows) {
  const int layers = 28;
  const Sizes& s = k7B;
  std::vector<Layer> all;
  for (int i = 0; i < layers; i++) all.push_back(layer_of(s));
  const Step t = step_of(s);
  check(cudaStreamSynchronize(stream));
  std::vector<std::vector<ChainOp>> ops;
  double bytes = 0;
  for (const Layer& l : all) ops.push_back(ops_of(l, t, s));
  for (const ChainOp& op : ops[0])
    if (const Matrix& w = op.product.w; op.kind == ChainOp::Kind::product)
      bytes += (double)(w.codes.bits ? codes_bytes(w.n, w.k, w.codes.bits) + scales_bytes(w.n, w.codes.groups)
                                     : tiles_bytes(w.n, w.k));
  std::printf("%s: us a layer; bytes alone %.1f\n", format.c_str(), bytes / 4.44e6);
  const struct {
    const char* name;
    int first, count;
  } parts[] = {{"layer", 0, (int)ops[0].size()},
               {"o, norm, gate_up", 0, of_bytes() ? 4 : 3},
               {"gate_up, down", of_bytes() ? 3 : 2, of_bytes() ? 3 : 2},
               {"down, norm, qkv", of_bytes() ? 5 : 3, 3}};
  for (int rows : all_rows)
    for (const auto& part : parts)
      std::printf("%2d rows, %s: one by one %.1f, chain %.1f\n", rows, part.name,
                  time_of(layers, ops, rows, false, part.first, part.count),
                  time_of(layers, ops, rows, true, part.first, part.count));
}

// Chains on two streams at once: both end.
static void beside(int repetitions) {
  const Sizes s = {896, 896, 4864, 1152};
  const Layer l = layer_of(s);
  Queue queues[2] = {queue, queue};
  check(cudaStreamCreateWithFlags(&queues[1].stream, cudaStreamNonBlocking));
  queues[1].scratch = new_scratch();
  const std::vector<ChainOp> ops[2] = {ops_of(l, step_of(s), s), ops_of(l, step_of(s), s)};
  check(cudaDeviceSynchronize());
  for (int i = 0; i < repetitions; i++)
    for (int j = 0; j < 2; j++) run_chain(ops[j].data(), (int)ops[j].size(), 8, queues[j]);
  check(cudaDeviceSynchronize());
  std::printf("beside each other: all of %d have ended\n", repetitions);
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "check";
  if (what == "schedule") return schedule(), faults != 0;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  queue.stream = stream, queue.capability = 90;
  queue.scratch = new_scratch();
  if (argc > 2) format = argv[2];
  if (what == "check") return check_bits(argc > 3 ? std::atoi(argv[3]) : 200) != 0;
  if (what == "beside") return beside(argc > 3 ? std::atoi(argv[3]) : 300), 0;
  std::vector<int> rows;
  for (char* at = std::strtok(argc > 3 ? argv[3] : strdup("1,8,32"), ","); at; at = std::strtok(nullptr, ","))
    rows.push_back(std::atoi(at));
  time_layers(rows);
}
