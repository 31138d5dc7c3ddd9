// Runs kernels of the emulated CUDA device: blocks one after the other, each thread of a block as a fiber.
//
// Kernels are compiled with -fsanitize=thread,alignment,bounds, and this library answers what that calls: it sees every
// access to memory before it happens. So it finds accesses outside of what a launch was given, shared memory that is
// used by two threads without a barrier between them, and vectors that are not aligned. A fault ends the launch.

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

// -- memory

bool ordered(uint32_t time, uint32_t thread) {
    if (time < machine.barrier_time) return true;
    bool same_warp = thread / WARP == machine.current / WARP;
    return same_warp && time < machine.warp_times[machine.current / WARP];
}

const char *spelled(uint32_t thread) {
    static char text[2][48];
    static int which = 0;
    const Index &index = machine.fibers[thread].index;
    char *out = text[which ^= 1];
    snprintf(out, sizeof text[0], "(%u, %u, %u)", index.x, index.y, index.z);
    return out;
}

void check_shared(Trace *traces, uint64_t offset, uint32_t nbytes, bool writes, bool atomic, uint64_t pc) {
    uint32_t self = machine.current;
    for (Trace *trace = traces + offset; trace < traces + offset + nbytes; trace++) {
        bool stale = trace->written < machine.block_start;
        if (!stale && trace->writer != self && !(atomic && trace->atomic) && !ordered(trace->written, trace->writer))
            fail(pc, 0, "%s byte %llu of shared memory, which thread %s has written, with no barrier between them",
                 writes ? "writes" : "reads", (unsigned long long)(trace - traces), spelled(trace->writer));
        if (writes) {
            const uint16_t readers[] = {trace->reader, trace->reader_before};
            const uint32_t times[] = {trace->read, trace->read_before};
            for (int n = 0; n < 2; n++) {
                if (readers[n] == NOBODY || readers[n] == self || times[n] < machine.block_start) continue;
                if (!ordered(times[n], readers[n]))
                    fail(pc, 0, "writes byte %llu of shared memory, which thread %s reads, with no barrier between them",
                         (unsigned long long)(trace - traces), spelled(readers[n]));
            }
            trace->writer = self, trace->written = machine.now, trace->atomic = atomic;
        } else {
            if (trace->reader != self) trace->reader_before = trace->reader, trace->read_before = trace->read;
            trace->reader = self, trace->read = machine.now;
        }
    }
}

const Range *range_of(uint64_t address) {
    const Range *found = machine.last_range;
    if (found && address >= found->begin && address < found->end) return found;
    size_t low = 0, high = machine.launch->range_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (machine.launch->ranges[middle].end <= address) low = middle + 1;
        else high = middle;
    }
    if (low == machine.launch->range_count || address < machine.launch->ranges[low].begin) return nullptr;
    return machine.last_range = machine.launch->ranges + low;
}

[[noreturn]] void fail_access(uint64_t address, uint32_t nbytes, bool writes, uint64_t pc) {
    const char *what = writes ? "write" : "read";
    if (address < PAGE) fail(pc, 0, "%s of %u bytes at a null pointer (%#llx)", what, nbytes, (unsigned long long)address);
    const Range *near = nullptr;
    uint64_t least = UINT64_MAX;
    for (uint64_t n = 0; n < machine.launch->range_count; n++) {
        const Range &range = machine.launch->ranges[n];
        uint64_t distance = address < range.begin ? range.begin - address : address - range.end;
        if (distance < least) least = distance, near = &range;
    }
    if (!near) fail(pc, 0, "%s of %u bytes at %#llx, but the launch was given no memory", what, nbytes,
                    (unsigned long long)address);
    fail(pc, 0, "invalid %s of %u bytes, %llu bytes %s the nearest memory that the launch was given (%llu bytes)", what,
         nbytes, (unsigned long long)least, address < near->begin ? "before" : "behind",
         (unsigned long long)(near->end - near->begin));
}

