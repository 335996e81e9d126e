// Counts what Python allocates: its allocators of objects and of memory are wrapped in ones that count.
#include <cstddef>
#include <cstdint>

extern "C" {

struct Allocator {  // PyMemAllocatorEx
    void* context;
    void* (*malloc)(void*, std::size_t);
    void* (*calloc)(void*, std::size_t, std::size_t);
    void* (*realloc)(void*, void*, std::size_t);
    void (*free)(void*, void*);
};

void PyMem_GetAllocator(int domain, Allocator* allocator);
void PyMem_SetAllocator(int domain, Allocator* allocator);

}

namespace {

Allocator inner[3];
std::uint64_t* counted;

void count() { __atomic_fetch_add(counted, 1, __ATOMIC_RELAXED); }

Allocator& of(void* context) { return *static_cast<Allocator*>(context); }

void* make(void* context, std::size_t size) {
    count();
    return of(context).malloc(of(context).context, size);
}

void* make_zeros(void* context, std::size_t number, std::size_t size) {
    count();
    return of(context).calloc(of(context).context, number, size);
}

void* make_again(void* context, void* memory, std::size_t size) {
    count();
    return of(context).realloc(of(context).context, memory, size);
}

void release(void* context, void* memory) { of(context).free(of(context).context, memory); }

}  // namespace

// Adds one to `*counter` for each allocation from now on, in the domains `mem` and `obj`.
extern "C" void count_allocations(std::uint64_t* counter) {
    counted = counter;
    for (int domain = 1; domain < 3; ++domain) {
        PyMem_GetAllocator(domain, &inner[domain]);
        Allocator outer {&inner[domain], make, make_zeros, make_again, release};
        PyMem_SetAllocator(domain, &outer);
    }
}
