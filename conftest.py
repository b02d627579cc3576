"""Nothing yet but a place: settings of pytest live in tox.ini."""
