"""ExtractorAgent: placed operators become self-contained KernelTasks. It allocates nothing and runs nothing."""
