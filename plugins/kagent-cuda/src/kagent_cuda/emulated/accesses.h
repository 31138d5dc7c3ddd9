// What is checked before every access to memory. Put behind state.h.

namespace {

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

}  // namespace
