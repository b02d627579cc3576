"""Block-sparse weights with small blocks: x is streamed densely, and single warps multiply the existing blocks."""
