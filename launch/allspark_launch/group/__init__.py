"""One server group: the plan of its start, its mpirun line, its supervisor, its agents on other hosts."""
