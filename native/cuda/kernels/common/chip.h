// Properties of a GPU on which the choice among kernels depends.
#pragma once

namespace as::cuda {

struct Chip {
  int capability = 0;        // 90 is 9.0
  int sms = 0;               // streaming multiprocessors
  int shared_bytes = 0;      // shared memory that a CTA may have
  int prefill_clusters = 0;  // clusters of gemm_prefill()'s largest tile that run at once; 0 unless capability is 90
};

}  // namespace as::cuda
