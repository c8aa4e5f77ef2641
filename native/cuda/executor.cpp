#include "cuda/executor.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <tuple>

#include "cuda/kernels/common/stall.h"
#include "cuda/ops/all_reduce.h"
#include "cuda/ops/linear.h"
#include "cuda/weights/dtype16.h"

namespace as::cuda {

CudaExecutor::CudaExecutor(int device, std::shared_ptr<LogitSampler> sampler,
                           std::shared_ptr<Communicator> communicator, const ChipCosts& costs)
    : shared_device_(std::make_shared<Device>(device, costs)),
      device_(*shared_device_),
      sampler_(std::move(sampler)),
      communicator_(communicator && communicator->size() > 1 ? std::move(communicator) : nullptr),
      weights_(device_) {}

CudaExecutor::CudaExecutor(const CudaExecutor& other, std::shared_ptr<LogitSampler> sampler,
                           std::shared_ptr<Communicator> communicator)
    : shared_device_(other.shared_device_),
      device_(*shared_device_),
      sampler_(std::move(sampler)),
      communicator_(communicator && communicator->size() > 1 ? std::move(communicator) : nullptr),
      weights_(device_) {}

// Freeing memory on a thread that has not chosen a GPU would initialize GPU 0, which takes memory there.
CudaExecutor::~CudaExecutor() { cudaSetDevice(device_.index()); }

int CudaExecutor::add_matrix(int rows, int k, const std::string& format, int group, int experts,
                             const std::vector<int>& order) {
  const int id = weights_.add_matrix(rows, k, format, group, experts, order);
  program_.add_matrix(rows, k, format, group);
  return id;
}

int CudaExecutor::add_vector(const std::vector<float>& values) {
  program_.add_vector((int)values.size());
  return weights_.add_vector(values);
}

int CudaExecutor::share_matrix(const CudaExecutor& other, int id) {
  if (other.shared_device_ != shared_device_) throw std::invalid_argument("share_matrix: of a model on another GPU");
  const int own = weights_.share_matrix(other.weights_, id);
  program_.add_weight(other.program_.weights()[id]);
  return own;
}

std::string CudaExecutor::share(int max_rows, int max_outputs, double seconds, bool by_host) {
  if (!communicator_) return "";
  const bool samples = !program_.ops().empty() && program_.ops().back().is(Op::sample);
  exchange_ = std::make_unique<Exchange>(
      device_, communicator_->rank(), communicator_->size(), largest_partial(program_, weights_, max_rows, max_outputs),
      largest_partial(program_, weights_, std::min(max_rows, kPushedRows), std::min(max_outputs, kPushedRows)),
      max_outputs, samples ? program_.ops().back().integer("vocab_size") : 0, seconds, by_host || !may_reach_peers());
  shared_rows_ = max_rows, shared_outputs_ = max_outputs;
  return exchange_->address();
}

void CudaExecutor::connect(const std::vector<std::string>& addresses) {
  if (!communicator_) return;
  if (!exchange_) throw std::logic_error("share() before connect()");
  exchange_->connect(addresses);
}

void CudaExecutor::stream_experts(std::shared_ptr<const ExpertPanels> panels, const StreamLimits& limits,
                                  size_t hot_bytes) {
  if (!expert_exchange_ || runner_)
    throw std::invalid_argument("stream_experts() comes between set_exchange() and allocate()");
  expert_stream_ = std::make_unique<ExpertStream>(device_, std::move(panels), expert_exchange_, limits);
  if (hot_bytes) hot_experts_ = std::make_unique<HotExperts>(device_, *expert_stream_, limits, hot_bytes);
  expert_stream_->set_present(hot_experts_.get());
  streamed_rows_ = limits.rows;
}

CudaExecutor::ExpertTimes CudaExecutor::expert_times() const {
  ExpertTimes times;
  if (!allocated() || !expert_ranks_) return times;
  std::tie(times.messages, times.waited) = expert_ranks_->waited();
  for (int n = 0; n < expert_exchange_->expert_ranks(); n++)
    times.computed.push_back(expert_exchange_->computed(n).nanoseconds);
  return times;
}

void CudaExecutor::allocate(const Limits& limits, int masks, const AdapterLimits& adapters,
                            std::vector<std::shared_ptr<CudaExecutor>> drafts) {
  std::vector<const Model*> models;
  for (const auto& draft : drafts) {
    if (!draft->runner_ || draft->shared_device_ != shared_device_)
      throw std::invalid_argument("allocate() of the draft model, which must be beside this one, comes first");
    models.push_back(draft.get());
  }
  check_drafts(models, limits.max_rows, limits.max_slots);
  drafts_ = std::move(drafts);
  check_adapters(adapters.count, adapters.max_rank, kMaxLaunchRows);
  device_.use();
  weights_.finish();
  allocate_masks(masks, true);
  if (communicator_ &&
      (!exchange_ || !exchange_->connected() || limits.max_rows > shared_rows_ || limits.max_outputs > shared_outputs_))
    throw std::invalid_argument("ranks share() memory for " + std::to_string(limits.max_rows) + " rows and " +
                                std::to_string(limits.max_outputs) + " outputs, and connect(), before allocate()");
  std::optional<Ranks> ranks;
  if (communicator_) ranks.emplace(Ranks{*exchange_, *communicator_});
  if (expert_exchange_ && (!drafts_.empty() || adapters.count))
    throw std::invalid_argument("a mixed group has no drafts by a model and no adapters");
  if (expert_stream_ && limits.max_rows > streamed_rows_)
    throw std::invalid_argument("stream_experts() was for steps of " + std::to_string(streamed_rows_) + " rows");
  expert_ranks_ = expert_exchange_ ? std::make_unique<ExpertRanks>(device_, expert_exchange_, expert_stream_.get(),
                                                                   hot_experts_.get())
                                   : nullptr;
  adapters_ = adapters.count ? std::make_unique<Adapters>(device_, adapters, program_) : nullptr;
  Limits own = limits;
  own.draft_layers = std::max((int)drafts_.size(), 1);
  const bool takes_rows = std::any_of(program_.ops().begin(), program_.ops().end(),
                                      [](const OpNode& op) { return op.is(Op::given_rows) || op.is(Op::add_given); });
  own.given = limits.given || takes_rows ? given_width() : 0;
  runner_ = std::make_unique<CudaRunner>(device_, program_, weights_, own, *sampler_, masks_.get(),
                                         ranks ? &*ranks : nullptr, adapters_.get(), expert_ranks_.get());
  slot_limits_ = SlotLimits{};
  slot_limits_.max_rows = limits.max_rows, slot_limits_.max_outputs = limits.max_outputs;
  slot_limits_.max_slots = limits.max_slots, slot_limits_.max_length = limits.max_length;
  slot_limits_.span_size = limits.span_size, slot_limits_.num_spans = limits.num_spans;
  slot_limits_.windows = program_.windows(), slot_limits_.masks = masks;
  slot_limits_.hidden_states = runner_->hidden_states();
  slot_limits_.adapters.assign(adapters.count, 0);
  slot_limits_.state_spans = runner_->state_spans();
  slot_limits_.whole = needs_whole_sequences(), slot_limits_.merged = merged_rows();
  slot_limits_.given_width = runner_->needs().given, slot_limits_.rotary_parts = runner_->needs().places;
  slot_limits_.images = sees_images_whole();
  draft_runners_.clear();
  for (const auto& draft : drafts_)
    draft->runner_->share_hidden(*runner_), draft_runners_.emplace_back(*draft->runner_);
  make_decoder();
  allocated_.store(true, std::memory_order_release);
}

void CudaExecutor::make_decoder() {
  std::unique_ptr<Drafter> drafter;
  std::vector<Runner*> programs;
  for (DraftRunner& runner : draft_runners_) programs.push_back(&runner);
  if (!drafts_.empty()) drafter = make_drafter(programs, drafts_.front()->is_draft_head(), slot_limits_);
  decoder_.emplace(*runner_, std::move(drafter), host_spans_.get(), slot_limits_);
}

std::vector<SpanRange> CudaExecutor::spans() const {
  if (!runner_) return {};
  std::vector<SpanRange> all = runner_->spans();
  for (const auto& draft : drafts_)
    all.insert(all.end(), draft->runner_->spans().begin(), draft->runner_->spans().end());
  return all;
}

void CudaExecutor::allocate_host_cache(int spans, int file, size_t offset) {
  if (!runner_) throw std::invalid_argument("allocate() before allocate_host_cache()");
  if (file < 0) {
    host_spans_ = std::make_unique<HostSpans>(device_, this->spans(), slot_limits_.num_spans, spans);
  } else {
    auto spans_of_file =
        std::make_unique<FileSpans>(device_, this->spans(), slot_limits_.num_spans, spans, file, offset);
    file_spans_ = spans_of_file.get();
    host_spans_ = std::move(spans_of_file);
  }
  slot_limits_.host_spans = spans;
  make_decoder();
}

std::pair<std::vector<SpanCopy>, int> CudaExecutor::verify_host_cache() const {
  if (!file_spans_) throw std::invalid_argument("there is no host cache in a file");
  return file_spans_->verify();
}

std::shared_ptr<Adapter> CudaExecutor::new_adapter() const {
  if (!adapters_) throw std::invalid_argument("there is no room for adapters");
  return adapters_->make();
}

void CudaExecutor::set_adapter(int index, std::shared_ptr<Adapter> adapter) {
  check_adapter(index);
  const bool loaded = adapter != nullptr;
  const auto tell = [&](bool loaded) {
    slot_limits_.adapters[index] = loaded;
    decoder_->set_adapter(index, loaded);
  };
  tell(false);
  adapters_->set(index, std::move(adapter));
  tell(loaded);
}

void CudaExecutor::check_loaded() const {
  if (unloaded_) throw std::invalid_argument("the GPU's memory was given back: load() before steps");
}

void CudaExecutor::give_experts_back() {
  if (hot_experts_) hot_experts_->give_back();
  if (expert_stream_) expert_stream_->give_back();
}

void CudaExecutor::unload() {
  if (!runner_) throw std::invalid_argument("allocate() before unload()");
  if (unloaded_) return;
  device_.use();
  device_.wait();
  const auto load_drafts = [&] {
    for (const auto& draft : drafts_) draft->load();
  };
  try {
    for (const auto& draft : drafts_) draft->unload();
    weights_.unload();
  } catch (...) {
    load_drafts();
    throw;
  }
  runner_->unload();
  give_experts_back();
  unloaded_ = true;
}

void CudaExecutor::load() {
  if (!unloaded_) return;
  device_.use();
  runner_->load();
  try {
    if (expert_stream_) expert_stream_->take_again();
    if (hot_experts_) hot_experts_->take_again();
    weights_.load();
    for (const auto& draft : drafts_) draft->load();
  } catch (...) {
    for (const auto& draft : drafts_) draft->unload();
    weights_.unload();
    runner_->unload();
    give_experts_back();
    throw;
  }
  unloaded_ = false;
}

std::pair<int, int> CudaExecutor::warm_up(int count) {
  check_loaded();
  if (!runner_) throw std::invalid_argument("allocate() before warm_up()");
  std::pair<int, int> counts(0, 0);  // one after the other
  const auto add = [&](auto& runner) {
    const auto [done, all] = runner.warm_up(counts.first < counts.second ? 0 : count);
    counts.first += done, counts.second += all;
  };
  for (const auto& draft : drafts_) add(*draft);
  add(*runner_);
  return counts;
}

// Tells ranks of experts that a step has ended, also if its plan is rejected, which they do not know.
struct CudaExecutor::EndOfStep {
  ExpertRanks* experts;
  ~EndOfStep() {
    if (experts) experts->end_step();
  }
};

StepOutput CudaExecutor::step(std::string_view plan, bool want_logits) {
  const EndOfStep end{expert_ranks_.get()};
  check_loaded();
  if (!decoder_) throw std::invalid_argument("allocate() before step()");
  return decoder_->step(plan, want_logits);
}

bool CudaExecutor::begin(std::string_view plan) {
  EndOfStep end{expert_ranks_.get()};  // if begin() throws
  check_loaded();
  if (!decoder_) throw std::invalid_argument("allocate() before step()");
  const bool begun = decoder_->begin(plan);
  end.experts = nullptr;
  return begun;
}

void CudaExecutor::sample() { decoder_->sample(); }

void CudaExecutor::set_profiling(bool on) {
  if (runner_) runner_->set_profiling(on);
}

StepOutput CudaExecutor::finish() {
  const EndOfStep end{expert_ranks_.get()};
  return decoder_->finish();
}

void CudaExecutor::stall() {
  device_.use();
  cuda::stall(device_.queue());
  device_.wait();
}

std::vector<float> CudaExecutor::multiply(int id, const float* x, const float* bias, int rows, GemmAlgo algo,
                                          bool rounded) {
  const Matrix& m = weights_.matrix(id);
  std::vector<float> y((size_t)rows * m.n);
  if (!rows) return y;
  device_.use();
  Memory in((size_t)rows * m.k * sizeof(float), "activations"), out(y.size() * sizeof(float), "activations"),
      added(bias ? m.n * sizeof(float) : 0, "a bias"),
      tiles(m.takes_tiles() ? tiles_bytes(rows, m.k) : 0, "activations"),
      widened(m.kind == Kind::quantized && (algo == GemmAlgo::any || algo == GemmAlgo::prefill)
                  ? widened_bytes(m.n, m.k, false, 1 << 30)
                  : 0,
              "widened weights"),
      bytes(m.takes_bytes() ? byte_rows_bytes(rows, m.k) : 0, "quantized activations");
  check(cudaMemcpy(in.as(), x, in.size(), cudaMemcpyHostToDevice), "copying rows");
  if (bias) check(cudaMemcpy(added.as(), bias, added.size(), cudaMemcpyHostToDevice), "copying a bias");
  // Copies may still be running, and other streams do not wait for them.
  check(cudaStreamSynchronize(nullptr), "copying rows");
  const Queue queue = device_.queue();
  GemmArgs p;
  p.w = m, p.w.quants.in_blocks = has_block_scales(m, queue), p.bias = bias ? added.as<float>() : nullptr;
  p.x = {in.as<float>(), nullptr, m.k}, p.y = {out.as<float>(), nullptr, m.n};
  const Memory values16(rounded ? tiles_bytes(rows, m.n) : 0, "activations");
  if (rounded) p.y = {nullptr, values16.as<uint16_t>(), m.n, m.dtype};
  p.widened = widened.as<uint16_t>();
  if (m.takes_bytes()) p.bytes = byte_rows(bytes.as(), rows, m.k);
  Gemm gemm = gemm_of(p);
  gemm.fuses = m.takes_bytes();
  if (m.takes_tiles()) {
    const Rows plain = p.x;
    p.x = {nullptr, tiles.as<uint16_t>(), m.k, m.dtype};
    if (m.order) gather_columns(plain, m.order, rows, p.x, queue);
    else to_tiles(in.as<float>(), rows, p.x, queue);
  }
  const GemmChoice choice = choose_gemm(device_.chip(m.dtype), gemm, rows, algo);
  if (m.takes_bytes() && !choice.fused) quantize_activations(p, rows, queue);
  launch_gemm(p, rows, choice, queue);
  device_.wait();
  if (rounded) {
    std::vector<uint16_t> values(values16.size() / sizeof(uint16_t));
    check(cudaMemcpy(values.data(), values16.as(), values16.size(), cudaMemcpyDeviceToHost), "copying rows");
    for (int row = 0; row < rows; row++)
      for (int column = 0; column < m.n; column++)
        y[(size_t)row * m.n + column] = cuda::widened(values[tile_offset(row, column, blocks_of(m.n))], m.dtype);
    return y;
  }
  check(cudaMemcpy(y.data(), out.as(), out.size(), cudaMemcpyDeviceToHost), "copying rows");
  return y;
}

std::vector<float> CudaExecutor::multiply_experts(int id, const float* x, const int* chosen, int rows, int top,
                                                  GemmAlgo algo, int tile_rows, bool rounded) {
  Matrix m = weights_.matrix(id);
  if (m.takes_bytes() && device_.capability() != 90)
    throw std::invalid_argument("stacks of experts of type " + format_of(m) + " are for capability 9.0 (Hopper)");
  if (rounded && m.kind == Kind::f32) throw std::invalid_argument("entries of experts in float32 are not rounded");
  m.max_split_k = 1;
  const int entries = rows * top;
  std::vector<float> y((size_t)entries * m.n);
  if (!entries) return y;
  device_.use();
  Memory in((size_t)rows * m.k * sizeof(float), "activations"),
      out(rounded ? tiles_bytes(entries, m.n) : y.size() * sizeof(float), "activations"),
      tiles(m.takes_tiles() ? tiles_bytes(rows, m.k) : 0, "activations"),
      bytes(m.takes_bytes() ? byte_rows_bytes(rows, m.k) : 0, "quantized activations"),
      memory(routing_bytes(rows, top, m.experts), "rows of experts");
  ExpertGemmArgs e;
  GemmArgs& p = e.gemm;
  e.routing.top = top, e.routing.end = m.experts, e.gathers = true;
  place_routing(memory.as(), rows, m.experts, e.routing);
  check(cudaMemcpy(in.as(), x, in.size(), cudaMemcpyHostToDevice), "copying rows");
  check(cudaMemcpy(e.routing.entry_of, chosen, entries * sizeof(int), cudaMemcpyHostToDevice), "copying experts");
  check(cudaStreamSynchronize(nullptr), "copying rows");
  p.w = m, p.x = {in.as<float>(), nullptr, m.k};
  p.y = {rounded ? nullptr : out.as<float>(), rounded ? out.as<uint16_t>() : nullptr, m.n, m.dtype};
  if (m.takes_tiles()) {
    p.x = {nullptr, tiles.as<uint16_t>(), m.k, m.dtype};
    to_tiles(in.as<float>(), rows, p.x, device_.queue());
  }
  if (m.takes_bytes()) {
    p.bytes = byte_rows(bytes.as(), rows, m.k), e.x_rows = rows;
    quantize_activations(p, rows, device_.queue());
  }
  const ExpertChoice choice = choose_expert_gemm(device_.chip(m.dtype), m.kind, entries, m.experts, algo, tile_rows);
  group_entries(e.routing, rows, choice.tile_rows, device_.queue());
  gemm_experts(e, entries, choice.tile_rows, device_.queue(), choice.algo);
  device_.wait();
  std::vector<int> entry_of(entries);
  check(cudaMemcpy(entry_of.data(), e.routing.entry_of, entries * sizeof(int), cudaMemcpyDeviceToHost), "copying rows");
  std::vector<char> made(out.size());
  check(cudaMemcpy(made.data(), out.as(), out.size(), cudaMemcpyDeviceToHost), "copying rows");
  const float* values = reinterpret_cast<const float*>(made.data());
  const uint16_t* values16 = reinterpret_cast<const uint16_t*>(made.data());
  for (int i = 0; i < entries; i++)
    for (int column = 0; column < m.n; column++)
      y[(size_t)i * m.n + column] =
          rounded ? cuda::widened(values16[tile_offset(entry_of[i], column, blocks_of(m.n))], m.dtype)
                  : values[(size_t)entry_of[i] * m.n + column];
  return y;
}

std::vector<KernelTable::Row> CudaExecutor::kernels() const {
  if (!runner_) throw std::invalid_argument("allocate() before kernels()");
  return runner_->kernels();
}

std::vector<std::pair<int, int>> CudaExecutor::expert_tiles(int row_set) const {
  if (!runner_) throw std::invalid_argument("allocate() before expert_tiles()");
  const Routing& routing = runner_->routing(row_set);
  int count = 0;
  device_.use(), device_.wait();
  check(cudaMemcpy(&count, routing.tile_count, sizeof count, cudaMemcpyDeviceToHost), "reading tiles");
  std::vector<ExpertTile> tiles(count);
  check(cudaMemcpy(tiles.data(), routing.tiles, count * sizeof(ExpertTile), cudaMemcpyDeviceToHost), "reading tiles");
  std::vector<std::pair<int, int>> found;
  for (const ExpertTile& tile : tiles) found.emplace_back(tile.expert, tile.count);
  return found;
}

void CudaExecutor::sum_ranks(const float* parts, int ranks, int rows, int width, const float* norm,
                             const std::string& dtype, bool adds, const std::string& way, float* y, float* normed) {
  if (ranks < 1 || ranks > kMaxRanks || rows < 1 || width < 1)
    throw std::invalid_argument("sum_ranks: 1 to " + std::to_string(kMaxRanks) + " ranks, and rows that are some");
  if (way != "read" && way != "pushed" && way != "host")
    throw std::invalid_argument("sum_ranks: way must be read, pushed or host, got " + way);
  device_.use();
  const bool is_dtype16 = dtype != "float32", pushed = way == "pushed", by_host = way == "host";
  const size_t count = (size_t)rows * width, bytes = count * sizeof(float),
               half = partial_bytes(rows, width, is_dtype16);
  Memory in(bytes, "partial sums"), all(ranks * half, "partial sums"),
      others(pushed ? ranks * half : 0, "places of partial sums"), flags(4096, "flags"),
      sent(by_host ? ranks * half : 0, "partial sums", Memory::Where::host),
      told(by_host ? ranks * 4096 : 0, "flags", Memory::Where::host), step(sizeof(int), "a step"),
      failed(sizeof(int), "a flag", Memory::Where::host), weight(width * sizeof(float), ""), total(bytes, "a sum"),
      result(bytes, "its norm");
  const auto copy = [](const Memory& to, const void* from, size_t size) {
    check(cudaMemcpy(to.as(), from, size, cudaMemcpyHostToDevice), "copying rows");
    check(cudaStreamSynchronize(nullptr), "copying rows");
  };
  RankSum sum;
  sum.peers.world = ranks, sum.peers.step = step.as<int>(), sum.peers.failed = failed.as<int>();
  const std::vector<uint32_t> come(kMaxRanks, 1);
  if (!by_host) copy(flags, come.data(), come.size() * sizeof(uint32_t));
  copy(weight, norm, weight.size()), copy(total, y, bytes);
  for (int r = 0; r < ranks; r++) {
    char* own = all.as() + r * half;
    copy(in, parts + r * count, bytes);
    Rows rows_of{reinterpret_cast<float*>(own), nullptr, width};
    if (is_dtype16) rows_of = {nullptr, reinterpret_cast<uint16_t*>(own), width, dtype16_of(dtype)};
    to_tiles(in.as<float>(), rows, rows_of, device_.queue());
    device_.wait();
    sum.peers.partials[r] = own, sum.peers.flags[r] = flags.as<uint32_t>();
    sum.peers.pushed[r] = r ? others.as() : all.as();
  }
  if (pushed) sum.peers.pushed_bytes = half;
  sum.calls = 2, sum.is_dtype16 = is_dtype16, sum.dtype = dtype16_of(dtype), sum.adds = adds;
  sum.y = {total.as<float>(), nullptr, width}, sum.normed = {result.as<float>(), nullptr, width};
  sum.norm = {weight.as<float>(), 1e-6f, false};
  if (by_host) {
    for (int r = 0; r < ranks; r++) sum.peers.flags[r] = told.as<uint32_t>() + r * 1024;
    // Flags are set before a rank runs. At first it sends its own sums alone; the second time all are there.
    for (int i = 0; i < 2 * ranks; i++) {
      const int rank = i % ranks;
      for (int r = 0; r < ranks; r++) std::fill_n(sum.peers.reached(r), kHostCtas, r == rank ? 0 : 1);
      sum.peers.rank = rank, sum.peers.sent = sent.as() + rank * half, sum.peers.local = flags.as<uint32_t>();
      for (int r = 0; r < ranks; r++) sum.peers.partials[r] = (r == rank ? all.as() : sent.as()) + r * half;
      copy(total, y, bytes);
      cuda::sum_ranks(sum, rows, device_.queue());
      device_.wait();
      if (!sum.peers.reached(rank)[0]) throw std::logic_error("sum_ranks: a rank has not told that it is there");
    }
  } else {
    cuda::sum_ranks(sum, rows, device_.queue());
    device_.wait();
  }
  check(cudaMemcpy(y, total.as(), bytes, cudaMemcpyDeviceToHost), "copying rows");
  check(cudaMemcpy(normed, result.as(), bytes, cudaMemcpyDeviceToHost), "copying rows");
}

}  // namespace as::cuda