void check(const void *pointer, uint32_t nbytes, bool writes, bool atomic, uint64_t pc) {
    const Launch *launch = machine.launch;
    uint64_t address = reinterpret_cast<uint64_t>(pointer);
    if (!machine.running) return;
    uint64_t stack = reinterpret_cast<uint64_t>(me().stack);
    if (address >= stack && address < stack + STACK_NBYTES) return;
    uint64_t inside = address - reinterpret_cast<uint64_t>(launch->static_shared);
    if (inside < launch->static_nbytes)
        return check_shared(machine.static_traces.data(), inside, nbytes, writes, atomic, pc);
    inside = address - reinterpret_cast<uint64_t>(kagent_dynamic_memory);
    if (inside < launch->dynamic_nbytes) {
        if (inside + nbytes > launch->dynamic_nbytes)
            fail(pc, 0, "%s of %u bytes beyond the %llu bytes of dynamic shared memory", writes ? "write" : "read", nbytes,
                 (unsigned long long)launch->dynamic_nbytes);
        return check_shared(machine.dynamic_traces.data(), inside, nbytes, writes, atomic, pc);
    }
    if (inside < sizeof kagent_dynamic_memory)
        fail(pc, 0, "%s of %u bytes, %llu bytes into the %llu bytes of dynamic shared memory", writes ? "write" : "read",
             nbytes, (unsigned long long)inside, (unsigned long long)launch->dynamic_nbytes);
    const Range *range = range_of(address);
    // neighbouring ranges may each hold a part
    for (uint64_t at = address; at < address + nbytes; range = range_of(at)) {
        if (!range) {
            if (address >= launch->image_begin && address < launch->image_end) return;
            fail_access(address, nbytes, writes, pc);
        }
        if (writes && !(range->flags & WRITABLE)) fail(pc, 0, "writes to a tensor that the launch may only read");
        uint64_t end = address + nbytes < range->end ? address + nbytes : range->end;
        if (writes && range->marks) memset(range->marks + (at - range->begin), 1, end - at);
        at = end;
    }
}

// -- blocks

void enter_fiber() {
    machine.launch->entry(machine.launch->parameters);
    me().state = State::done;
    machine.running = false;
    swap_to(me().context, machine.scheduler);
}

void resume(uint32_t thread) {
    Fiber &fiber = machine.fibers[thread];
    machine.current = thread;
    if (fiber.state == State::fresh) {
        fiber.stack = machine.free_stacks.back();
        machine.free_stacks.pop_back();
        make_context(fiber.context, fiber.stack, STACK_NBYTES, enter_fiber);
    }
    fiber.state = State::ready;
    machine.running = true;
    swap_to(machine.scheduler, fiber.context);
    if (fiber.state == State::done) {
        machine.free_stacks.push_back(fiber.stack);
        fiber.stack = nullptr;
    }
}

void wait_here(State state) {
    me().state = state;
    machine.running = false;
    swap_to(me().context, machine.scheduler);
}

uint64_t shuffled(const Fiber &fiber, uint32_t lane, uint32_t first, uint32_t present) {
    uint32_t width = fiber.width, base = lane & ~(width - 1), last = lane | (width - 1), given = fiber.lane_argument;
    uint32_t source = lane;
    if (fiber.kind == SHUFFLE) source = base | (given & (width - 1));
    if (fiber.kind == SHUFFLE_UP && lane >= base + given) source = lane - given;
    if (fiber.kind == SHUFFLE_DOWN && lane + given <= last) source = lane + given;
    if (fiber.kind == SHUFFLE_XOR && (lane ^ given) <= last) source = lane ^ given;
    if (!(present >> source & 1)) return ~uint64_t(0);  // no such thread: undefined on a device
    if (!(fiber.mask >> source & 1)) {
        machine.current = first + lane;  // whose fault it is
        fail(0, fiber.line, "%s reads lane %u, which its mask %#x leaves out", NAMES[fiber.kind], source, fiber.mask);
    }
    return machine.fibers[first + source].value;
}

// Called by the last lane that arrives: everyone gets a result.
void meet(uint32_t first, uint32_t present) {
    Fiber &mine = me();
    uint32_t ballot = 0, alive = 0, mask = mine.mask;
    for (uint32_t lane = 0; lane < WARP; lane++) {
        if (!(present >> lane & 1)) continue;
        const Fiber &fiber = machine.fibers[first + lane];
        if (fiber.state != State::done) alive |= 1u << lane;
        if ((mask >> lane & 1) && fiber.value) ballot |= 1u << lane;
    }
    for (uint32_t lane = 0; lane < WARP; lane++) {
        if (!(mask & present & 1u << lane)) continue;
        Fiber &fiber = machine.fibers[first + lane];
        fiber.result = fiber.kind >= SHUFFLE ? shuffled(fiber, lane, first, present) : ballot;
        fiber.state = State::ready;
    }
    if ((mask & alive) == alive) machine.warp_times[first / WARP] = ++machine.now;
}

uint32_t lanes_of(uint32_t first) {
    uint32_t count = machine.threads - first;
    return count >= WARP ? ~0u : (1u << count) - 1;
}

