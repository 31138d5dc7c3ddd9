"""kagent's CPU device: PyTorch's own kernels, replayed over planned memory."""

__version__ = "0.1.0"
