"""NVIDIA GPUs as devices of kagent."""
