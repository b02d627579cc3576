"""The plugin has the options of the conformance suite and sees to the ``gpu`` marker. The settings of pytest are in tox.ini."""

pytest_plugins = ["gemmtune.conformance.plugin"]
