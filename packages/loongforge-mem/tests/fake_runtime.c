/* The two calls of the CUDA runtime that torch makes before it asks a pluggable allocator for memory. */
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