uint64_t warp_operation(Kind kind, uint32_t line, uint32_t mask, uint64_t value, uint32_t argument, uint32_t width) {
    Fiber &mine = me();
    uint32_t lane = machine.current % WARP, first = machine.current - lane, present = lanes_of(first);
    if (!(mask >> lane & 1)) fail(0, line, "%s with mask %#x, which leaves out lane %u that calls it", NAMES[kind], mask, lane);
    if (kind >= SHUFFLE && (width == 0 || width > WARP || (width & (width - 1))))
        fail(0, line, "%s with width %u, expected a power of two up to 32", NAMES[kind], width);
    mine.kind = kind, mine.line = line, mine.mask = mask, mine.value = value;
    mine.lane_argument = argument, mine.width = width;
    bool complete = true;
    for (uint32_t other = 0; other < WARP; other++) {
        if (!(mask & present & 1u << other) || other == lane) continue;
        const Fiber &fiber = machine.fibers[first + other];
        if (fiber.state == State::done)
            fail(0, line, "%s with mask %#x waits for lane %u, whose thread has ended", NAMES[kind], mask, other);
        if (fiber.state == State::at_warp && (fiber.kind != kind || fiber.mask != mask || fiber.line != line))
            fail(0, line, "%s with mask %#x waits for lane %u, which is at %s with mask %#x in line %u", NAMES[kind], mask,
                 other, NAMES[fiber.kind], fiber.mask, fiber.line);
        complete = complete && fiber.state == State::at_warp;
    }
    if (complete) meet(first, present);
    else wait_here(State::at_warp);
    return mine.result;
}

uint32_t barrier(Kind kind, uint32_t line, uint32_t predicate) {
    Fiber &mine = me();
    mine.kind = kind, mine.line = line, mine.value = predicate;
    wait_here(State::at_barrier);
    return uint32_t(mine.result);
}

// Nobody can go on: opens the barrier that all have reached, else says who is missing.
bool open_barrier() {
    uint32_t waiting = NOBODY, count = 0;
    for (uint32_t n = 0; n < machine.threads; n++) {
        if (machine.fibers[n].state == State::at_warp) {
            const Fiber &fiber = machine.fibers[n];
            blame(n, fiber.line, "waits at %s with mask %#x for other threads of its warp, which never come",
                  NAMES[fiber.kind], fiber.mask);
            return false;
        }
        if (machine.fibers[n].state == State::at_barrier && waiting == NOBODY) waiting = n;
    }
    const Fiber &first = machine.fibers[waiting];
    for (uint32_t n = 0; n < machine.threads; n++) {
        const Fiber &fiber = machine.fibers[n];
        if (fiber.state == State::done) {
            blame(n, first.line, "ends without reaching the barrier (%s) at which thread %s waits", NAMES[first.kind],
                  spelled(waiting));
            return false;
        }
        if (fiber.line != first.line || fiber.kind != first.kind) {
            blame(n, fiber.line, "waits at another barrier (%s) than thread %s, which is at %s in line %u",
                  NAMES[fiber.kind], spelled(waiting), NAMES[first.kind], first.line);
            return false;
        }
        count += fiber.value != 0;
    }
    for (uint32_t n = 0; n < machine.threads; n++) {
        Fiber &fiber = machine.fibers[n];
        fiber.result = first.kind == AND ? count == machine.threads : first.kind == OR ? count != 0 : count;
        fiber.state = State::ready;
    }
    machine.barrier_time = ++machine.now;
    return true;
}

uint64_t next_random(uint64_t &state) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

std::vector<uint32_t> permuted(uint64_t count, uint64_t &random) {
    std::vector<uint32_t> order(count);
    for (uint64_t n = 0; n < count; n++) order[n] = uint32_t(n);
    if (random)
        for (uint64_t n = count; n > 1; n--) std::swap(order[n - 1], order[next_random(random) % n]);
    return order;
}

bool run_block(const std::vector<uint32_t> &order) {
    const Launch &launch = *machine.launch;
    machine.barrier_time = machine.block_start = ++machine.now;
    memset(launch.static_shared, POISON, launch.static_nbytes);
    memset(kagent_dynamic_memory, POISON, launch.dynamic_nbytes);
    for (uint32_t n = 0; n < machine.threads; n++) machine.fibers[n].state = State::fresh;
    for (uint32_t ended = 0;;) {
        bool moved = false;
        for (uint32_t thread : order) {
            State state = machine.fibers[thread].state;
            if (state != State::fresh && state != State::ready) continue;
            resume(thread);
            if (machine.fault->happened) return false;
            ended += machine.fibers[thread].state == State::done;
            moved = true;
        }
        if (ended == machine.threads) return true;
        if (!moved && !open_barrier()) return false;
    }
}

