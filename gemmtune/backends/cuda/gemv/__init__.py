"""One to four rows times weights of 4, 8 or 16 bits: all loads go straight to registers and start early."""
