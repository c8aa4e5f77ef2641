// Runs steps one after the other on a thread of its own, so that the next one starts before anybody has looked at the
// result of the last one.
#pragma once
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "batch/decoder.h"

namespace as {

class Stepper {
 public:
  using Job = std::function<StepOutput()>;

  Stepper();
  ~Stepper();
  Stepper(const Stepper&) = delete;
  Stepper& operator=(const Stepper&) = delete;

  // Queues a step. Returns at once.
  void submit(Job job);
  // The oldest step's output, once it is there; throws what it threw. std::logic_error if there is none.
  StepOutput collect();
  // Waits until all that was submitted has run; it can still be collected.
  void drain();
  // How long the running step has been at it; 0: none runs.
  double busy_seconds() const;

 private:
  struct Result {
    StepOutput output;
    std::exception_ptr error;
  };
  void run();

  mutable std::mutex mutex_;
  std::condition_variable submitted_, ended_;
  std::deque<Job> jobs_;
  std::deque<Result> results_;
  double began_ = 0;  // on the steady clock, in seconds; 0: no step runs
  bool running_ = false, stopping_ = false;
  std::thread thread_;
};

}  // namespace as
