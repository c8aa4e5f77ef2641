// What launches cost, by events between them: of some steps, which are launched one by one for that.
#pragma once
#include <vector>

#include "batch/batch.h"
#include "cuda/kernels/attention/attention.h"
#include "cuda/memory/device.h"
#include "program/fusion.h"

namespace as {
namespace cuda {

// Of a launch, of all steps that were timed. op: those of the program that it computes.
struct OpTime {
  FusedOp op;
  const LayerCache* layer = nullptr;  // of attention
  int launches = 1;                   // from this one on, which compute it together; the others have no parts
  int64_t count = 0;
  double total = 0, least = 0, most = 0;  // seconds
  double bytes = 0, operations = 0;       // in total
};

class OpTimes {
 public:
  explicit OpTimes(const Program& program) : program_(program) {}
  ~OpTimes();

  // The launches of a form of the program, in order; the last one draws, too.
  void set(int form, std::vector<OpTime> launches) { forms_[form] = std::move(launches); }
  void clear();
  // Whether the next step is one to be timed: few are, as a step is slower so.
  bool due();

  // A step of a turn, of two: begin(), mark() before each launch and after the last, mark() before and after draws. Two
  // steps may be under way.
  void begin(int turn) { turns_[turn].used = 0; }
  void mark(int turn, cudaStream_t stream);
  // When all of it has been computed. launches: so many of the form's were started; drawn: the others, too, and draws.
  void add(int turn, int form, size_t launches, bool drawn, const Batch& batch, StepSize size);

  std::vector<OpTime> all() const;

 private:
  struct Turn {
    std::vector<cudaEvent_t> events;
    size_t used = 0;
  };
  double seconds(const Turn& turn, size_t i) const;  // from event i to the next

  const Program& program_;
  std::vector<OpTime> forms_[2];
  Turn turns_[2];
  int64_t steps_ = 0;
};

}  // namespace cuda
}  // namespace as
