"""The suite in pytest: ``test_*`` are its tests, ``session`` runs them and gathers what they find, ``terminal`` prints it."""
