"""The operations as torch knows them: ``torch.ops.gemmtune.*``, each made out of its row of the table of operations."""
