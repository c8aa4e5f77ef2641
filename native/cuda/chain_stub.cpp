// Until there is a kernel.
#include "cuda/chain.h"

namespace as {
namespace cuda {

int chained(const ChainOp*, int count, int rows, const Queue&) { return rows <= 32 ? count : 0; }
void run_chain(const ChainOp* ops, int count, int rows, const Queue& queue) {
  for (int i = 0; i < count; i++) run_op(ops[i], rows, queue);
}

}  // namespace cuda
}  // namespace as
