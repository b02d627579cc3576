"""Block-sparse weights with small blocks times few tokens: blocks are loaded straight into registers, many of them ahead."""
