// Calls the hooks the way torch does: function pointers with torch's own C++ types, and a catch around alloc.
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <utility>

using Pool = std::pair<unsigned long long, unsigned long long>;
using Filter = std::function<bool(void *)>;

extern "C" {
// 0: memory, 1: null, 2: an exception whose text is copied out.
int call_alloc(uintptr_t alloc, size_t size, int device, void *stream, void **out, char *text, size_t room) {
  try {
    *out = reinterpret_cast<void *(*)(size_t, int, void *)>(alloc)(size, device, stream);
    return *out ? 0 : 1;
  } catch (const std::exception &e) {
    std::strncpy(text, e.what(), room - 1);
    return 2;
  }
}
void call_begin(uintptr_t f, int device, unsigned long long a, unsigned long long b) {
  std::function<void(int, Pool, Filter)> hook = reinterpret_cast<void (*)(int, Pool, Filter)>(f);
  int filter_state[16] = {1};
  hook(device, Pool{a, b}, [filter_state](void *) { return filter_state[0] == 1; });
}
void call_end(uintptr_t f, int device, unsigned long long a, unsigned long long b) {
  std::function<void(int, Pool)> hook = reinterpret_cast<void (*)(int, Pool)>(f);
  hook(device, Pool{a, b});
}
}
