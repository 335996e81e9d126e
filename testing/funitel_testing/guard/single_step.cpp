// Counts the machine instructions of one call, by the trap flag: the CPU raises SIGTRAP after each of them.
#include <csignal>
#include <cstdint>
#include <ucontext.h>

namespace {

volatile std::uint64_t counted;
std::uint64_t first, last;  // addresses that count

void trap(int, siginfo_t*, void* context) {
    auto at = static_cast<std::uint64_t>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
    counted = counted + (at >= first && at < last);
}

}  // namespace

// Instructions between two addresses that `run(engine, batch, at)` passes on this thread; `result` is what it returns.
extern "C" std::uint64_t count_instructions(
    int (*run)(void*, void*, int), void* engine, void* batch, int at, std::uint64_t from, std::uint64_t to, int* result
) {
    struct sigaction action {}, before {};
    action.sa_sigaction = trap;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGTRAP, &action, &before);
    counted = 0, first = from, last = to;
    asm volatile("pushfq; orq $0x100, (%%rsp); popfq" ::: "memory", "cc");
    *result = run(engine, batch, at);
    asm volatile("pushfq; andq $~0x100, (%%rsp); popfq" ::: "memory", "cc");
    sigaction(SIGTRAP, &before, nullptr);
    return counted;
}
