"""What a run found: ``summary`` is the data, ``text``, ``as_json`` and ``html`` show it."""
