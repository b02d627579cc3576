"""One to four rows times weights of four, eight or sixteen bits: loads straight into registers, all of them as early as can be."""
