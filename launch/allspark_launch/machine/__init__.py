"""The machine: NUMA nodes, cores and GPUs, and the placement of ranks."""
