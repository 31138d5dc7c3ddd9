"""ExecutorAgent: owns memory, orders tasks by the bytes that they touch, launches them, replays plans."""
