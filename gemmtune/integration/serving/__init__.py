"""Parts that the plugins of inference engines share."""
