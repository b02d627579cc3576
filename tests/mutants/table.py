"""The table of mutants and of right kernels."""

from __future__ import annotations

from dataclasses import dataclass

from gemmtune.declaration.subject import SubjectSpec

__all__ = ["KINDS", "MUTANTS", "RIGHT", "Mutant", "Right"]

KINDS: dict[int, str] = {
    1: "last K block dropped",
    2: "mask off by one, last row clamped",
    3: "bias on the wrong axis",
    4: "16-bit accumulation, undeclared",
    5: "16-bit split-K partial sums, undeclared",
    6: "alpha, beta or a scale dropped",
    7: "an input silently narrowed",
    8: "storage offset or stride ignored",
    9: "write out of bounds, or an element left unwritten",
    10: "NaN read from C although beta is 0",
    11: "32-bit overflow of an offset",
    12: "a kernel reused for other strides or alignment",
    13: "input modified, wrong stream, stale result",
    14: "right for the first batch only",
    15: "right for whole tiles only",
    16: "wrong for transposed operands only",
    17: "epilogue applied before the last partial sum",
    18: "NaN swallowed",
    19: "int8 taken for unsigned",
    20: "a race that shows on some runs",
    21: "a scale or zero point of other elements",
    22: "packed numbers taken for others",
    23: "sums of integers in too few bits",
    24: "one of two products left out, or not all of it",
    25: "wrong where operands share memory",
    26: "zeros skipped beside NaN or infinity",
    27: "wrong past 2^13, 2^15 or 2^16 rows, columns or terms, or past a wave of tiles",
    28: "wrong at the first call only",
    29: "a result of another dtype",
    30: "bits of a row that depend on the rows beside it",
    31: "float32 by parts, but not all of them",
    32: "bits that are not those of the GEMM that it names",
    33: "subnormal numbers lost, although they are declared to be kept",
    34: "terms counted twice",
}
"""Bugs that the suite must find. Each has one or more mutants."""
_PACKAGE = "mutants"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A GEMM with one bug.

    ``killed_by`` is the property that must reject it, at level smoke or full. ``diagnosis`` must occur in one of the diagnoses, and
    is empty if the numbers do not reveal the bug. ``cuda`` marks a mutant that is right on a CPU, or may crash its process.
    """

    kind: int
    target: str
    killed_by: str
    diagnosis: str = ""
    cuda: bool = False

    @property
    def name(self) -> str:
        """Name without the package, such as ``sums:last_k_block_dropped``."""
        return self.target.removeprefix(f"{_PACKAGE}.")

    @property
    def spec(self) -> SubjectSpec:
        """Location of the mutant, for a runner."""
        return SubjectSpec(target=self.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """A right GEMM, which must pass every property."""

    target: str

    @property
    def name(self) -> str:
        """Name without the package and module."""
        return self.target.partition(":")[2]

    @property
    def spec(self) -> SubjectSpec:
        """Location of the GEMM, for a runner."""
        return SubjectSpec(target=self.target)


def _mutant(kind: int, name: str, killed_by: str, diagnosis: str = "", *, cuda: bool = False) -> Mutant:
    return Mutant(kind=kind, target=f"{_PACKAGE}.{name}", killed_by=killed_by, diagnosis=diagnosis, cuda=cuda)


MUTANTS: tuple[Mutant, ...] = (
    _mutant(1, "sums:last_k_block_dropped", "edges", "last K block"),
    _mutant(1, "sums:k_tail_dropped", "edges", "last K block"),
    _mutant(1, "sums:first_k_block_dropped", "edges", "first K block"),
    _mutant(1, "sums:remainder_of_the_splits_dropped", "bound", "last K block"),
    _mutant(2, "reading:last_row_clamped", "edges", "last row repeats the one before it"),
    _mutant(2, "reading:k_mask_off_by_one", "edges", "last K block of 1"),
    _mutant(3, "scalars:bias_along_the_rows", "bias", "wrong axis"),
    _mutant(4, "sums:float16_accumulation", "width", "accumulation in float16"),
    _mutant(4, "sums:bfloat16_accumulation", "cancellation", "accumulation in bfloat16"),
    _mutant(5, "sums:partials_in_the_result_type", "cancellation", "float16 partial sums"),
    _mutant(5, "sums:eight_partials_in_the_result_type", "cancellation", "bfloat16 partial sums"),
    _mutant(6, "scalars:alpha_dropped", "alpha-beta", "alpha dropped"),
    _mutant(6, "scalars:beta_dropped", "alpha-beta", "beta dropped"),
    _mutant(6, "scalars:beta_truncated", "alpha-beta", "bias dropped"),
    _mutant(6, "scalars:alpha_applied_to_the_bias", "alpha-beta", "alpha applied to"),
    _mutant(6, "scalars:minus_one_taken_for_one", "alpha-beta", "dropped"),
    _mutant(6, "scalars:scale_b_dropped", "bound", "scale_b dropped"),
    _mutant(7, "sums:b_read_as_bfloat16", "one-hot-a", "b read as bfloat16"),
    _mutant(7, "sums:inputs_read_as_tf32", "one-hot-a", "read as tf32"),
    _mutant(7, "sums:b_read_as_float8", "one-hot-a", "b read as float8_e5m2"),
    _mutant(7, "sums:float64_read_as_float32", "one-hot-a", "read as float32"),
    _mutant(8, "reading:address_rounded_down", "alignment", "storage offset of"),
    _mutant(8, "reading:row_stride_ignored", "layouts", "without the gap between its rows"),
    _mutant(8, "scalars:strides_of_c_ignored_without_scalars", "bias"),
    _mutant(8, "reading:strided_vector_with_odd_k_misread", "layouts", "replaced by the one before it"),
    _mutant(8, "reading:batch_stride_ignored", "layouts", "batch stride of b ignored"),
    _mutant(9, "writing:last_row_written_twice", "out-of-bounds"),
    _mutant(9, "writing:first_row_written_before_out", "out-of-bounds"),
    _mutant(9, "writing:padding_of_out_overwritten", "out-of-bounds"),
    _mutant(9, "writing:corner_unwritten", "edges", "left unwritten"),
    _mutant(9, "writing:nothing_written_without_terms", "k-zero", "left unwritten"),
    _mutant(9, "writing:gaps_of_out_ignored_for_beta_0", "out"),
    _mutant(10, "scalars:reads_c_when_beta_is_0", "beta-zero", "C is read although beta is 0"),
    _mutant(10, "scalars:reads_c_when_there_are_no_terms", "beta-zero", "C is read although beta is 0"),
    _mutant(11, "reading:offsets_of_31_bits", "large-offsets", "32-bit"),
    _mutant(12, "reading:strides_of_the_first_call", "relayout", "strides ignored"),
    _mutant(12, "reading:alignment_of_the_first_call", "relayout", "storage offset of"),
    _mutant(13, "writing:a_scaled_in_place", "inputs-unchanged"),
    _mutant(13, "writing:one_buffer_for_all", "result", "a buffer of an earlier call"),
    _mutant(13, "writing:result_found_by_address", "fresh-pointers", "earlier call"),
    _mutant(13, "writing:another_stream", "streams", cuda=True),
    _mutant(14, "reading:first_batch_only", "batch", "first matrix of b used for every batch"),
    _mutant(14, "scalars:c_of_the_first_batch", "bias", "first matrix of"),
    _mutant(14, "reading:batches_in_turn_misread", "batch"),
    _mutant(14, "reading:both_repeated_multiplied_once", "batch"),
    _mutant(15, "reading:k_tail_unmasked", "edges", "past the end of K"),
    _mutant(15, "writing:columns_of_the_last_tile_unwritten", "edges", "left unwritten"),
    _mutant(15, "writing:bottom_rows_of_zeros", "edges", "zeros in"),
    _mutant(15, "sums:last_term_dropped_for_few_rows", "edges", "last K block of 1"),
    _mutant(16, "reading:transposed_b_misread", "bound", "b read as contiguous"),
    _mutant(16, "reading:wrong_for_two_transposed", "bound", "last K block"),
    _mutant(17, "sums:alpha_before_the_last_split", "alpha-beta", "added after alpha"),
    _mutant(17, "sums:scale_before_the_last_split", "bound", "added after alpha and scales"),
    _mutant(17, "sums:bias_added_by_every_split", "alpha-beta", "once for each of 2 K splits"),
    _mutant(18, "scalars:nan_becomes_zero", "nan", "NaN swallowed"),
    _mutant(18, "scalars:relu_for_nan", "nan", "NaN swallowed"),
    _mutant(18, "scalars:infinity_clamped", "infinity", "infinity lost"),
    _mutant(18, "scalars:infinity_of_c_clamped", "infinity", "largest finite number"),
    _mutant(18, "quantized:float16_saturated", "overflow", "infinity became the largest finite number"),
    _mutant(18, "scalars:nan_of_c_lost_for_alpha_0", "nan", "NaN swallowed"),
    _mutant(18, "scalars:sums_saturated_before_alpha", "overflow"),
    _mutant(18, "sums:zeros_skipped", "nan", "NaN swallowed"),
    _mutant(19, "sums:int8_read_as_unsigned", "integers", "a read as unsigned integers"),
    _mutant(20, "sums:partial_sum_lost_sometimes", "repeatability", "differs between equal calls"),
    _mutant(20, "sums:partial_sum_twice_sometimes", "repeatability", "differs between equal calls"),
    _mutant(6, "quantized:zero_dropped", "scales", "zero points dropped"),
    _mutant(6, "quantized:zero_after_the_scale", "scales", "zero points subtracted after the scales were applied"),
    _mutant(6, "quantized:scale_applied_twice", "scales", "scale_b applied twice"),
    _mutant(7, "quantized:scale_read_as_bfloat16", "scales", "scale_b read as bfloat16"),
    _mutant(7, "quantized:factor_read_as_bfloat16", "scales", "factor read as bfloat16"),
    _mutant(19, "quantized:uint8_read_as_signed", "one-hot-a", "b read as signed integers"),
    _mutant(21, "quantized:scale_of_the_next_group", "scales", "of the next block along K"),
    _mutant(21, "quantized:first_group_for_all", "scales", "of the first block used all along K"),
    _mutant(21, "quantized:remainder_with_the_group_before", "scales", "of the block before used for the remainder of K"),
    _mutant(21, "quantized:column_scale_along_k", "scales", "scale_b on the wrong axis"),
    _mutant(21, "quantized:zero_of_the_next_column", "scales", "zero points of the next one across"),
    _mutant(21, "quantized:block_of_a_before", "scales", "scale_a of the block before along K"),
    _mutant(21, "quantized:row_scales_exchanged", "scales", "scale_a and scale_b on each other's axis"),
    _mutant(21, "quantized:factor_along_the_rows", "scales", "factor on the wrong axis"),
    _mutant(22, "quantized:nibbles_swapped", "one-hot-a", "low and high four bits exchanged"),
    _mutant(22, "quantized:low_bits_read_twice", "one-hot-a", "the low four bits read twice"),
    _mutant(22, "quantized:high_bits_read_twice", "one-hot-a", "the high four bits read twice"),
    _mutant(22, "quantized:halves_of_k_in_a_byte", "one-hot-a", "the high four bits taken for the second half of K"),
    _mutant(22, "quantized:int4_read_as_unsigned", "one-hot-a", "b read as unsigned integers"),
    _mutant(22, "quantized:uint4_read_as_signed", "one-hot-a", "b read as signed integers"),
    _mutant(23, "quantized:pairs_clamped_to_16_bits", "bound", "sums of two products clamped to 16 bits"),
    _mutant(23, "quantized:sums_in_float32", "bound"),
    _mutant(24, "two_products:second_product_left_out", "one-hot-a"),
    _mutant(24, "two_products:first_k_for_both", "integers"),
    _mutant(20, "sums:wrong_once_in_sixty", "repeatability", "differs between equal calls"),
    _mutant(25, "reading:product_with_the_transpose_misread", "shared-operands", "share memory"),
    _mutant(25, "reading:tile_read_once_for_both", "shared-operands", "share memory"),
    _mutant(25, "reading:overlap_overwritten", "shared-operands", "share memory"),
    _mutant(26, "sums:rows_of_zeros_skipped", "zeros", "NaN swallowed"),
    _mutant(26, "sums:blocks_of_zeros_skipped", "zeros", "NaN swallowed"),
    _mutant(26, "sums:ranges_of_zeros_skipped", "zeros", "NaN swallowed"),
    _mutant(27, "sums:last_term_dropped_past_8191", "long", "last K block"),
    _mutant(27, "writing:rows_past_65535_unwritten", "long", "left unwritten"),
    _mutant(27, "writing:columns_wrap_at_32768", "long"),
    _mutant(27, "writing:tiles_past_132_unwritten", "long", "left unwritten"),
    _mutant(28, "sums:wrong_at_the_first_call", "edges", "wrong at the first call"),
    _mutant(29, "writing:result_in_float32", "result", "wrong dtype"),
    _mutant(30, "bits:split_for_few_rows", "batch-invariance"),
    _mutant(30, "bits:order_of_another_tile", "batch-invariance"),
    _mutant(30, "bits:stream_k", "batch-invariance"),
    _mutant(30, "bits:promoted_by_the_tile", "batch-invariance"),
    _mutant(30, "bits:lanes_for_one_row", "batch-invariance"),
    _mutant(30, "bits:epilogue_rounded_for_few_rows", "batch-invariance"),
    _mutant(32, "bits:halves_for_one_run", "reduction"),
    _mutant(15, "writing:fifth_row_past_a_tile_zero", "edges", "zeros in"),
    _mutant(33, "reading:subnormal_b_read_as_0", "subnormal", "subnormal numbers became 0"),
    _mutant(8, "reading:leading_dimension_rounded_down", "layouts", "rounded down to 16 bytes"),
    _mutant(8, "quantized:scales_read_as_contiguous", "scales", "read as contiguous"),
    _mutant(24, "two_products:d_read_with_the_strides_of_b", "layouts"),
    _mutant(34, "sums:splits_reach_into_the_next", "bound", "terms of the next one too"),
    _mutant(13, "writing:c_returned_for_alpha_0", "result", "an input is returned"),
    _mutant(31, "parts:middle_product_dropped", "bound"),
    _mutant(31, "parts:low_product_dropped", "one-hot-a"),
    _mutant(31, "parts:rounded_instead_of_cut_off", "overflow", "NaN where there should be none"),
    _mutant(31, "parts:nan_in_a_lower_part", "infinity", "infinity became NaN"),
    _mutant(31, "parts:infinity_times_a_part_of_zero", "infinity", "infinity became NaN"),
    _mutant(1, "triton_kernels:k_tail_dropped", "edges", "last K block", cuda=True),
    _mutant(2, "triton_kernels:last_row_clamped", "edges", "last row repeats the one before it", cuda=True),
    _mutant(4, "triton_kernels:float16_accumulation", "width", "accumulation in float16", cuda=True),
    _mutant(5, "triton_kernels:partials_in_the_result_type", "cancellation", "float16 partial sums", cuda=True),
    _mutant(9, "triton_kernels:rows_written_past_the_end", "out-of-bounds", cuda=True),
    _mutant(9, "triton_kernels:element_unwritten", "edges", "left unwritten", cuda=True),
    _mutant(11, "triton_kernels:offsets_of_32_bits", "large-offsets", cuda=True),
    _mutant(13, "triton_kernels:wrong_stream", "streams", cuda=True),
    _mutant(15, "triton_kernels:k_tail_unmasked", "edges", "past the end of K", cuda=True),
    _mutant(20, "triton_kernels:race", "repeatability", cuda=True),
)
"""All mutants, first those in plain torch, then those that need a GPU."""

_OTHERS = ("bits:same_run_in_tiles", "two_products:one_accumulator", "two_products:second_product_rounded", "parts:right")
RIGHT: tuple[Right, ...] = tuple(
    Right(target=f"{_PACKAGE}.{name}")
    for name in (*(f"right:{plain}" for plain in (
        "plain", "split_in_2", "split_in_3", "split_in_7", "last_to_first", "random_order", "one_after_another", "tree",
        "each_row_by_itself",
        "blocks_of_4", "blocks_of_8", "blocks_of_16", "kahan", "columns", "as_float64", "truncating_accumulator",
        "float16_accumulation_declared", "bfloat16_accumulation_declared", "float16_partials_declared",
        "bfloat16_partials_declared", "tf32_cut_off", "tf32_rounded", "padded", "packed", "transposed_result", "no_odd_k",
        "zeros_skipped_as_declared", "weights_rounded", "zeros_taken_from_sums", "offset_to_unsigned", "sums_of_blocks_scaled",
    )), *_OTHERS)
)  # fmt: skip
