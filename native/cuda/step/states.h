// The recurrent states of a rank's slots: at which positions they are, and their copies to and from spans of the cache.
#pragma once
#include "batch/state_positions.h"
#include "cuda/workspace.h"

namespace as::cuda {

class States {
 public:
  // Both must outlive this.
  States(const Device& device, const Workspace& workspace);

  // How many spans hold a state; 0 if no layer has spans, and no state can be copied there.
  int spans() const { return span_bytes_ ? (int)((bytes_ + span_bytes_ - 1) / span_bytes_) : 0; }
  const StatePositions& positions() const { return positions_; }
  // Queues a step's copies. Throws std::invalid_argument, and queues nothing, if a state that is to be saved is at
  // another position.
  void copy(const Batch& batch);
  // Called before the rows of a step, as StatePositions::begin().
  void begin(const Batch& batch) { positions_.begin(batch); }

 private:
  void queue(const StateCopy& copy, bool to_spans) const;

  const Device& device_;
  StatePositions positions_;
  size_t bytes_ = 0, largest_ = 0, span_bytes_ = 0;  // of a slot's states; of the largest of them; of a span
  int parts_ = 0, layers_ = 0;
  Memory part_list_, layer_list_;
};

}  // namespace as::cuda
