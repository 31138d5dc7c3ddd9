"""Any OpenCL device as a device of kagent."""
