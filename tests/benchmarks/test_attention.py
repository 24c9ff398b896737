"""Attention in tiles, of the benchmarks, equals the definition and the form of the model, in Triton's interpreter."""

from tests.masks.test_raster_triton import python, with_triton


@with_triton
def test_attention_in_tiles_has_the_result_and_gradients_of_the_definition():
    assert "cases" in python("-m", "tests.benchmarks.attention_cases", TRITON_INTERPRET="1")
