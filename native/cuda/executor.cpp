#include "cuda/executor.h"

#include <stdexcept>

namespace as {
namespace cuda {

CudaExecutor::CudaExecutor(int device, std::shared_ptr<LogitSampler> sampler)
    : device_(device), sampler_(std::move(sampler)), weights_(device_) {}

int CudaExecutor::add_matrix(int n, int k, const std::string& format, int group) {
  const int id = weights_.add_matrix(n, k, format, group);
  program_.add_matrix(n, k, format, group);
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
  decoder_.emplace(*runner_, nullptr, nullptr,
                   SlotLimits{limits.max_rows, limits.max_outputs, limits.max_slots, limits.max_length,
                              limits.span_size, limits.num_spans, program_.windows(), masks, runner_->hidden_states()});
}

StepOutput CudaExecutor::step(const std::string& plan, bool want_logits) {
  if (!decoder_) throw std::invalid_argument("allocate() before step()");
  return decoder_->step(plan, want_logits);
}

std::vector<float> CudaExecutor::multiply(int id, const float* x, const float* bias, int rows, By by) {
  const Matrix& m = weights_.matrix(id);
  std::vector<float> y((size_t)rows * m.n);
  if (!rows) return y;
  device_.use();
  Memory in((size_t)rows * m.k * sizeof(float), "activations"), out(y.size() * sizeof(float), "activations"),
      added(bias ? m.n * sizeof(float) : 0, "a bias"),
      tiles(m.takes_tiles() ? tiles_bytes(rows, m.k) : 0, "activations"),
      widened(m.kind == Kind::codes && (by == By::any || by == By::wide) ? widened_bytes(m.n, m.k, false, 1 << 30) : 0,
              "widened weights"),
      bytes(m.takes_bytes() ? byte_rows_bytes(rows, m.k) : 0, "quantized activations");
  check(cudaMemcpy(in.as(), x, in.size(), cudaMemcpyHostToDevice), "copying rows");
  if (bias) check(cudaMemcpy(added.as(), bias, added.size(), cudaMemcpyHostToDevice), "copying a bias");
  Product p;
  p.w = m, p.bias = bias ? added.as<float>() : nullptr;
  p.x = {in.as<float>(), nullptr, m.k}, p.y = {out.as<float>(), nullptr, m.n};
  p.widened = widened.as<uint16_t>();
  if (m.takes_bytes()) p.bytes = byte_rows(bytes.as(), rows, m.k);
  if (m.takes_tiles()) {
    p.x = {nullptr, tiles.as<uint16_t>(), m.k};
    to_tiles(in.as<float>(), rows, p.x, device_.queue());
    if (m.tiles) linear_bf16(p, rows, device_.queue(), by);
    else linear_quantized(p, rows, device_.queue(), by);
  } else if (m.kind == Kind::integers) {
    linear_integer(p, rows, device_.queue(), by);
  } else if (m.kind == Kind::float8) {
    linear_float8(p, rows, device_.queue());
  } else {
    linear_f32(p, rows, device_.queue());
  }
  device_.wait();
  check(cudaMemcpy(y.data(), out.as(), out.size(), cudaMemcpyDeviceToHost), "copying rows");
  return y;
}

}  // namespace cuda
}  // namespace as
