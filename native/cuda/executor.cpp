#include "cuda/executor.h"

#include <stdexcept>

namespace as {
namespace cuda {

CudaExecutor::CudaExecutor(int device, std::shared_ptr<LogitSampler> sampler)
    : device_(device), sampler_(std::move(sampler)), weights_(device_) {}

int CudaExecutor::add_matrix(int n, int k, const std::string& format) {
  const int id = weights_.add_matrix(n, k, format);
  program_.add_matrix(n, k, format, 0);
  return id;
}

int CudaExecutor::add_vector(const std::vector<float>& values) {
  program_.add_vector((int)values.size());
  return weights_.add_vector(values);
}

void CudaExecutor::allocate(const Limits& limits, int masks) {
  if (masks < 0) throw std::invalid_argument("allocate: " + std::to_string(masks) + " masks");
  weights_.finish();
  if (masks > 0 && !program_.ops().empty() && program_.ops().back().is("sample"))
    masks_ = std::make_shared<Masks>(masks, program_.ops().back().integer("vocab_size"));
  runner_ = std::make_unique<CudaRunner>(device_, program_, weights_, limits, *sampler_, masks_.get());
  slot_limits_ = SlotLimits{};
  slot_limits_.max_rows = limits.max_rows, slot_limits_.max_outputs = limits.max_outputs;
  slot_limits_.max_slots = limits.max_slots, slot_limits_.max_length = limits.max_length;
  slot_limits_.span_size = limits.span_size, slot_limits_.num_spans = limits.num_spans;
  slot_limits_.windows = program_.windows(), slot_limits_.masks = masks;
  slot_limits_.hidden_states = runner_->hidden_states();
  decoder_.emplace(*runner_, nullptr, slot_limits_);
}

void CudaExecutor::allocate_host_cache(int spans) {
  if (!runner_) throw std::invalid_argument("allocate() before allocate_host_cache()");
  host_spans_ = std::make_unique<HostSpans>(device_, runner_->layers(), slot_limits_.num_spans, spans);
  slot_limits_.host_spans = spans;
  decoder_.emplace(*runner_, host_spans_.get(), slot_limits_);
}

StepOutput CudaExecutor::step(const std::string& plan, bool want_logits) {
  if (!decoder_) throw std::invalid_argument("allocate() before step()");
  return decoder_->step(plan, want_logits);
}

bool CudaExecutor::begin(const std::string& plan) {
  if (!decoder_) throw std::invalid_argument("allocate() before step()");
  return decoder_->begin(plan);
}

void CudaExecutor::draw() { decoder_->draw(); }

StepOutput CudaExecutor::finish() { return decoder_->finish(); }

std::vector<float> CudaExecutor::multiply(int id, const float* x, const float* bias, int rows, By by) {
  const Matrix& m = weights_.matrix(id);
  std::vector<float> y((size_t)rows * m.n);
  if (!rows) return y;
  device_.use();
  Memory in((size_t)rows * m.k * sizeof(float), "activations"), out(y.size() * sizeof(float), "activations"),
      added(bias ? m.n * sizeof(float) : 0, "a bias"), tiles(m.tiles ? tiles_bytes(rows, m.k) : 0, "activations");
  check(cudaMemcpy(in.as(), x, in.size(), cudaMemcpyHostToDevice), "copying rows");
  if (bias) check(cudaMemcpy(added.as(), bias, added.size(), cudaMemcpyHostToDevice), "copying a bias");
  Product p;
  p.w = m, p.bias = bias ? added.as<float>() : nullptr;
  p.x = {in.as<float>(), nullptr, m.k}, p.y = {out.as<float>(), nullptr, m.n};
  if (m.tiles) {
    p.x = {nullptr, tiles.as<uint16_t>(), m.k};
    to_tiles(in.as<float>(), rows, p.x, device_.queue());
    linear_bf16(p, rows, device_.queue(), by);
  } else {
    linear_f32(p, rows, device_.queue());
  }
  device_.wait();
  check(cudaMemcpy(y.data(), out.as(), out.size(), cudaMemcpyDeviceToHost), "copying rows");
  return y;
}

}  // namespace cuda
}  // namespace as
