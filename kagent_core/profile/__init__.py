"""ProfilerAgent: timings and tuned launch configs, kept across processes."""
