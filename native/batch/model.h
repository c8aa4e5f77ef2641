// The parts of a rank's model that all devices share: its program, its masks and the limits of plans.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "batch/decoder.h"
#include "batch/masks.h"
#include "batch/slots.h"
#include "program/program.h"

namespace as {

class Model : public StepModel {
 public:
  Program& program() { return program_; }
  const Program& program() const { return program_; }
  // Whether the program is a draft head, which takes the hidden states of another program.
  bool is_draft_head() const;
  // Whether rows attend to later ones, so that a step has all rows of a sequence.
  bool needs_whole_sequences() const;
  // Whether rows of an image in a prompt see each other.
  bool sees_images_whole() const;
  // How many rows make an output of such a program; 0: all rows of a sequence.
  int merged_rows() const;
  // The width of the rows that plans may give this program; 0: it takes none.
  int given_width() const;
  // Null before allocation, on ranks that do not sample, and if there are no masks.
  std::shared_ptr<Masks> masks() const { return masks_; }

 protected:
  // Throw std::invalid_argument for an invalid number of masks or adapters or an invalid adapter rank. samples: whether
  // this rank samples; other ranks have no masks.
  void allocate_masks(int masks, bool samples);
  // Throws if these cannot draft together for steps of so many rows and slots: one draft model, or the layers of a
  // head. They read this program's span tables, and may be behind it, so each of their cache groups must be one of this
  // program's, which keeps every position.
  void check_drafts(const std::vector<const Model*>& drafts, int max_rows, int max_slots) const;
  static void check_adapters(int count, int max_rank, int highest_rank);
  // Throws std::invalid_argument if there is no adapter with this index.
  void check_adapter(int index) const;
  // The number of targets that lora ops refer to.
  int adapter_targets() const;

  Program program_;
  std::shared_ptr<Masks> masks_;
  SlotLimits slot_limits_;
};

}  // namespace as
