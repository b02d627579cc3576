"""Times: samples of a kernel, rounds of contenders, and the limits of the machine that they are compared with."""
