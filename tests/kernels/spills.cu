// One kernel that needs local memory and one that spills: a strict build refuses both.
extern "C" __global__ void indexes_registers(float* data, int n) {
  float values[64];
  for (int i = 0; i < 64; ++i) values[i] = data[i];
  for (int i = 0; i < n; ++i) values[static_cast<int>(data[i]) & 63] += 1;
  for (int i = 0; i < 64; ++i) data[i] = values[i];
}

extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* data, int n) {
  float values[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) values[i] = data[i * n + threadIdx.x];
  for (int k = 0; k < n; ++k) {
#pragma unroll
    for (int i = 0; i < 64; ++i) values[i] = values[i] * values[(i * 7 + 3) % 64] + data[i * k];
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) data[i * n + threadIdx.x] = values[i];
}
