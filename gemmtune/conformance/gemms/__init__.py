"""GEMMs under test that gemmtune itself provides."""
