"""Read and write the speculation settings of other servers."""
