"""The gRPC service of rank 0: listeners, calls, client streams and their limits."""
