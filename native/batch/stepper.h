// Runs steps one after the other on a thread of its own, so that the next one starts before anybody has looked at the
// result of the last one. Of devices that work by themselves it queues the next one meanwhile.
#pragma once
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "batch/decoder.h"

namespace as {

class Stepper {
 public:
  // A step of a model. before: what comes before its plan is followed.
  struct Job {
    std::shared_ptr<StepModel> model;
    std::string plan;
    std::function<void()> before;
  };

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
  // A step that was begun, or has failed to.
  struct Begun {
    std::shared_ptr<StepModel> model;
    std::exception_ptr error;
  };
  void run();
  bool await_work(std::unique_lock<std::mutex>& lock);
  void begin_next(std::unique_lock<std::mutex>& lock);
  void finish_first(std::unique_lock<std::mutex>& lock);
  void sample(Begun& step);
  void add_result(Result result);

  mutable std::mutex mutex_;
  std::condition_variable submitted_, ended_;
  std::deque<Job> jobs_;
  std::deque<Result> results_;
  // On the stepper's thread alone.
  std::deque<Begun> begun_;
  bool held_ = false;  // the next job is not to be begun before the steps that were have ended

  double began_ = 0;  // on the steady clock, in seconds; 0: no step runs
  bool running_ = false, stopping_ = false;
  std::thread thread_;
};

}  // namespace as
