// The smallest kernel, for tests of images.
struct Params {
  unsigned* out;
};
extern "C" __global__ void minimal(const __grid_constant__ Params p) { *p.out = 1; }
