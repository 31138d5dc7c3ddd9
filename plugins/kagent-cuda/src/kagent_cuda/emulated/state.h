// What the machine knows: the launch, its threads as fibers, and the first fault. Put before accesses.h and machine.cpp.

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <vector>
#include <ucontext.h>

extern "C" unsigned char kagent_dynamic_memory[512 * 1024];

namespace {

constexpr int POISON = 0xff;  // NaN as a float of any size, -1 as an integer
constexpr uint32_t WARP = 32, MOST_THREADS = 1024, NOBODY = 0xffff;
constexpr size_t STACK_NBYTES = 768 * 1024, PAGE = 4096;
constexpr uint32_t WRITABLE = 1;

struct Range {  // memory that a launch may use; `marks` has a byte per byte, which is set where it is written
    uint64_t begin, end;
    uint8_t *marks;
    uint64_t flags;
};

struct Launch {
    void (*entry)(const void *);
    const void *parameters;
    uint64_t dynamic_nbytes;
    uint8_t *static_shared;
    uint64_t static_nbytes;
    const Range *ranges;
    uint64_t range_count;
    uint64_t image_begin, image_end;  // the kernel's library, with its constants
    uint64_t seed;                    // of the order in which blocks and threads run
    uint32_t grid[3], block[3];
};

struct Fault {
    uint32_t happened, has_thread;
    uint32_t block[3], thread[3];
    uint64_t pc;
    uint32_t line, reserved;
    char text[480];
};

struct Index {
    uint32_t x, y, z;
};

enum class State : uint8_t { fresh, ready, at_barrier, at_warp, done };
enum Kind : uint32_t { SYNC, COUNT, AND, OR, WARP_SYNC, BALLOT, SHUFFLE, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR };
const char *const NAMES[] = {"__syncthreads", "__syncthreads_count", "__syncthreads_and", "__syncthreads_or",
                             "__syncwarp",    "a vote",              "__shfl_sync",       "__shfl_up_sync",
                             "__shfl_down_sync", "__shfl_xor_sync"};

#if defined(__x86_64__)
struct Context {
    void *sp;
};
extern "C" void kagent_switch(void **save, void *load);
asm(".text\n.globl kagent_switch\n.type kagent_switch,@function\nkagent_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp,(%rdi)\n  movq %rsi,%rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n"
    ".size kagent_switch,.-kagent_switch\n");
void swap_to(Context &from, Context &to) { kagent_switch(&from.sp, to.sp); }
void make_context(Context &context, uint8_t *stack, size_t nbytes, void (*start)()) {
    void **top = reinterpret_cast<void **>(reinterpret_cast<uintptr_t>(stack + nbytes) & ~uintptr_t(15));
    *--top = nullptr;                             // where a caller's frame would be
    *--top = reinterpret_cast<void *>(start);     // what the first switch returns to
    for (int n = 0; n < 6; n++) *--top = nullptr;  // the saved registers
    context.sp = top;
}
#else
struct Context {
    ucontext_t context;
};
void swap_to(Context &from, Context &to) { swapcontext(&from.context, &to.context); }
void make_context(Context &context, uint8_t *stack, size_t nbytes, void (*start)()) {
    getcontext(&context.context);
    context.context.uc_stack.ss_sp = stack;
    context.context.uc_stack.ss_size = nbytes;
    context.context.uc_link = nullptr;
    makecontext(&context.context, start, 0);
}
#endif

struct Fiber {
    Context context;
    uint8_t *stack = nullptr;
    State state = State::fresh;
    Index index{};
    Kind kind{};  // what it waits at
    uint32_t line = 0, mask = 0, lane_argument = 0, width = 0;
    uint64_t value = 0, result = 0;
};

struct Trace {  // of one byte of shared memory: who wrote it and who read it last, and when
    uint32_t written = 0, read = 0, read_before = 0;
    uint16_t writer = NOBODY, reader = NOBODY, reader_before = NOBODY, atomic = 0;
};

struct Machine {
    const Launch *launch = nullptr;
    Fault *fault = nullptr;
    Fiber fibers[MOST_THREADS];
    uint32_t threads = 0, current = 0;
    Index block{};
    Context scheduler;
    bool running = false;       // a fiber runs, and no code of the scheduler
    uint8_t *stacks = nullptr;  // of all fibers, each behind a page that nobody may touch
    std::vector<uint8_t *> free_stacks;
    std::vector<Trace> static_traces, dynamic_traces;
    uint32_t now = 0, barrier_time = 0, block_start = 0;
    uint32_t warp_times[MOST_THREADS / WARP] = {};
    const Range *last_range = nullptr;
    sigjmp_buf escape;
    pthread_t thread;  // of the host, which runs the launch
};

Machine machine;

Fiber &me() { return machine.fibers[machine.current]; }

[[noreturn]] void end_launch() {
    machine.running = false;
    swap_to(me().context, machine.scheduler);
    __builtin_unreachable();
}

void describe(uint64_t pc, bool with_thread, const char *format, va_list arguments) {
    Fault &fault = *machine.fault;
    fault.happened = 1;
    fault.has_thread = with_thread;
    fault.pc = pc;
    fault.block[0] = machine.block.x, fault.block[1] = machine.block.y, fault.block[2] = machine.block.z;
    fault.thread[0] = me().index.x, fault.thread[1] = me().index.y, fault.thread[2] = me().index.z;
    vsnprintf(fault.text, sizeof fault.text, format, arguments);
}

// called by a fiber: ends the launch
[[noreturn]] __attribute__((format(printf, 3, 4))) void fail(uint64_t pc, uint32_t line, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    machine.fault->line = line;
    describe(pc, true, format, arguments);
    va_end(arguments);
    end_launch();
}

// called by the scheduler, about a thread
__attribute__((format(printf, 3, 4))) void blame(uint32_t thread, uint32_t line, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    machine.current = thread;
    machine.fault->line = line;
    describe(0, true, format, arguments);
    va_end(arguments);
}

}  // namespace
