"""What the machine has: NUMA nodes, cores, GPUs; and where ranks are placed on it."""
