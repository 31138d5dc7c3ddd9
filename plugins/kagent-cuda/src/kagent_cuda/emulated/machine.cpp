// Runs kernels of the emulated CUDA device: blocks one after the other, each thread of a block as a fiber.
//
// Kernels are compiled with -fsanitize=thread,alignment,bounds, and this library answers what that calls: it sees every
// access to memory before it happens. So it finds accesses outside of what a launch was given, shared memory that is
// used by two threads without a barrier between them, and vectors that are not aligned. A fault ends the launch.

namespace {

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
