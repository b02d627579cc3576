"""Block-sparse weights of small blocks: x is streamed dense, and single warps multiply the blocks that exist."""