void make_stacks() {
    size_t each = STACK_NBYTES + PAGE, total = each * MOST_THREADS;
    if (!machine.stacks) {
        void *memory = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return;
        machine.stacks = static_cast<uint8_t *>(memory);
        for (uint32_t n = 0; n < MOST_THREADS; n++) mprotect(machine.stacks + n * each, PAGE, PROT_NONE);
    }
    machine.free_stacks.clear();
    for (uint32_t n = MOST_THREADS; n-- > 0;) machine.free_stacks.push_back(machine.stacks + n * each + PAGE);
}

// -- signals

void on_signal(int number, siginfo_t *info, void *where) {
    if (!machine.running || !pthread_equal(machine.thread, pthread_self())) {  // none of a kernel's
        signal(number, SIG_DFL);
        return;
    }
    uint64_t address = reinterpret_cast<uint64_t>(info->si_addr), stack = reinterpret_cast<uint64_t>(me().stack);
    Fault &fault = *machine.fault;
    fault.happened = fault.has_thread = 1;
#if defined(__x86_64__)
    fault.pc = uint64_t(static_cast<ucontext_t *>(where)->uc_mcontext.gregs[REG_RIP]) + 1;  // as if it were a call
#endif
    fault.block[0] = machine.block.x, fault.block[1] = machine.block.y, fault.block[2] = machine.block.z;
    fault.thread[0] = me().index.x, fault.thread[1] = me().index.y, fault.thread[2] = me().index.z;
    if (number == SIGFPE)
        snprintf(fault.text, sizeof fault.text, "divides an integer by zero, or by -1 what has no negative");
    else if (address >= stack - PAGE && address < stack)
        snprintf(fault.text, sizeof fault.text, "needs more than %zu bytes of local memory", STACK_NBYTES);
    else
        snprintf(fault.text, sizeof fault.text, "touches memory at %#llx, which nobody has", (unsigned long long)address);
    siglongjmp(machine.escape, 1);
}

struct Signals {
    static constexpr int numbers[] = {SIGSEGV, SIGBUS, SIGFPE};
    struct sigaction before[3];
    stack_t stack_before;
    std::vector<uint8_t> stack = std::vector<uint8_t>(64 * 1024);

    Signals() {
        stack_t alternate{};
        alternate.ss_sp = stack.data(), alternate.ss_size = stack.size();
        sigaltstack(&alternate, &stack_before);
        struct sigaction action {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        for (int n = 0; n < 3; n++) sigaction(numbers[n], &action, &before[n]);
    }
    ~Signals() {
        for (int n = 0; n < 3; n++) sigaction(numbers[n], &before[n], nullptr);
        sigaltstack(&stack_before, nullptr);
    }
};

}  // namespace

