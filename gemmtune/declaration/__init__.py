"""What a GEMM, ours or anybody's, says of itself: the suite tests it by that, and the selector offers it by that."""
