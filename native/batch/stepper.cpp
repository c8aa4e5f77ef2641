#include "batch/stepper.h"

#include <chrono>
#include <optional>
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

bool Stepper::idle() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return jobs_.empty() && !running_;
}

double Stepper::busy_seconds() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return running_ ? now() - began_ : 0;
}

void Stepper::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (await_work(lock)) {
    const bool room = begun_.empty() || (begun_.size() == 1 && !held_ && !begun_.front().error);
    if (!jobs_.empty() && room && (begun_.empty() || begun_.front().model == jobs_.front().model)) begin_next(lock);
    else finish_first(lock);
  }
}

// Waits for a job, or for a step to finish. Returns false at the end.
bool Stepper::await_work(std::unique_lock<std::mutex>& lock) {
  if (begun_.empty()) submitted_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
  const bool room = begun_.size() == 1 && !held_ && !begun_.front().error;
  for (bool done = false; room && !stopping_ && jobs_.empty() && !done;) {  // asynchronous devices do not notify: poll
    lock.unlock();
    done = begun_.front().model->done();
    if (!done) std::this_thread::yield();
    lock.lock();
  }
  return !stopping_;
}

void Stepper::begin_next(std::unique_lock<std::mutex>& lock) {
  Job job = std::move(jobs_.front());
  jobs_.pop_front();
  if (!running_) running_ = true, began_ = now();
  lock.unlock();
  const bool alone = begun_.empty();
  Begun step{job.model, nullptr};
  std::optional<StepOutput> whole;
  bool begun = true;
  try {
    if (job.before) job.before(job.plan), job.before = nullptr;
    begun = job.model->begin(job.plan);
    if (!begun && alone) whole = job.model->step(job.plan, false);
  } catch (...) { step.error = std::current_exception(); }
  if (step.error || begun) begun_.push_back(step);
  if (alone && begun && !step.error) sample(begun_.back());
  held_ = !begun && !step.error && !alone;
  const bool ended = alone && step.error;
  if (!held_) job = {};  // releases its resources without the lock
  step = {};
  lock.lock();
  if (held_) jobs_.push_front(std::move(job));
  if (whole) add_result({std::move(*whole), nullptr});
  if (ended) finish_first(lock);
}

void Stepper::sample(Begun& step) {
  try {
    step.model->sample();
  } catch (...) { step.error = std::current_exception(); }
}

void Stepper::finish_first(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  Result result;
  {
    const Begun step = std::move(begun_.front());
    begun_.pop_front();
    result.error = step.error;
    try {
      if (!step.error) result.output = step.model->finish();
    } catch (...) { result.error = std::current_exception(); }
  }
  held_ = false;
  lock.lock();
  add_result(std::move(result));
  if (begun_.empty() || begun_.front().error) return;
  lock.unlock();
  sample(begun_.front());
  lock.lock();
}

// Called with the lock held.
void Stepper::add_result(Result result) {
  running_ = !begun_.empty();
  if (running_) began_ = now();
  results_.push_back(std::move(result));
  ended_.notify_all();
}

}  // namespace as
