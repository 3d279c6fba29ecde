"""The AOTInductor backend for the CPU."""
