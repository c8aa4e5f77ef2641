// Memory, errors and times for benchmarks of kernels.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

inline void check(cudaError_t result) {
  if (result != cudaSuccess) std::printf("%s\n", cudaGetErrorString(result)), std::exit(1);
}

// Memory of the GPU in which every byte is `byte`, also for kernels of other streams.
template <typename T>
T* memory(size_t bytes, int byte = 0) {
  void* data = nullptr;
  check(cudaMalloc(&data, bytes));
  check(cudaMemset(data, byte, bytes));
  check(cudaDeviceSynchronize());
  return static_cast<T*>(data);
}

// The fewest milliseconds that the stream takes for launch(), which is called so many times.
template <typename Launch>
float least_ms(cudaStream_t stream, int times, const Launch& launch) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin)), check(cudaEventCreate(&end));
  float least = 1e9;
  for (int i = 0; i < times; i++) {
    float ms;
    check(cudaEventRecord(begin, stream));
    launch();
    check(cudaEventRecord(end, stream));
    check(cudaEventSynchronize(end));
    check(cudaEventElapsedTime(&ms, begin, end));
    least = std::min(least, ms);
  }
  cudaEventDestroy(begin), cudaEventDestroy(end);
  return least;
}

// The same of a graph of what record() launches on the stream.
template <typename Record>
float least_ms_of_graph(cudaStream_t stream, int times, const Record& record) {
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  record();
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&replay, graph, 0));
  const float least = least_ms(stream, times, [&] { check(cudaGraphLaunch(replay, stream)); });
  cudaGraphExecDestroy(replay), cudaGraphDestroy(graph);
  return least;
}
