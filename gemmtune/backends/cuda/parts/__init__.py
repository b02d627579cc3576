"""float32 on tensor cores by bfloat16 parts: one operand is split in registers, the other one by a kernel that runs first."""
