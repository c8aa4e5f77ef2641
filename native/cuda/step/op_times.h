// Times of launches, by CUDA events between them. Only some steps are timed: they run launch by launch.
#pragma once
#include <vector>

#include "batch/batch.h"
#include "cuda/kernels/attention/attention.h"
#include "cuda/memory/device.h"
#include "program/fusion.h"

namespace as::cuda {

// The times of a launch over all timed steps. op: the program's ops that it computes.
struct OpTime {
  FusedOp op;
  const LayerCache* layer = nullptr;  // the cache of an attention
  int launches = 1;                   // launches from this one on that compute the op; the others have no parts
  int64_t count = 0;
  double total = 0, least = 0, most = 0;  // seconds
  double bytes = 0, operations = 0;       // in total
};

class OpTimes {
 public:
  explicit OpTimes(const Program& program) : program_(program) {}
  ~OpTimes();

  // The launches of a form of the program, in order. The last one's time includes sampling.
  void set(int form, std::vector<OpTime> launches) { forms_[form] = std::move(launches); }
  void clear();
  // Whether the next step is to be timed. Only few are, because timing slows a step.
  bool due();

  // Two steps may be in flight, so each uses one of two turns. Order of calls for a step: begin(), mark() before each
  // launch and after the last, mark() before and after sampling.
  void begin(int turn) { turns_[turn].used = 0; }
  void mark(int turn, cudaStream_t stream);
  // Called after the step. launches: how many of the form's launches ran. sampled: whether all ran, and sampling.
  void add(int turn, int form, size_t launches, bool sampled, const Batch& batch, StepSize size);

  std::vector<OpTime> all() const;

 private:
  struct Turn {
    std::vector<cudaEvent_t> events;
    size_t used = 0;
  };
  double seconds(const Turn& turn, size_t i) const;  // from event i to event i + 1

  const Program& program_;
  std::vector<OpTime> forms_[2];
  Turn turns_[2];
  int64_t steps_ = 0;
};

}  // namespace as::cuda
