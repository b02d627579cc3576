"""Small results with long K, and few rows: clusters of blocks divide K, and add up within a cluster, then through memory."""
