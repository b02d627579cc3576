"""Small results of long sums, and few rows: clusters of blocks divide K, and add up within themselves, then through memory."""