extern "C" {

// One launch at a time, which the caller sees to. The fault says whether it went well.
void kagent_launch(void *const *table) {
    const Launch *launch = static_cast<const Launch *>(table[0]);
    Fault *fault = static_cast<Fault *>(table[1]);
    machine.thread = pthread_self();
    *fault = Fault{};
    machine.launch = launch, machine.fault = fault, machine.last_range = nullptr;
    machine.threads = launch->block[0] * launch->block[1] * launch->block[2];
    machine.now = 0, machine.running = false;
    machine.static_traces.assign(launch->static_nbytes, Trace{});
    machine.dynamic_traces.assign(launch->dynamic_nbytes, Trace{});
    memset(machine.warp_times, 0, sizeof machine.warp_times);
    make_stacks();
    if (!machine.stacks) {
        fault->happened = 1;
        snprintf(fault->text, sizeof fault->text, "no memory for the stacks of %u threads", MOST_THREADS);
        return;
    }
    for (uint32_t n = 0; n < machine.threads; n++)
        machine.fibers[n].index = {n % launch->block[0], n / launch->block[0] % launch->block[1],
                                   n / launch->block[0] / launch->block[1]};
    uint64_t random = launch->seed;
    const uint64_t blocks = uint64_t(launch->grid[0]) * launch->grid[1] * launch->grid[2];
    std::vector<uint32_t> order = permuted(machine.threads, random), block_order = permuted(blocks, random);
    Signals signals;
    if (sigsetjmp(machine.escape, 1) == 0) {
        for (uint32_t n : block_order) {
            machine.block = {n % launch->grid[0], n / launch->grid[0] % launch->grid[1],
                             n / launch->grid[0] / launch->grid[1]};
            if (!run_block(order)) break;
        }
    }
    machine.running = false;
}

// Where the library of a function lies (begin, end), and the shared memory that it declares, which is its thread-local
// variables as the calling thread sees them (address, bytes).
void kagent_image(uint64_t *found) {
    struct Search {
        uint64_t inside, *found;
    } search{found[0], found};
    dl_iterate_phdr(
        [](dl_phdr_info *info, size_t, void *given) {
            auto &search = *static_cast<Search *>(given);
            uint64_t begin = UINT64_MAX, end = 0, tls = 0;
            for (int n = 0; n < info->dlpi_phnum; n++) {
                const auto &header = info->dlpi_phdr[n];
                uint64_t at = info->dlpi_addr + header.p_vaddr;
                if (header.p_type == PT_TLS) tls = header.p_memsz;
                if (header.p_type != PT_LOAD) continue;
                if (at < begin) begin = at;
                if (at + header.p_memsz > end) end = at + header.p_memsz;
            }
            if (search.inside < begin || search.inside >= end) return 0;
            search.found[0] = begin, search.found[1] = end;
            search.found[2] = reinterpret_cast<uint64_t>(info->dlpi_tls_data), search.found[3] = tls;
            return 1;
        },
        &search);
}

Index kagent_thread_index() { return me().index; }
Index kagent_block_index() { return machine.block; }
Index kagent_block_size() { return {machine.launch->block[0], machine.launch->block[1], machine.launch->block[2]}; }
Index kagent_grid_size() { return {machine.launch->grid[0], machine.launch->grid[1], machine.launch->grid[2]}; }
// every launch's dynamic shared memory: as much as a block can have on any device, and more to see what goes beyond
alignas(1024) unsigned char kagent_dynamic_memory[512 * 1024];
uint32_t kagent_lane() { return machine.current % WARP; }
uint32_t kagent_barrier(uint32_t kind, uint32_t line, uint32_t predicate) { return barrier(Kind(kind), line, predicate); }
uint64_t kagent_warp(uint32_t kind, uint32_t line, uint32_t mask, uint64_t value, uint32_t argument, uint32_t width) {
    return warp_operation(Kind(kind), line, mask, value, argument, width);
}
void kagent_atomic(void *place, uint32_t nbytes) {
    uint64_t pc = reinterpret_cast<uint64_t>(__builtin_return_address(0));
    if (reinterpret_cast<uint64_t>(place) % nbytes) fail(pc, 0, "an atomic operation on %u bytes that are not aligned", nbytes);
    check(place, nbytes, true, true, pc);
}
[[noreturn]] void kagent_trap(uint32_t line, const char *what) { fail(0, line, "%s", what); }

// -- what instrumented code calls

#define PC reinterpret_cast<uint64_t>(__builtin_return_address(0))
#define ACCESS(N)                                                                        \
    void __tsan_read##N(void *p) { check(p, N, false, false, PC); }                      \
    void __tsan_write##N(void *p) { check(p, N, true, false, PC); }                      \
    void __tsan_unaligned_read##N(void *p) { check(p, N, false, false, PC); }            \
    void __tsan_unaligned_write##N(void *p) { check(p, N, true, false, PC); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
void __tsan_read_range(void *p, size_t n) { check(p, uint32_t(n), false, false, PC); }
void __tsan_write_range(void *p, size_t n) { check(p, uint32_t(n), true, false, PC); }
void *__tsan_memset(void *to, int value, size_t n) {  // clang's, where gcc writes ranges
    check(to, uint32_t(n), true, false, PC);
    return memset(to, value, n);
}
void *__tsan_memcpy(void *to, const void *from, size_t n) {
    check(from, uint32_t(n), false, false, PC);
    check(to, uint32_t(n), true, false, PC);
    return memcpy(to, from, n);
}
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}

struct SourceLocation {
    const char *file;
    uint32_t line, column;
};
struct TypeDescriptor {
    uint16_t kind, info;
    char name[1];
};
struct OutOfBounds {
    SourceLocation place;
    const TypeDescriptor *array, *index;
};
struct TypeMismatch {
    SourceLocation place;
    const TypeDescriptor *type;
    uint8_t log_alignment, kind;
};
void __ubsan_handle_out_of_bounds(OutOfBounds *data, uint64_t index) {
    fail(0, data->place.line, "index %lld is outside of an array %s", (long long)index, data->array->name);
}
void __ubsan_handle_type_mismatch_v1(TypeMismatch *data, uint64_t address) {
    fail(0, data->place.line, "access to a %s at %#llx, which is not aligned to its %u bytes", data->type->name,
         (unsigned long long)address, 1u << data->log_alignment);
}
}
