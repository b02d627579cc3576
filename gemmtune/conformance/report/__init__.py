"""Reports of a run: ``summary`` is the data, ``text``, ``page`` and ``as_json`` show it as text, HTML and JSON."""
