#include "batch/masks.h"

#include <chrono>
#include <stdexcept>

namespace as {

Masks::Masks(int rows, int vocab_size) : words_((vocab_size + 31) / 32), bits_((size_t)rows * words_), ready_(rows) {}

void Masks::check(int index) const {
  if (index < 0 || index >= rows())
    throw std::out_of_range("mask " + std::to_string(index) + " of " + std::to_string(rows()));
}

void Masks::mark(const std::vector<int>& rows, bool ready) {
  for (const int row : rows) check(row);
  std::lock_guard<std::mutex> lock(mutex_);
  for (const int row : rows) ready_[row] = ready;
}

void Masks::publish(const std::vector<int>& rows) {
  mark(rows, true);
  published_.notify_all();
}

void Masks::clear(const std::vector<int>& rows) { mark(rows, false); }

const uint32_t* Masks::wait(int index, double timeout) {
  check(index);
  std::unique_lock<std::mutex> lock(mutex_);
  const auto done = [&] { return ready_[index] || !failure_.empty(); };
  if (!published_.wait_for(lock, std::chrono::duration<double>(timeout), done))
    throw std::runtime_error("mask " + std::to_string(index) + " was not written within " +
                             std::to_string((int)timeout) + " s");
  if (!failure_.empty()) throw std::runtime_error(failure_);
  return row(index);
}

void Masks::fail(const std::string& message) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failure_ = message.empty() ? "masks are not written any more" : message;
  }
  published_.notify_all();
}

}  // namespace as
