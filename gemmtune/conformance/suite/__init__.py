"""The suite in pytest: ``test_*`` are its tests, ``session`` collects and reports their findings."""
