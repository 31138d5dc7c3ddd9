"""The search for tile sizes and kernels that are fast on a device: ``kagent tune``."""
