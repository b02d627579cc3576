"""GEMMs under test: what they declare, how they are found and called, and which of their errors are refusals."""
