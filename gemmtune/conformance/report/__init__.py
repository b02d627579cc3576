"""Reports of a run: ``summary`` is the data, ``text`` and ``as_json`` show it as text, HTML and JSON."""
