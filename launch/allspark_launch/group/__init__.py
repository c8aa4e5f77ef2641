"""One server group: its mpirun command line, supervisor, agents on other hosts."""
