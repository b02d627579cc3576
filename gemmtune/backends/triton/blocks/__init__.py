"""Block-sparse weights: panels of rows, of which only those blocks are read and multiplied that exist."""
