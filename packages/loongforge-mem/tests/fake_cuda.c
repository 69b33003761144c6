/* A CUDA driver without a GPU: host memory, streams that are numbers, events that are done when the test says so. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef struct { uint64_t stream; int recorded; } Event;

static size_t budget = (size_t)1 << 34, used;
static int busy_streams[64], capturing[64], calls_in_capture;
static uint64_t capture_ids[64], next_capture = 1;
static int events, pinned, mallocs, frees, creates, releases, records, waits, queries, syncs, mode = 0;
static struct { uint64_t base; size_t bytes; } blocks[4096];
static size_t handle_bytes[65536];
static uint64_t next_handle = 1;

#define SLOT(s) ((uint64_t)(s) % 64)
static int any_capture(void) { for (int i = 0; i < 64; i++) if (capturing[i]) return 1; return 0; }

void fake_budget(size_t bytes) { budget = bytes; }
void fake_busy(uint64_t stream, int busy) { busy_streams[SLOT(stream)] = busy; }
void fake_capture(uint64_t stream, int on) { capturing[SLOT(stream)] = on; if (on) capture_ids[SLOT(stream)] = next_capture++; }
int fake_count(const char *name) {
  if (!strcmp(name, "mallocs")) return mallocs;
  if (!strcmp(name, "frees")) return frees;
  if (!strcmp(name, "pinned")) return pinned;
  if (!strcmp(name, "events")) return events;
  if (!strcmp(name, "creates")) return creates;
  if (!strcmp(name, "releases")) return releases;
  if (!strcmp(name, "records")) return records;
  if (!strcmp(name, "waits")) return waits;
  if (!strcmp(name, "queries")) return queries;
  if (!strcmp(name, "syncs")) return syncs;
  if (!strcmp(name, "calls_in_capture")) return calls_in_capture;
  return -1;
}

int cuInit(unsigned f) { (void)f; return 0; }
int cuDeviceGet(int *d, int o) { *d = o; return 0; }
int cuDeviceTotalMem_v2(size_t *t, int d) { (void)d; *t = budget; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { (void)d; *c = &budget; return 0; }
int cuCtxPushCurrent_v2(void *c) { return c == &budget ? 0 : 201; }
int cuCtxPopCurrent_v2(void **c) { *c = &budget; return 0; }
int cuCtxSynchronize(void) { if (any_capture()) { calls_in_capture++; return 900; } syncs++; memset(busy_streams, 0, sizeof busy_streams); return 0; }
int cuThreadExchangeStreamCaptureMode(int *m) { int before = mode; mode = *m; *m = before; return 0; }
int cuMemGetInfo_v2(size_t *f, size_t *t) { *f = budget - used; *t = budget; return 0; }

int cuMemAlloc_v2(uint64_t *at, size_t bytes) {
  if (any_capture() && mode != 2) { calls_in_capture++; return 900; }
  if (used + bytes > budget) return 2;
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return 2;
  for (int i = 0; i < 4096; i++) if (!blocks[i].base) { blocks[i].base = (uint64_t)p; blocks[i].bytes = bytes; break; }
  used += bytes; mallocs++; *at = (uint64_t)p; return 0;
}
int cuMemFree_v2(uint64_t at) {
  for (int i = 0; i < 4096; i++) if (blocks[i].base == at) {
    munmap((void *)at, blocks[i].bytes); used -= blocks[i].bytes; blocks[i].base = 0; frees++; return 0;
  }
  return 1;
}
int cuMemHostRegister_v2(void *p, size_t n, unsigned f) { (void)p; (void)n; (void)f; pinned++; return 0; }
int cuMemHostUnregister(void *p) { (void)p; pinned--; return 0; }

int cuEventCreate(void **e, unsigned f) { (void)f; events++; *e = calloc(1, sizeof(Event)); return 0; }
int cuEventRecord(void *e, void *s) {
  if (any_capture()) { calls_in_capture++; return 900; }
  records++; ((Event *)e)->stream = (uint64_t)s; ((Event *)e)->recorded = 1; return 0;
}
int cuEventQuery(void *e) {
  if (any_capture()) { calls_in_capture++; return 900; }
  queries++; return busy_streams[SLOT(((Event *)e)->stream)] ? 600 : 0;
}
int cuStreamWaitEvent(void *s, void *e, unsigned f) { (void)s; (void)e; (void)f; waits++; return 0; }
int cuStreamIsCapturing(void *s, int *status) { *status = capturing[SLOT(s)]; return 0; }
int cuStreamGetCaptureInfo_v2(void *s, int *status, unsigned long long *id, void *g, void *d, void *n) {
  (void)g; (void)d; (void)n; *status = capturing[SLOT(s)]; *id = capture_ids[SLOT(s)]; return 0;
}

int cuMemAddressReserve(uint64_t *at, size_t bytes, size_t a, uint64_t h, unsigned long long f) {
  (void)a; (void)h; (void)f;
  void *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return 2;
  *at = (uint64_t)p; return 0;
}
int cuMemAddressFree(uint64_t at, size_t bytes) { return munmap((void *)at, bytes); }
int cuMemCreate(unsigned long long *h, size_t bytes, const void *prop, unsigned long long f) {
  (void)f;
  if (((const int *)prop)[0] != 1 || ((const int *)prop)[2] != 1) return 1; /* pinned, on a device */
  if (used + bytes > budget) return 2;
  used += bytes; creates++; *h = next_handle; handle_bytes[next_handle++] = bytes; return 0;
}
int cuMemRelease(unsigned long long h) { used -= handle_bytes[h]; releases++; return 0; }
int cuMemMap(uint64_t at, size_t bytes, size_t off, unsigned long long h, unsigned long long f) {
  (void)off; (void)h; (void)f; return mprotect((void *)at, bytes, PROT_READ) ? 1 : 0;
}
int cuMemUnmap(uint64_t at, size_t bytes) { return mprotect((void *)at, bytes, PROT_NONE) ? 1 : 0; }
int cuMemSetAccess(uint64_t at, size_t bytes, const void *d, size_t n) {
  (void)n;
  return ((const int *)d)[2] == 3 && !mprotect((void *)at, bytes, PROT_READ | PROT_WRITE) ? 0 : 1;
}
