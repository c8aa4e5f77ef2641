// Runs steps in order on its own thread, so that the next step starts before anyone has read the previous result. On
// asynchronous devices it queues the next step while one is computed.
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
  // A step of a model. `before` is called with the plan before it runs.
  struct Job {
    std::shared_ptr<StepModel> model;
    std::string plan;
    std::function<void(const std::string& plan)> before;
  };

  Stepper();
  ~Stepper();
  Stepper(const Stepper&) = delete;
  Stepper& operator=(const Stepper&) = delete;

  // Queues a step and returns at once.
  void submit(Job job);
  // Waits for the oldest step's output and returns it, or throws its exception. std::logic_error if there is none.
  StepOutput collect();
  // Waits until all submitted steps have run. Their results can still be collected.
  void drain();
  // Whether all submitted steps have run: collect() does not wait.
  bool idle() const;
  // Seconds since the running step began; 0: none is running.
  double busy_seconds() const;

 private:
  struct Result {
    StepOutput output;
    std::exception_ptr error;
  };
  // A step that was begun or failed to begin.
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
  // Used by the stepper's thread only.
  std::deque<Begun> begun_;
  bool held_ = false;  // do not begin the next job before the begun steps have ended

  double began_ = 0;  // steady clock in seconds; 0: no step is running
  bool running_ = false, stopping_ = false;
  std::thread thread_;
};

}  // namespace as
