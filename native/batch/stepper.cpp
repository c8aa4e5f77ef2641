#include "batch/stepper.h"

#include <chrono>
#include <stdexcept>

namespace as {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

Stepper::Stepper() : thread_([this] { run(); }) {}

Stepper::~Stepper() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    jobs_.clear();
  }
  submitted_.notify_all();
  thread_.join();
}

void Stepper::submit(Job job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  submitted_.notify_one();
}

StepOutput Stepper::collect() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (results_.empty() && jobs_.empty() && !running_)
    throw std::logic_error("there is no step to collect: none was submitted");
  ended_.wait(lock, [this] { return !results_.empty(); });
  Result result = std::move(results_.front());
  results_.pop_front();
  lock.unlock();
  if (result.error) std::rethrow_exception(result.error);
  return std::move(result.output);
}

void Stepper::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait(lock, [this] { return jobs_.empty() && !running_; });
}

double Stepper::busy_seconds() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return running_ ? now() - began_ : 0;
}

void Stepper::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    submitted_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    Result result;
    {
      const Job job = std::move(jobs_.front());
      jobs_.pop_front();
      running_ = true, began_ = now();
      lock.unlock();
      try {
        result.output = job();
      } catch (...) { result.error = std::current_exception(); }
    }  // what the job holds is let go of without the lock
    lock.lock();
    running_ = false;
    results_.push_back(std::move(result));
    ended_.notify_all();
  }
}

}  // namespace as
