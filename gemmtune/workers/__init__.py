"""The processes in which choices are verified and measured: a crash, a hang or an illegal access costs one choice."""
