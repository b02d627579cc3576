"""Two GEMMs of somebody else's: a C++ one for CPUs and a Triton one for GPUs. gemmtune is not imported."""
