"""Pages in host memory, and copies between it and the device."""
