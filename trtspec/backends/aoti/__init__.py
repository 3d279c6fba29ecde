"""AOTInductor, on the CPU."""
